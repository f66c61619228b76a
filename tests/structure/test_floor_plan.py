"""The rules the tree keeps: imports go down, one owner for each dangerous thing, small files, nothing of this machine in a committed file."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "shardwise"

# Lowest first. A room may import what stands before it.
FLOORS = [
    ["units", "errors", "hardware", "hub"],
    ["spec", "config", "source"],
    ["runfile", "rundir", "layout", "faults"],
    ["ledger", "plan", "choose"],
    ["loss", "meter"],
    ["data", "model", "optim"],
    ["trace", "sharding", "checkpoint", "world"],
    ["step", "job", "planner"],
    ["train", "export"],
    ["prepare"],
    ["preload", "start", "console"],
    ["cli"],
    ["__main__"],
]
ROOMS = [room for floor in FLOORS for room in floor]
TORCH_FREE = [
    "units",
    "errors",
    "hardware",
    "spec",
    "config",
    "source",
    "runfile",
    "rundir",
    "layout",
    "faults",
    "ledger",
    "plan",
    "choose",
    "meter",
    "job",
    "world",
    "start",
    "console",
    "cli",
]


def files(room):
    path = PACKAGE / room
    return sorted(path.glob("*.py")) if path.is_dir() else [PACKAGE / f"{room}.py"]


def imported(file):
    """(module as written from the package's root, whether only types need it) of every import."""
    found = []
    tree = ast.parse(file.read_text("utf-8"))
    typing_only = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for n in ast.walk(node)
    }
    up = len(file.relative_to(PACKAGE).parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level == up:  # from the package itself
                names = [node.module] if node.module else [alias.name for alias in node.names]
                found += [(f"shardwise.{name}", id(node) in typing_only) for name in names]
            elif node.level == 0:
                found.append((node.module, id(node) in typing_only))
    return found


def test_the_floor_plan_names_every_room_once():
    there = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").is_file())} - {
        "__init__"
    }
    assert sorted(ROOMS) == sorted(there)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down_only(room):
    floor = next(i for i, rooms in enumerate(FLOORS) if room in rooms)
    allowed = {r for rooms in FLOORS[:floor] for r in rooms} | set(FLOORS[floor]) - {room} | {room, "__version__"}
    used = {name.split(".")[1] for file in files(room) for name, _ in imported(file) if name.startswith("shardwise.")}
    assert used <= allowed, f"{room} looks up the stairs at {sorted(used - allowed)}"


@pytest.mark.parametrize(
    ("library", "owners"),
    [
        ("torch.distributed.fsdp", {"sharding", "trace", "preload"}),  # trace shards on a fake group to see what FSDP allocates
        ("torch.distributed.checkpoint", {"checkpoint", "export", "preload"}),
    ],
)
def test_dangerous_libraries_have_their_owners(library, owners):
    users = {room for room in ROOMS for file in files(room) if any(name.startswith(library) for name, _ in imported(file))}
    assert users <= owners


def test_only_world_makes_process_groups():
    users = {room for room in ROOMS for file in files(room) if "init_process_group" in file.read_text("utf-8")}
    assert users <= {"world", "trace"}


def test_files_stay_small():
    lines = {
        str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines())
        for folder in ("src", "tests", "examples")
        for p in (ROOT / folder).rglob("*.py")
    }
    assert not {name: count for name, count in lines.items() if count > 600}


@pytest.mark.parametrize("room", TORCH_FREE)
def test_the_command_line_side_imports_no_torch(room):
    code = f"import sys, shardwise.{room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("verb", ["", "train", "export", "checkpoint"])
def test_help_fits_a_screen_and_a_verb_has_at_most_ten_flags(verb):
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *([verb] if verb else []), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"COLUMNS": "80", "PATH": ""},
    )
    lines = done.stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert len(set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", done.stdout, re.M)) - {"--help"}) <= 10


def tracked():
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_no_committed_file_names_a_registry_or_a_path_of_this_machine():
    hosts = ["python" + "hosted.org", "py" + "pi.org", "/opt/" + "wheels", "/" + "work/", "registry." + "npmjs"]
    bad = [
        f"{file.relative_to(ROOT)}: {host}"
        for file in tracked()
        for host in hosts
        if host in file.read_text("utf-8", errors="ignore")
    ]
    assert not bad


def test_every_pin_of_the_lock_has_a_hash():
    pins = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text("utf-8").strip())
    assert len(pins) > 50 and all("==" in pin and "--hash=sha256:" in pin for pin in pins)
