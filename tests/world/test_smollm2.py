"""Real weights on real conversations: SmolLM2-135M-Instruct learns to speak as the plays do, and its export answers in plain transformers."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT, Cli


@pytest.fixture
def plays(tmp_path):
    """The example's run file beside conversations made from the shipped plays."""
    made = tmp_path / "runs/plays-chat.jsonl"
    subprocess.run(
        [
            sys.executable,
            ROOT / "examples/plays_to_chat.py",
            "--out",
            made,
            *sorted((ROOT / "examples/data/plays").glob("*.txt")),
        ],
        check=True,
        timeout=60,
        capture_output=True,
    )
    lines = made.read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(lines[100:140]) + "\n")
    (tmp_path / "held-out.jsonl").write_text("\n".join(lines[1000:1008]) + "\n")
    (tmp_path / "run.yaml").write_text((ROOT / "examples/finetune-smollm2.yaml").read_text())
    return tmp_path


def answers(folder, question):
    done = subprocess.run(
        [sys.executable, ROOT / "examples/generate.py", folder, question, "--chat", "--tokens", "12"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_few_steps_lower_the_loss_on_held_out_conversations_and_the_export_answers(smollm2, plays):
    cli = Cli(plays)
    out = cli.json(
        "train",
        "run.yaml",
        "--set",
        f"model={smollm2}",
        "--set",
        "data={train: few.jsonl, validation: held-out.jsonl, format: chat, seq_len: 128}",
        "--set",
        "global_batch=2",
        "--set",
        "steps=4",
        "--set",
        "eval_every=4",
        limit_s=600,
    )
    assert out["validation_loss"] < out["untrained_validation_loss"] < 6
    predicted = out["predicted_peak_allocated_bytes"]
    assert out["measured_peak_allocated_bytes"] == pytest.approx([predicted, predicted], rel=0.05)
    exported = cli.json("export", "runs/smollm2-plays", "out", limit_s=300)
    assert (exported["num_params"], exported["dtype"]) == (134_515_008, "bfloat16"), "the dtype of the source"
    assert json.loads((plays / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert len(answers(plays / "out", "What is the capital of France?")) > 3


@pytest.mark.slow
def test_the_example_as_it_ships_lowers_the_held_out_loss_by_a_tenth(smollm2, plays):
    out = Cli(plays).json("train", "run.yaml", "--set", f"model={smollm2}", limit_s=3000)
    assert out["steps"] == 40
    assert out["validation_loss"] < 0.9 * out["untrained_validation_loss"]
