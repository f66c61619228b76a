"""A checkpoint is whole or is not there; it gives back every bit, to any number of ranks, and runs nothing of what it holds."""

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from shardwise import checkpoint, optim, step
from shardwise.checkpoint.folder import hash_of
from shardwise.config import OptimizerConfig
from shardwise.errors import LostWorker, NotReady, OnDisk, UsageError
from shardwise.world import run_ranks
from tests.worlds import FAMILIES, LLAMA, Packed, layout, sharded, whole

DROPOUT = {**LLAMA, "attention_dropout": 0.1}
STATE = {"source_dtype": "float32", "progress": {"tokens_seen": 12, "best": None}}


def made(context, config=LLAMA, strategy="full_shard", seed=0):
    """A model and an optimizer that has not stepped. Collective."""
    model = sharded(config, layout(context.world_size, strategy, micro_batch=8 // context.world_size), seed)
    torch.manual_seed(100 + context.rank)
    return model, optim.make_optimizer(model, OptimizerConfig(lr=1e-2))


def train(model, optimizer, steps):
    """Some real steps on the same 8 rows. Collective."""
    data, world = Packed(), dist.get_world_size()
    for _ in range(steps):
        rows = step.rows_of(list(range(8)), dist.get_rank(), world, 8 // world)
        step.accumulate(model, data, rows, int(data.valid[:8].sum()), "each", torch.device("cpu"))
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """Weights and moments gathered, and how often each parameter was updated. Collective."""
    tensors = dict(model.named_parameters())
    for name, param in model.named_parameters():
        tensors |= {
            f"{name}.{moment}": optimizer.state[param][moment] for moment in ("exp_avg", "exp_avg_sq") if param in optimizer.state
        }
    return whole(tensors), {
        name: float(optimizer.state[param]["step"]) for name, param in model.named_parameters() if param in optimizer.state
    }


def same(mine, other):
    return (
        mine[1] == other[1]
        and mine[0].keys() == other[0].keys()
        and all(np.array_equal(mine[0][name], other[0][name]) for name in other[0])
    )


def saving(context, folder, config=LLAMA, strategy="full_shard", first=2, more=0):
    """Train, save, train on: what was saved, and what came of it."""
    model, optimizer = made(context, config, strategy)
    train(model, optimizer, first)
    checkpoint.save(folder, first, model, optimizer, STATE)
    saved, random = everything(model, optimizer), torch.get_rng_state().numpy()
    train(model, optimizer, more)
    return saved, random, everything(model, optimizer)


def loading(context, path, config=LLAMA, strategy="full_shard", more=0):
    """The same from the checkpoint, into a model of other weights."""
    model, optimizer = made(context, config, strategy, seed=1)
    torch.manual_seed(999 + context.rank)
    state = checkpoint.load(path, model, optimizer)
    loaded, random = everything(model, optimizer), torch.get_rng_state().numpy()
    train(model, optimizer, more)
    return loaded, random, everything(model, optimizer), state


def refused(context, fn, *args):
    """The error that this rank met, and whether the group still works. Collective."""
    try:
        fn(context, *args)
    except (OnDisk, NotReady) as error:
        assert max(len(line) for line in error.text().splitlines() if not line.startswith("  where: ")) <= 80, error.text()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return error.to_json(), int(ones)
    raise AssertionError("nothing was refused")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with one checkpoint of two ranks, and what is in it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(saving, 2, folder)[0][0]


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved[0] / "step-2", tmp_path / "step-2")
    return tmp_path / "step-2"


@pytest.mark.parametrize(
    ("config", "strategy"), [(DROPOUT, "full_shard"), (FAMILIES["qwen2 tied"], "shard_grad_op"), (FAMILIES["gpt2"], "no_shard")]
)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(tmp_path, config, strategy):
    before = run_ranks(saving, 2, tmp_path, config, strategy, 2, 2)
    after = run_ranks(loading, 2, tmp_path / "step-2", config, strategy, 2)
    for (was, random, end), (now, random_now, end_now, state) in zip(before, after, strict=True):
        assert same(now, was) and np.array_equal(random, random_now) and same(end_now, end)
        assert state["rng_restored"] and state["step"] == 2 and {key: state[key] for key in STATE} == STATE
    assert not same(after[0][2], after[0][0])


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "full_shard"), (4, "full_shard"), (4, "no_shard")])
def test_another_world_size_or_strategy_gets_the_same_weights_and_a_random_state_of_its_own(saved, ranks, strategy):
    out = run_ranks(loading, ranks, saved[0] / "step-2", LLAMA, strategy)
    for loaded, _, _, state in out:
        assert same(loaded, saved[1]) and state["rng_restored"] is False
    assert len({random.tobytes() for _, random, _, _ in out}) == ranks


def test_the_same_ranks_under_another_strategy_keep_their_random_state(saved):
    for loaded, _, _, state in run_ranks(loading, 2, saved[0] / "step-2", LLAMA, "no_shard"):
        assert same(loaded, saved[1]) and state["rng_restored"] is True


def test_plain_dcp_reads_it_and_every_item_is_a_tensor_of_its_true_name(saved):
    reader = dcp.FileSystemReader(saved[0] / "step-2")
    entries = reader.read_metadata().state_dict_metadata
    assert {
        "model.lm_head.weight",
        "optim.lm_head.weight.exp_avg",
        "optim.lm_head.weight.exp_avg_sq",
        "rng.2.0",
        "rng.2.1",
    } <= entries.keys()
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    assert all(
        np.array_equal(tensors[f"model.{name}"], value) for name, value in saved[1][0].items() if f"model.{name}" in tensors
    )
    facts = json.loads((saved[0] / "step-2/state.json").read_text())
    assert facts["world_size"] == 2 and set(facts["optimizer_steps"].values()) == {2.0}


def partly_frozen(context, folder):
    """One parameter frozen, one that never has a gradient."""
    first, second = made(context), made(context, seed=1)
    for model, optimizer in (first, second):
        model.get_submodule("model.layers.0.mlp.up_proj").weight.requires_grad_(False)
        optimizer.param_groups[0]["params"] = [param for param in optimizer.param_groups[0]["params"] if param.requires_grad]
    unused = first[0].get_submodule("model.layers.1.input_layernorm").weight
    data, world = Packed(), dist.get_world_size()
    rows = step.rows_of(list(range(8)), context.rank, world, 4)
    step.accumulate(first[0], data, rows, 100, "each", torch.device("cpu"))
    unused.grad = None
    first[1].step()
    checkpoint.save(folder, 1, *first, STATE)
    checkpoint.load(folder / "step-1", *second)
    return everything(*first), everything(*second)


def test_parameters_that_never_stepped_have_no_state_before_and_none_after(tmp_path):
    for before, after in run_ranks(partly_frozen, 2, tmp_path):
        assert same(before, after)
        assert (
            "model.layers.1.input_layernorm.weight" not in after[1]
            and "model.layers.0.mlp.up_proj.weight.exp_avg" not in after[0]
        )


# ---- whole or not there


def killed(context, folder, event, ending):
    """Save step 2 whole, then step 4, in which this process is killed when it does ``event`` to a path of that ending."""
    model, optimizer = made(context)
    train(model, optimizer, 2)
    checkpoint.save(folder, 2, model, optimizer, STATE)

    def kill(name, args):
        if name == event and str(args[0]).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    train(model, optimizer, 2)
    checkpoint.save(folder, 4, model, optimizer, STATE)


MOMENTS = {
    "one rank while it writes": ("open", "__1_0.distcp"),
    "before the metadata": ("open", ".metadata.tmp"),
    "before the facts": ("open", "state.json"),
    "before the manifest": ("open", "manifest.json"),
    "between manifest and rename": ("os.rename", ".tmp-step-4"),
}


@pytest.mark.parametrize(("event", "ending"), MOMENTS.values(), ids=MOMENTS.keys())
def test_a_kill_at_any_moment_of_a_save_leaves_the_last_whole_one_and_the_next_save_sweeps(saved, tmp_path, event, ending):
    with pytest.raises(LostWorker, match="SIGKILL"):
        run_ranks(killed, 2, tmp_path, event, ending)
    assert checkpoint.steps(tmp_path) == [2] and checkpoint.find(tmp_path) == tmp_path / "step-2"
    assert (tmp_path / ".tmp-step-4").is_dir() and checkpoint.verify(tmp_path / "step-2") == []
    (out, _) = run_ranks(resuming, 2, tmp_path)
    assert same(out, saved[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-5"]


def resuming(context, folder):
    model, optimizer = made(context, seed=1)
    checkpoint.load(checkpoint.find(folder), model, optimizer)
    checkpoint.save(folder, 5, model, optimizer, STATE)
    return everything(model, optimizer)


def killed_pruning(context, folder):
    sys.addaudithook(lambda name, args: os.kill(os.getpid(), signal.SIGKILL) if name == "shutil.rmtree" else None)
    checkpoint.prune(folder, 1, set())


def test_a_kill_while_old_ones_are_removed_leaves_no_half_checkpoint(copied):
    shutil.copytree(copied, copied.parent / "step-4")
    with pytest.raises(LostWorker, match="SIGKILL"):
        run_ranks(killed_pruning, 1, copied.parent)
    assert checkpoint.steps(copied.parent) == [4] and (copied.parent / ".tmp-step-2").is_dir()


def test_a_checkpoint_is_never_overwritten(saved):
    before = {file.name: file.stat().st_mtime_ns for file in (saved[0] / "step-2").iterdir()}
    for record, alive in run_ranks(refused, 2, saving, saved[0]):
        assert (record["error"], record["what"]) == ("OnDisk", "checkpoint of step 2 is there already") and alive == 2
    assert {file.name: file.stat().st_mtime_ns for file in (saved[0] / "step-2").iterdir()} == before


def test_pruning_keeps_the_newest_and_the_best_and_leaves_nothing_half_removed(copied):
    folder = copied.parent
    for number in (4, 6, 8, 10):
        shutil.copytree(copied, folder / f"step-{number}")
    assert checkpoint.prune(folder, 2, {4}) == [2, 6]
    assert checkpoint.steps(folder) == [4, 8, 10] and len(list(folder.iterdir())) == 3
    assert checkpoint.find(folder).name == "step-10" and checkpoint.find(folder, 4).name == "step-4"
    with pytest.raises(UsageError, match="0 checkpoints would be kept"):
        checkpoint.prune(folder, 0, set())
    with pytest.raises(OnDisk, match="no whole checkpoint of step 6"):
        checkpoint.find(folder, 6)
    (folder / "step-10/manifest.json").unlink()
    assert checkpoint.find(folder).name == "step-8"
    with pytest.raises(OnDisk, match="no whole checkpoint"):
        checkpoint.find(folder / "step-8")


# ---- torn, changed, of another model


DAMAGE = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "flipped": lambda file: file.write_bytes(
        file.read_bytes()[:-20] + bytes([file.read_bytes()[-20] ^ 1]) + file.read_bytes()[-19:]
    ),
    "removed": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_file_that_is_damaged_is_found_and_named(copied, damage):
    assert checkpoint.verify(copied) == []
    names = sorted(file.name for file in copied.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "state.json"]
    for name in names:
        content = (copied / name).read_bytes()
        DAMAGE[damage](copied / name)
        (fault, *_) = checkpoint.verify(copied)
        assert (
            name if (name, damage) != ("manifest.json", "flipped") else "state.json"
        ) in fault  # the bit flipped is in the hash of the last file
        (copied / name).write_bytes(content)
    assert checkpoint.verify(copied) == []


@pytest.mark.parametrize(
    ("name", "damage"),
    [("__1_0.distcp", "truncated"), ("state.json", "removed"), (".metadata", "emptied"), ("manifest.json", "truncated")],
)
def test_a_torn_checkpoint_is_refused_by_name_on_every_rank(copied, name, damage):
    DAMAGE[damage](copied / name)
    for record, alive in run_ranks(refused, 2, loading, copied):
        assert (record["error"], record["what"], record["common"]) == (
            "OnDisk",
            "checkpoint `step-2` is not whole",
            True,
        ) and alive == 2
        assert name in record["lines"][0][1]


def rewritten(folder, change):
    """Change a checkpoint's metadata as someone would who keeps sizes and manifest in order."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    content = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata, protocol=4)
    (folder / ".metadata").write_bytes(content)
    listed = json.loads((folder / "manifest.json").read_text())
    listed["files"][".metadata"] = {"bytes": len(content), "xxh3": hash_of(folder / ".metadata")}
    (folder / "manifest.json").write_text(json.dumps(listed))


class Hostile:
    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return (os.mkdir, (self.file,))


def test_a_command_hidden_in_the_metadata_is_refused_and_not_run(copied):
    rewritten(copied, lambda metadata: setattr(metadata, "planner_data", Hostile(copied / "ran")))
    for record, _ in run_ranks(refused, 2, loading, copied):
        assert record["what"] == "checkpoint `step-2` cannot be read" and "refused: posix.mkdir" in record["lines"][0][1]
    assert not (copied / "ran").exists()


def test_a_command_hidden_in_an_item_is_refused_and_not_run(copied):
    """DCP unpickles an item that the metadata call bytes, whatever the run asks for."""
    torch.save(Hostile(copied / "ran"), copied / "item")
    size = (copied / "item").stat().st_size

    def change(metadata):
        metadata.state_dict_metadata["model.lm_head.weight"] = BytesStorageMetadata()
        (index,) = [
            index for index in metadata.storage_data if index.fqn == "model.lm_head.weight" and index.offset == torch.Size([0, 0])
        ]
        info = metadata.storage_data.pop(index)
        info.relative_path, info.offset, info.length = "item", 0, size
        metadata.storage_data[type(index)("model.lm_head.weight")] = info

    rewritten(copied, change)
    for record, _ in run_ranks(refused, 2, loading, copied):
        assert "`model.lm_head.weight` is no tensor but a pickle" in record["lines"][0][1]
    assert not (copied / "ran").exists()
    tensor = {"model.lm_head.weight": torch.empty(257, 64)}
    dcp.load(tensor, storage_reader=dcp.FileSystemReader(copied), no_dist=True)
    assert (copied / "ran").exists(), "plain DCP does run it, or this test shows nothing"


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(saved):
    wider = {**LLAMA, "intermediate_size": 96, "num_hidden_layers": 4}
    for record, alive in run_ranks(refused, 2, loading, saved[0] / "step-2", wider):
        assert record["error"] == "OnDisk" and alive == 2
        # The fourth layer has 9 weights; 3 in each of the others are as wide as the perceptron, and each has two moments.
        assert record["what"] == "another model: 9 tensors missing, 0 unknown, 27 of another shape"
        lines = dict(map(tuple, record["lines"]))
        assert lines["missing"].startswith("`model.model.layers.3.") and "float32 [96, 64], saved float32 [128, 64]" in str(
            record["lines"]
        )
    for record, _ in run_ranks(refused, 2, loading, saved[0] / "step-2", {**LLAMA, "num_hidden_layers": 2}):
        assert "0 tensors missing, 27 unknown, 0 of another shape" in record["what"]


# ---- disk full


def limited(context, folder):
    """Rank 1 may write only small files while step 3 is saved; later it may again."""
    model, optimizer = made(context)
    train(model, optimizer, 1)
    checkpoint.save(folder, 1, model, optimizer, STATE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if context.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    out = refused(context, lambda _: checkpoint.save(folder, 3, model, optimizer, STATE))
    left = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpoint.save(folder, 3, model, optimizer, STATE)
    return *out, left


def test_a_write_that_fails_on_one_rank_is_called_a_full_disk_on_all_and_leaves_nothing(tmp_path):
    for record, alive, left in run_ranks(limited, 2, tmp_path):
        assert (record["error"], record["what"], alive) == ("NotReady", "checkpoint of step 3 does not fit on the disk", 2)
        assert (
            record["where"] == str(tmp_path)
            and "are free, the checkpoint takes" in record["lines"][0][1]
            and "ulimit -f" in record["why"]
        )
        assert left == ["step-1"]
    assert checkpoint.steps(tmp_path) == [1, 3] and checkpoint.verify(tmp_path / "step-3") == []


def forbidden(context, folder):
    checkpoint.save(folder / "nowhere", 1, *made(context), STATE)


def test_another_reason_is_not_called_a_full_disk(tmp_path):
    for record, alive in run_ranks(refused, 2, forbidden, tmp_path):
        assert (record["error"], record["what"], alive) == ("NotReady", "checkpoint of step 1 cannot be written", 2)
        assert "No such file or directory" in record["lines"][0][1]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place], capture_output=True, timeout=20).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", place], check=True, timeout=20)


def filling(context, folder):
    """Step 1 fits; step 2 is foreseen not to; step 3 seems to, but another file takes the room while rank 1 writes."""
    model, optimizer = made(context)
    train(model, optimizer, 1)
    checkpoint.save(folder, 1, model, optimizer, STATE)
    ballast = folder / "ballast"
    if context.rank == 0:
        ballast.write_bytes(bytes(os.statvfs(folder).f_bavail * 4096 - 1_000_000))
    foreseen = refused(context, lambda _: checkpoint.save(folder, 2, model, optimizer, STATE))
    untouched = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    if context.rank == 0:
        ballast.unlink()
    dist.barrier()

    def fill(name, args):
        if name == "open" and str(args[0]).endswith("__1_0.distcp"):
            with open(ballast, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, os.statvfs(folder).f_bavail * 4096 - 100_000)

    sys.addaudithook(fill)
    met = refused(context, lambda _: checkpoint.save(folder, 3, model, optimizer, STATE))
    return foreseen, untouched, met, sorted(path.name for path in folder.iterdir())


def test_a_full_disk_is_foreseen_and_named_when_it_comes_anyway(small_disk):
    for foreseen, untouched, met, left in run_ranks(filling, 2, small_disk):
        assert foreseen[0]["lines"][0][1].startswith("976.")
        for record, alive in (foreseen, met):
            assert (record["error"], alive) == ("NotReady", 2) and record["what"].endswith("does not fit on the disk")
        assert untouched == left == ["ballast", "step-1"]
    assert checkpoint.verify(small_disk / "step-1") == []
