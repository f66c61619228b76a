"""A plan is what FSDP2 stores, is told in 80 columns, survives JSON, and says what would fit when nothing does."""

import json
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import ledger, planner
from shardwise import model as models
from shardwise.errors import AnswerIsNo
from shardwise.plan import Plan
from shardwise.runfile import load_run_file
from shardwise.source import resolve
from shardwise.spec import ROWS, Cluster

RUN = """\
model:
  shape: {model_type: llama, hidden_size: 64, intermediate_size: 192, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
          vocab_size: 512, max_position_embeddings: 256}
data: {train: text.txt, seq_len: 128}
global_batch: 16
precision: fp32
optimizer: {name: adamw, lr: 1.0e-3}
run_dir: runs/x
"""
MIB = 2**20


def cluster(**changes):
    keys = {
        "nodes": 1,
        "gpus_per_node": 2,
        "device": "cpu",
        "kind": "cpu",
        "device_total_bytes": 1024 * MIB,
        "outside_bytes": 441 * MIB,
        "source": "test",
    }
    return Cluster(**{**keys, **changes})


@pytest.fixture
def planned(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(*overrides, **changes):
        file = tmp_path / "run.yaml"
        file.write_text(RUN)
        run = load_run_file(file, list(overrides))
        source = resolve(run.config.model)
        model = models.build(source)
        return planner.make_plan(run, model, models.units(model), name="small", cluster=cluster(**changes))

    return make


def test_a_plan_survives_json_and_its_digest_is_that_of_its_json(planned):
    plan = planned()
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.digest == plan.digest and len(plan.digest) == 64
    assert planned("layout.micro_batch=2").digest != plan.digest


def test_the_schema_is_that_of_the_planners_issue(planned):
    record = planned().to_json()
    assert record["schema"] == 1
    assert set(record) >= {"model", "cluster", "workload", "chosen", "candidates", "refused", "nearest"}
    assert set(record["model"]) == {"name", "num_params"}
    assert set(record["chosen"]) >= {
        "layout",
        "fits",
        "missing_bytes",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "device_total_bytes",
        "peak_phase",
        "rows",
        "phases",
        "disk_bytes",
        "why",
    }
    assert set(record["chosen"]["rows"]) == set(ROWS) and record["chosen"]["rows"]["unexplained"] == 0
    assert set(record["chosen"]["phases"]) == {"load", "forward", "loss", "backward", "optimizer", "first_step", "save"}
    for candidate in record["candidates"]:
        assert all(size >= 0 for phase in candidate["phases"].values() for size in phase["rows"].values())
        assert (
            sum(candidate["rows"].values())
            == candidate["peak_allocated_bytes"]
            == max(p["device_bytes"] for p in candidate["phases"].values())
        )
        assert candidate["peak_reserved_bytes"] == {
            "low": candidate["peak_allocated_bytes"],
            "high": candidate["peak_allocated_bytes"],
        }


def test_a_fixed_layout_is_the_only_candidate(planned):
    plan = planned(
        "layout.strategy=full_shard", "layout.micro_batch=2", "layout.activation_checkpointing=full", "layout.grad_sync=last"
    )
    (only,) = plan.candidates
    assert only == plan.chosen and only.why == "the only layout that agrees with the fixed keys"
    assert (only.layout.micro_batch, only.layout.grad_accum, only.layout.grad_sync) == (2, 4, "last")


def test_the_text_fits_80_columns_and_holds_every_strategy_row_by_row(planned):
    for plan in (
        planned(),
        planned(device="h100-80gb", kind="cuda", device_total_bytes=80 * 2**30, outside_bytes=2 * 2**30, nodes=2),
    ):
        lines = planner.plan_text(plan).splitlines()
        assert max(map(len, lines)) <= 80
        assert sum(line.startswith("> ") for line in lines) == 1
        (head,) = (line.split() for line in lines if "per rank at the peak" in line)
        assert set(head[-3:]) == {"full_shard", "shard_grad_op", "no_shard"}
        foot = ["chosen", "peak", "room", "levers", "disk"]
        assert [line.split()[0] for line in lines if line[:8].strip() in foot] == foot
        sums = next(line.split()[1:] for line in lines if line.startswith("  sum"))
        assert all(float(number) > 0 for number in sums)


def test_levers_are_differences_between_candidates(planned):
    plan = planned("layout.strategy=full_shard")
    other = next(
        c
        for c in plan.candidates
        if c.layout.activation_checkpointing == "full" and c.layout.micro_batch == plan.chosen.layout.micro_batch
    )
    saved = (other.peak_allocated_bytes - plan.chosen.peak_allocated_bytes) / MIB
    assert f"activation_checkpointing=full {saved:+8.1f} MiB" in planner.plan_text(plan)


def test_nothing_fits_is_an_answer_with_the_nearest_and_what_would_fit(planned):
    with pytest.raises(AnswerIsNo) as caught:
        planned("layout.activation_checkpointing=none", "layout.micro_batch=8", device_total_bytes=480 * MIB)
    error = caught.value
    assert error.exit_code == 1
    assert error.what.startswith("nothing fits: the nearest layout needs ") and error.what.endswith(" are usable")
    assert error.lines[0][0] == "nearest" and error.lines[0][1].startswith("full_shard, 8 x 1; peak in ")
    assert max(map(len, error.text().splitlines())) <= 80 or "run.yaml" in error.where
    hint = next(hint for hint in error.hints if hint.startswith("`--set layout."))
    other = "layout.activation_checkpointing=none" if "micro_batch" in hint else "layout.micro_batch=8"
    planned(hint.split("`")[1].removeprefix("--set "), other, device_total_bytes=480 * MIB)  # what the hint says fits, fits


def test_a_device_too_small_for_the_states_alone_is_told_so(planned):
    with pytest.raises(AnswerIsNo) as caught:
        planned(device_total_bytes=450 * MIB)
    assert "16 bytes a parameter" in caught.value.why


@pytest.fixture
def fake_group():
    """A process group of any size in this one process: shapes and storage are real, values are not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def join(rank, world_size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_ledger_stores_what_fully_shard_stores_on_the_first_and_last_rank(fake_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rng = random.Random(0)
    for _ in range(12):
        world = rng.randint(1, 9)
        shapes = [(rng.randint(1, 40), *(rng.randint(1, 9) for _ in range(rng.randint(0, 2)))) for _ in range(4)]
        for rank in {0, world - 1}:
            fake_group(rank, world)
            module = nn.Module()
            for index, shape in enumerate(shapes):
                module.register_parameter(f"p{index}", nn.Parameter(torch.empty(shape, device="meta")))
            fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
            module.to_empty(device="cpu")
            module._get_fsdp_state()._lazy_init()  # pads the shards, as the first forward does
            stored = sum(param.to_local().untyped_storage().nbytes() for param in module.parameters())
            assert stored == sum(4 * ledger.shard_numel(shape, world) for shape in shapes), (world, rank, shapes)
