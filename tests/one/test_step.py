"""How a global batch is dealt to ranks and micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.step import rows_of


@given(world=st.integers(1, 8), micro_batch=st.integers(1, 5), grad_accum=st.integers(1, 5))
def test_the_ranks_together_handle_every_row_of_a_step_once_and_equally_many(world, micro_batch, grad_accum):
    ids = list(range(100, 100 + world * micro_batch * grad_accum))
    dealt = [rows_of(ids, rank, world, micro_batch) for rank in range(world)]
    assert sorted(row for rank in dealt for micro in rank for row in micro) == ids
    assert all(len(rank) == grad_accum and all(len(micro) == micro_batch for micro in rank) for rank in dealt)
    in_order = [row for m in range(grad_accum) for rank in dealt for row in rank[m]]
    assert in_order == ids, "the ranks together read the batch in order, whatever their number"
