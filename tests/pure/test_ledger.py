"""The ledger's arithmetic: nothing is lost or counted twice over the ranks, and FSDP2's buffers are those that were read and measured."""

import time
from math import ceil, prod

from hypothesis import given
from hypothesis import strategies as st

from shardwise import ledger
from shardwise.ledger import steps as ledger_steps
from shardwise.spec import ROWS, ModelSpec, Point, Trace, UnitSpec
from tests.pure.test_layout import made

SHAPES = st.lists(st.tuples(st.integers(1, 9999), st.integers(1, 64)), min_size=1, max_size=6)
G = 1000 * 16 * 2  # bytes of a block in bf16


def model(blocks, *, vocab=2000):
    """Blocks of one [1000, 16] matrix, embedding and head of [vocab, 16], a norm in the root."""
    block = ((1000, 16),)
    names = [UnitSpec(f"b{i}", "block", block, min(i, 1) if i < blocks - 1 else min(2, blocks - 1)) for i in range(blocks)]
    traced = min(3, blocks)
    return ModelSpec(
        "m",
        0,
        (
            UnitSpec("embedding", "embedding", ((vocab, 16),), traced),
            *names,
            UnitSpec("head", "head", ((vocab, 16),), traced + 1),
            UnitSpec("root", "root", ((16,),), traced + 2),
        ),
    )


def trace_of(blocks, *, act=0, vocab=2000):
    """A step whose blocks keep ``act`` bytes each and whose gradients are bf16."""
    traced = min(3, blocks)
    embedding, head, root = traced, traced + 1, traced + 2
    points = [
        Point("pre_forward", root, {}, {}),
        Point("pre_forward", embedding, {}, {}),
        Point("post_forward", embedding, {}, {}),
    ]
    for i in range(traced):
        before, after = ({"activations": act * n} for n in (i, i + 1))
        points += [Point("pre_forward", i, before, after), Point("post_forward", i, after, after)]
    full = {"activations": act * traced}
    dw = vocab * 16 * 2
    points += [
        Point("pre_forward", head, full, full),
        Point("loss", head, full, full),
        Point("post_forward", head, full, full),
        Point("post_forward", root, full, full),
        Point("pre_backward", head, full, full),
        Point("pre_backward", root, full, full),
        Point("post_backward", head, {**full, "grads_unsharded": dw}, full),
    ]
    for i in reversed(range(traced)):
        begin, end = {"activations": act * (i + 1)}, {"activations": act * i, "grads_unsharded": G}
        points += [
            Point("pre_backward", i, begin, {**begin, "grads_unsharded": G}),
            Point("post_backward", i, end, {"activations": act * i}),
        ]
    last = {"grads_unsharded": dw + 32}
    return Trace(
        tuple(f"t{i}" for i in range(traced + 3)),
        (*points, Point("pre_backward", embedding, {}, last), Point("final", root, last, last)),
        0,
    )


def buffers(peak):
    """Bytes of FSDP2's own transient buffers at a peak."""
    rows = peak.by_name()
    return sum(
        rows.get(name, 0)
        for name in ("params_unsharded", "grads_unsharded", "all_gather_buffers", "reduce_scatter_buffers", "gloo_staging")
    )


@given(SHAPES, st.integers(1, 64))
def test_all_ranks_together_hold_the_model_once_plus_less_than_one_row_a_rank(shapes, ways):
    for rows, cols in shapes:
        stored = ways * ledger.shard_numel((rows, cols), ways)
        assert rows * cols <= stored < (rows + ways) * cols


@given(SHAPES, st.integers(1, 64), st.integers(1, 64))
def test_more_shards_never_mean_more_sharded_bytes_on_a_rank(shapes, ways, more):
    for shape in shapes:
        assert ledger.shard_numel(shape, ways + more) <= ledger.shard_numel(shape, ways)


def test_gpt2_vocabulary_over_64_ranks_is_786_rows():
    # Read off torch 2.15: fully_shard(Linear(16, 50257)) on a fake 64-rank group.
    assert ledger.shard_numel((50257, 16), 64) == 786 * 16


def test_full_shard_on_cuda_holds_five_units_with_fp32_reduction_and_four_with_bf16():
    # planning.md 4.3, verified there by trace: unsharded 1 + prefetched 1 + gradients 1 + reduce-scatter input b_r/b_p.
    steps = ledger.expand(model(8, vocab=16), trace_of(8, vocab=16))
    for reduce_dtype, units in (("fp32", 5), ("bf16", 4)):
        peaks = ledger.phases(model(8, vocab=16), steps, made(world_size=8, dp_shard=8, reduce_dtype=reduce_dtype), "cuda")
        assert (
            units * G <= buffers(peaks["backward"]) < (units + 0.25) * G
        )  # the rest is the copy-in and the reduced shard, 1/8 each


def test_shard_grad_op_holds_every_unit_whole():
    steps = ledger.expand(model(8, vocab=16), trace_of(8, vocab=16))
    peaks = ledger.phases(model(8, vocab=16), steps, made(strategy="shard_grad_op", world_size=8, dp_shard=8), "cuda")
    assert peaks["loss"].by_name()["params_unsharded"] >= 8 * G


def test_gloo_adds_a_copy_of_a_gather_or_of_a_reduction_with_its_ring_and_cuda_neither():
    steps = ledger.expand(model(8, vocab=16), trace_of(8, vocab=16))
    cpu, cuda = (ledger.phases(model(8, vocab=16), steps, made(), kind)["backward"] for kind in ("cpu", "cuda"))
    reduce_input = 2 * G
    assert cpu.by_name()["gloo_staging"] in (G, reduce_input + min(ledger.RING_BYTES, reduce_input))
    assert "gloo_staging" not in cuda.by_name() and cpu.total > cuda.total


def test_no_shard_keeps_a_second_full_copy():
    steps = ledger.expand(model(4), trace_of(4))
    peaks = ledger.phases(model(4), steps, made(strategy="no_shard", dp_shard=1, dp_replicate=2), "cpu")
    whole = sum(unit.numel for unit in model(4).units)
    assert peaks["loss"].by_name()["params_sharded"] == 4 * whole
    assert peaks["loss"].by_name()["params_unsharded"] == 2 * whole


def test_the_middle_of_a_deep_model_may_be_left_out(monkeypatch):
    layouts = [
        made(strategy=s, dp_shard=d, dp_replicate=r, grad_accum=a, grad_sync=y)
        for s, d, r in (("full_shard", 2, 1), ("shard_grad_op", 2, 1), ("no_shard", 1, 2))
        for a, y in ((1, "each"), (3, "each"), (3, "last"))
    ]
    short = ledger.expand(model(40), trace_of(40, act=777))
    monkeypatch.setattr(ledger_steps, "_KEEP", 100)
    whole = ledger.expand(model(40), trace_of(40, act=777))
    assert len(short) < len(whole) / 3
    for layout in layouts:
        assert ledger.phases(model(40), short, layout, "cpu") == ledger.phases(model(40), whole, layout, "cpu")


def test_rows_sum_to_the_total_in_every_phase():
    steps = ledger.expand(model(5), trace_of(5, act=1000))
    for name, peak in ledger.phases(model(5), steps, made(), "cpu", made_whole=7, kernel_bytes=11).items():
        assert sum(peak.rows) == peak.total, name
        assert set(peak.by_name()) <= set(ROWS)


def test_optimizer_state_is_two_fp32_copies_of_the_shard_and_absent_in_the_first_step():
    peaks = ledger.phases(model(5), ledger.expand(model(5), trace_of(5, act=10**7)), made(), "cpu")
    params = peaks["save"].by_name()["params_sharded"]
    assert params == sum(4 * ceil(shape[0] / 2) * prod(shape[1:]) for unit in model(5).units for shape in unit.shapes)
    assert peaks["backward"].by_name()["optimizer_state"] == 2 * params
    assert "optimizer_state" not in peaks["first_step"].by_name()


def test_synchronising_last_holds_whole_gradients_in_the_reduce_dtype():
    steps = ledger.expand(model(5), trace_of(5))
    whole = sum(unit.numel for unit in model(5).units)
    peaks = ledger.phases(model(5), steps, made(grad_accum=3, grad_sync="last"), "cpu")
    assert peaks["forward"].by_name()["grads_unsharded"] == 4 * whole
    assert "grads_unsharded" not in ledger.phases(model(5), steps, made(grad_accum=3), "cpu")["forward"].by_name()


def test_moved_bytes_are_those_of_ring_collectives():
    unit = ModelSpec(
        "m",
        1600,
        (
            UnitSpec("b", "block", ((100, 16),), 0),
            UnitSpec("root", "root", ()),
        ),
    )
    n, half = 1600, 0.5
    assert ledger.moved_bytes(unit, made(grad_accum=1)) == half * (
        2 * 2 * n + 4 * n
    )  # two gathers in bf16, one reduction in fp32
    assert ledger.moved_bytes(unit, made(grad_accum=4, grad_sync="last")) == half * (4 * 2 * 2 * n + 4 * n)
    assert ledger.moved_bytes(unit, made(strategy="no_shard", dp_shard=1, dp_replicate=2, grad_accum=1)) == 4 * n  # 2 n (R-1)/R


def test_a_thousand_layouts_of_a_126_block_model_take_half_a_second():
    steps = ledger.expand(model(126), trace_of(126, act=5))
    layouts = [made(world_size=w, dp_shard=w, micro_batch=b) for w in range(1, 101) for b in range(1, 11)]
    begin = time.process_time()
    for layout in layouts:
        ledger.phases(model_126, steps, layout, "cpu")
    assert time.process_time() - begin < 1.0  # 0.4 s alone; the machine that tests run on may be half as fast


model_126 = model(126)
