"""What pip reads: the package's declared needs, the lock, and how fast the command line answers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LOCK = (ROOT / "requirements.lock").read_text("utf-8")


def normal(name):
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~;\[ ]", name, maxsplit=1)[0]).lower()


def test_the_lock_names_no_address_and_no_option_of_pip():
    assert "://" not in LOCK and "file:" not in LOCK
    assert not [line for line in LOCK.splitlines() if line.startswith("-")]
    assert not re.search(r"^\s*(?!--hash=sha256:[0-9a-f]{64}( \\)?$|#)\S*/", LOCK, re.M), "no path"


@pytest.mark.parametrize("group", ["runtime", "build", "trackers", "dev"])
def test_the_lock_pins_everything_that_is_asked_for(group):
    extras = PROJECT["project"]["optional-dependencies"]
    asked = {"runtime": PROJECT["project"]["dependencies"], "build": PROJECT["build-system"]["requires"], **extras}[group]
    pinned = {normal(line) for line in LOCK.splitlines() if "==" in line and not line.startswith((" ", "#"))}
    assert not {normal(one) for one in asked} - pinned


def test_what_the_package_imports_it_asks_for():
    asked = {normal(one).replace("-", "_") for one in PROJECT["project"]["dependencies"]}
    asked |= {normal(one) for one in PROJECT["project"]["optional-dependencies"]["trackers"]} | {"shardwise", "yaml"}
    asked |= {"pydantic_core"} if "pydantic" in asked else set()  # its errors; one version goes with one pydantic
    used = {}
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            used |= {name.split(".")[0]: file.name for name in names}
    assert not {name: file for name, file in used.items() if name not in sys.stdlib_module_names and name not in asked}


def test_help_comes_in_under_half_a_second_and_without_torch():
    code = "import sys\ntry:\n    from shardwise.cli import main\n    main(['--help'])\nexcept SystemExit:\n    pass\nsys.exit('torch' in sys.modules)"
    times = []
    for _ in range(3):
        start = time.monotonic()
        assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0
        times.append(time.monotonic() - start)
    assert min(times) < 0.5, f"the fastest of three took {min(times):.2f} s"


def test_ci_is_make_test_and_nothing_cleverer():
    lines = (ROOT / ".ci/run").read_text("utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and lines[-1] == "make test" and len(lines) <= 5
