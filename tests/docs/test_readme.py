"""What the README and docs say is true: every shell block runs, every path and verb named exists, the tree is the tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from shardwise.cli import parser

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, re.S)


def test_every_shell_block_runs(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "run.yaml").write_text(blocks("yaml")[0])
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    for block in blocks("sh"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/guide/checkpoints/step-30").is_dir() and (tmp_path / "runs/guide/export/model.safetensors").is_file()


def test_the_make_targets_named_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"^make ([\w-]+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_tree_names_every_room_and_nothing_else():
    tree = README.split("## The tree")[1]
    named = {name.rstrip("/").removesuffix(".py") for name in re.findall(r"^  ([\w/]+(?:\.py)?)\s", tree, re.M)}
    there = {p.stem for p in (ROOT / "src/shardwise").iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()} - {
        "__init__",
        "__main__",
    }
    assert named == there


def test_every_path_in_backquotes_exists():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for name in re.findall(r"`((?:examples|docs|tests|src)/[\w./-]+)`", page.read_text("utf-8")):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_every_verb_and_flag_named_exists():
    verbs = next(a for a in parser()._actions if a.dest == "verb").choices
    for line in "".join(blocks("sh")).splitlines():
        words = line.split()[1:]
        if not line.startswith("shardwise "):
            continue
        flags = {option for action in verbs[words[0]]._actions for option in action.option_strings}
        assert {w for w in words if w.startswith("--")} <= flags
