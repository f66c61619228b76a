"""Which layouts there are, in which order, and what is said when there are none."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import choose
from shardwise.choose import Question
from shardwise.errors import UsageError
from shardwise.ledger import Peak
from shardwise.spec import ROWS, Cluster
from tests.pure.test_layout import made

CPU = Cluster(1, 2, "cpu", "cpu", 1000, 100, "test")


def asked(**changes):
    keys = {
        "world_size": 2,
        "global_batch": 16,
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "attention": "document",
        "loss_chunk_tokens": 512,
        "fixed": {},
    }
    return Question(**{**keys, **changes})


def judged(total, *, flops=0.0, moved=0, cluster=CPU, margin=0.0, **layout):
    rows = [0] * len(ROWS)
    rows[0] = total
    return choose.candidate(
        made(**layout),
        {"backward": Peak(total, tuple(rows))},
        cluster,
        margin,
        disk_bytes=1,
        recomputed_flops=flops,
        moved_bytes=moved,
    )


@given(st.integers(1, 64), st.integers(1, 64))
def test_every_layout_makes_exactly_the_global_batch(world, per_rank):
    question = asked(world_size=world, global_batch=world * per_rank)
    for micro_batch in choose.micro_batches(question):
        for layout in choose.layouts(question, micro_batch):
            assert layout.micro_batch * layout.grad_accum * layout.world_size == question.global_batch
            assert (layout.param_dtype, layout.reduce_dtype, layout.optimizer) == ("bf16", "fp32", "adamw")


def test_fixed_keys_leave_only_layouts_that_agree():
    question = asked(fixed={"strategy": "no_shard", "grad_accum": 4, "activation_checkpointing": "full", "grad_sync": "last"})
    (micro_batch,) = choose.micro_batches(question)
    (layout,) = choose.layouts(question, micro_batch)
    assert (layout.strategy, layout.micro_batch, layout.grad_accum, layout.activation_checkpointing, layout.grad_sync) == (
        "no_shard",
        2,
        4,
        "full",
        "last",
    )


def test_a_global_batch_that_no_layout_can_give_is_refused_with_the_nearest_that_work():
    with pytest.raises(UsageError) as caught:
        choose.micro_batches(asked(world_size=3), lambda key: f"`{key}: 16` (run.yaml:4)")
    assert (
        caught.value.text()
        == """\
error: global_batch 16 cannot be split evenly over 3 ranks
  where: `global_batch: 16` (run.yaml:4)
  why: every rank handles as many sequences:
       micro_batch x grad_accum x ranks = global_batch

hint: `--set global_batch=15`
hint: `--set global_batch=18`
hint: or 2 or 4 ranks for 16 sequences"""
    )


def test_a_micro_batch_that_does_not_divide_is_refused_with_the_nearest_that_do():
    with pytest.raises(UsageError) as caught:
        choose.micro_batches(asked(fixed={"micro_batch": 3}))
    assert caught.value.hints == ("`--set layout.micro_batch=2`", "`--set layout.micro_batch=4`")


def test_fixed_keys_that_contradict_the_global_batch_are_refused():
    with pytest.raises(UsageError, match="micro_batch 4 x grad_accum 4 x 2 ranks = 32, global_batch is 16"):
        choose.micro_batches(asked(fixed={"micro_batch": 4, "grad_accum": 4}))


def test_what_fits_comes_first_then_no_recompute_then_least_moved_then_most_room():
    small, roomy = judged(600, moved=5), judged(500, moved=5, strategy="shard_grad_op")
    recomputing, moving, too_large = judged(300, flops=1.0), judged(400, moved=9), judged(2000)
    assert choose.ranked([too_large, recomputing, moving, small, roomy]) == [roomy, small, moving, recomputing, too_large]


def test_synchronising_each_micro_batch_is_preferred_though_it_moves_more():
    each, last = judged(500, moved=9, grad_sync="each"), judged(400, moved=3, grad_sync="last")
    assert choose.ranked([last, each])[0] == each


def test_fits_counts_what_lies_outside_the_allocator_and_the_margin():
    assert judged(850, margin=0.05).fits and judged(850, margin=0.05).missing_bytes == 0  # 850 + 100 <= 950
    assert judged(860, margin=0.05).missing_bytes == 10
    cuda = replace(CPU, kind="cuda", device_total_bytes=1440)
    assert judged(1000, cluster=cuda).fits and judged(1000, cluster=cuda).peak_reserved_bytes == (1140, 1340)


def test_the_choice_says_what_sets_it_apart_from_the_next():
    best = choose.chosen(choose.ranked([judged(500, moved=5 * 2**20), judged(400, moved=9 * 2**20, strategy="shard_grad_op")]))
    assert best.why == "moves 5.0 MiB a step; next shard_grad_op, 2 x 4 moves 9.0 MiB and takes 100 B less"
    alone = choose.chosen(choose.ranked([judged(500), judged(1500, strategy="no_shard")]))
    assert alone.why == "the only one that fits; next no_shard, 2 x 4 misses by 600 B"
    assert choose.chosen(choose.ranked([judged(1500)])) is None
