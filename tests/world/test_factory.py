"""A user's own module is sharded and trained like any other."""

import shutil
from pathlib import Path

import pytest

from tests.world.test_train import metrics

SETS = ["--set", "tokenizer={train_bpe: 300}"]


@pytest.fixture
def factories(project):
    shutil.copy(Path(__file__).parent / "factories.py", project / "factories.py")
    return project


def test_a_module_with_its_loss_and_one_that_is_its_loss_train_alike_on_1_and_2_ranks(cli, factories):
    losses = []
    for name, ranks in (("with_loss", 2), ("own_forward", 2), ("with_loss", 1)):
        out = cli.json(
            "train",
            "run.yaml",
            *SETS,
            "--set",
            f"model={{factory: 'factories:{name}'}}",
            "--set",
            f"run_dir=run{len(losses)}",
            "--workers",
            str(ranks),
        )
        assert out["final_loss"] < 0.97 * metrics(factories / f"run{len(losses)}")[0]
        losses.append(metrics(factories / f"run{len(losses)}"))
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_parameters_that_nothing_fills_are_refused_by_name(cli, factories):
    out = cli("train", "run.yaml", *SETS, "--set", "model={factory: 'factories:unfillable'}")
    assert out.returncode == 2, out.stderr
    assert "error: `the module itself` of `factories:unfillable` has parameters\n       and no `reset_parameters`\n" in out.stderr
