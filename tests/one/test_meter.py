"""Peak memory is what it is: a known pattern of allocations is measured to its byte count, by every way there is on CPU."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from shardwise import meter

MIB = 2**20

# Peak of `busy`: 8 before + 16 + 24 held at once. The 16 are freed on another thread, so that who misses that free ends 16 too high in `after`.
PATTERN = """
import json, sys, threading
import torch
from shardwise.meter import Meter
torch.set_num_threads(1)
MIB = 2**20
held = torch.empty(4 * MIB, dtype=torch.uint8)  # before the start: no part of the figures
measure = Meter("cpu")
measure.start()
before = torch.empty(8 * MIB, dtype=torch.uint8)
with measure.window("busy"):
    box = [torch.empty(16 * MIB, dtype=torch.uint8)]
    more = torch.empty(24 * MIB, dtype=torch.uint8)
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    del more
level = measure.now_bytes()
with measure.window("after"):
    blocks = [torch.empty(MIB, dtype=torch.uint8) for _ in range(8)]
    del blocks
with measure.window("freed"):
    del before
    again = torch.empty(2 * MIB, dtype=torch.uint8)
for size in (1, 5, 3):
    with measure.window("thrice"):
        torch.empty(size * MIB, dtype=torch.uint8)
print(json.dumps({"kind": measure.kind, "how": measure.how, "level": level, "peaks": measure.peaks}))
"""


def ran(code, **changes):
    env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, **changes}, capture_output=True, text=True, timeout=120, check=True
    )
    # torch's log line on the limit of the profiler that `freed` shows.
    assert all("was allocated before the profiling started" in line for line in done.stderr.splitlines()), done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    made = meter.livebytes_library(tmp_path_factory.mktemp("cache"))
    if made is None:
        pytest.skip("no C compiler on this machine, so livebytes cannot be built")
    return made


@pytest.mark.parametrize("way", ["livebytes", "profiler"])
def test_a_known_pattern_is_measured_within_a_percent(way, request):
    changes = {"LD_PRELOAD": str(request.getfixturevalue("library"))} if way == "livebytes" else {}
    found = json.loads(ran(PATTERN, **changes))
    assert found["kind"] == way and way in found["how"]
    assert found["level"] == pytest.approx(8 * MIB, rel=0.01)
    # The profiler does not tell of a free of what is older than the window: too high by 8 MiB in `freed`, where the others are exact.
    freed = 8 * MIB if way == "livebytes" else 10 * MIB
    assert found["peaks"] == pytest.approx({"busy": 48 * MIB, "after": 16 * MIB, "freed": freed, "thrice": 7 * MIB}, rel=0.01)


DOORS = """
import ctypes
c = ctypes.CDLL(None)
for name in ("malloc", "calloc", "realloc", "memalign", "aligned_alloc", "valloc", "pvalloc", "reallocarray"):
    getattr(c, name).restype = ctypes.c_void_p
c.livebytes_now.restype = ctypes.c_longlong
c.free.argtypes = [ctypes.c_void_p]
size, P = ctypes.c_size_t, ctypes.c_void_p
N = 1 << 20
box = P()
doors = {
    "malloc": lambda: c.malloc(size(N)), "calloc": lambda: c.calloc(size(N // 8), size(8)), "realloc": lambda: c.realloc(P(c.malloc(size(64))), size(N)),
    "shrunk": lambda: c.realloc(P(c.malloc(size(4 * N))), size(N)), "memalign": lambda: c.memalign(size(64), size(N)),
    "aligned_alloc": lambda: c.aligned_alloc(size(64), size(N)), "valloc": lambda: c.valloc(size(N)), "pvalloc": lambda: c.pvalloc(size(N)),
    "reallocarray": lambda: c.reallocarray(P(), size(N // 8), size(8)),
    "posix_memalign": lambda: c.posix_memalign(ctypes.byref(box), size(64), size(N)) or box.value,
}
before = c.livebytes_now()
for name, door in doors.items():
    block = door()
    counted = c.livebytes_now() - before
    assert N <= counted < N + 3 * 4096, (name, counted)
    c.free(block)
    assert c.livebytes_now() == before, name
block = c.malloc(size(N))
c.realloc(P(block), size(0))
assert c.livebytes_now() == before, "realloc to nothing frees"
block = c.malloc(size(N))
assert c.realloc(P(block), size(1 << 62)) is None and c.reallocarray(P(block), size(1 << 62), size(8)) is None
assert N <= c.livebytes_now() - before < N + 4096, "what could not grow is still there"
c.free(block)
assert c.posix_memalign(ctypes.byref(box), size(3), size(N)) == 22, "EINVAL"
small = c.malloc(size(1024))
assert c.livebytes_now() == before, "interpreter objects are not counted"
"""


def test_every_door_of_the_allocator_counts_a_block_once_and_frees_it_once(library):
    ran(DOORS, LD_PRELOAD=str(library))


def test_the_library_is_made_once_and_appears_whole(library):
    made = library.stat().st_mtime_ns
    assert meter.livebytes_library(library.parent) == library == meter.livebytes_path(library.parent)
    assert library.stat().st_mtime_ns == made and [file.name for file in library.parent.iterdir()] == [library.name]


def test_without_a_compiler_or_a_place_to_keep_it_there_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    if shutil.which("cc"):
        assert meter.livebytes_library(tmp_path / "file" / "cache") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert meter.livebytes_library(tmp_path / "cache") is None


def test_an_address_allocated_again_while_still_live_was_freed_unseen():
    assert meter.replay([(1, 100), (2, 50), (1, 100), (2, -50), (1, -100)]) == 150
    assert meter.replay([(1, 100), (1, 30), (2, 60)]) == 100


def test_a_free_of_an_unknown_block_makes_room():
    assert meter.replay([(9, -100), (1, 100), (2, 50)]) == 50


def test_only_the_first_windows_of_a_name_are_profiled_since_they_cost_time():
    measure = meter.Meter("cpu")
    assert measure.kind == "profiler", "pytest itself is started without livebytes"
    kept = []
    for _ in range(3):
        with measure.window("steady"):
            kept.append(torch.empty(MIB))
    assert measure.peaks["steady"] == pytest.approx(2 * 4 * MIB, rel=0.01)
