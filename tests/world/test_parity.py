"""Sharded training is single-process training: the same loss and the same gradients, however the global batch is cut.

The reference is plain transformers run on each document alone, so that the packing, the chunked loss and the sharding are judged at once.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise import step
from shardwise.world import run_ranks
from tests.worlds import FAMILIES, Packed, layout, sharded, whole, worst

GLOBAL_BATCH = 8


def one_step(context, config, how):
    model = sharded(config, how)
    data, ids = Packed(), list(range(GLOBAL_BATCH))
    rows = step.rows_of(ids, context.rank, context.world_size, how.micro_batch)
    tokens = int(data.valid[ids].sum())
    loss_sum = step.accumulate(model, data, rows, tokens, how.grad_sync, torch.device("cpu"))
    result = step.reduce_and_check(list(model.parameters()), loss_sum, tokens, False, step=1, rows=rows, find_rank=str)
    return {
        "loss": result.loss,
        "norm": result.grad_norm,
        "grads": whole({n: p.grad for n, p in model.named_parameters()}),
        "weights": whole(dict(model.named_parameters())),
        "evaluation": step.evaluate(model, data, how.micro_batch, torch.device("cpu")),
    }


def reference(config, weights, rows):
    """Loss and gradients of plain transformers, one document at a time, summed in fp64."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="eager")
    missing = model.load_state_dict({n: torch.from_numpy(v) for n, v in weights.items()}, strict=False)
    assert not missing.unexpected_keys
    model.tie_weights()
    model.eval()
    data, total, count = Packed(), torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        for a, b in data.spans[row]:
            labels = torch.from_numpy(data.labels[row, a:b])
            if (labels != -100).any():
                logits = model(torch.from_numpy(data.ids[row : row + 1, a:b])).logits[0]
                total = total + F.cross_entropy(logits.double(), labels, ignore_index=-100, reduction="sum")
                count += int((labels != -100).sum())
    (total / count).backward()
    return total.item() / count, {n: p.grad.numpy() for n, p in model.named_parameters()}


LAYOUTS = {
    "1 rank": (1, {"micro_batch": 8}),
    "2 ranks, accumulation": (2, {"micro_batch": 2, "grad_accum": 2}),
    "2 ranks, recompute, sync last, mask": (
        2,
        {"micro_batch": 1, "grad_accum": 4, "activation_checkpointing": "full", "grad_sync": "last", "attention": "sdpa"},
    ),
    "2 ranks, shard_grad_op": (2, {"strategy": "shard_grad_op", "micro_batch": 2, "grad_accum": 2, "grad_sync": "last"}),
    "2 ranks, no_shard": (2, {"strategy": "no_shard", "micro_batch": 4}),
    "4 ranks": (4, {"micro_batch": 1, "grad_accum": 2}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_one_process_for_every_layout(family):
    config, first = FAMILIES[family], None
    for name, (world, changes) in LAYOUTS.items():
        out = run_ranks(one_step, world, config, layout(world, **changes))
        if first is None:
            first = out[0]
            expected, grads = reference(config, first["weights"], range(GLOBAL_BATCH))
        for rank in out:
            assert rank["loss"] == pytest.approx(expected, rel=1e-6), name
            assert worst(rank["grads"], grads) < 1e-5, name
            assert rank["evaluation"] == pytest.approx(first["evaluation"], rel=1e-6), name
            assert all(np.array_equal(rank["weights"][n], first["weights"][n]) for n in first["weights"]), (
                f"{name}: another initialisation"
            )


def lone_rank_without_labels(context, config, how):
    model, data = sharded(config, how), Packed()
    rows = [[3 if context.rank == 1 else 0]]
    tokens = int(data.valid[[0, 3]].sum())
    loss_sum = step.accumulate(model, data, rows, tokens, "each", torch.device("cpu"))
    result = step.reduce_and_check(list(model.parameters()), loss_sum, tokens, False, step=1, rows=rows, find_rank=str)
    return (
        result.loss,
        float(loss_sum),
        whole({n: p.grad for n, p in model.named_parameters()}),
        whole(dict(model.named_parameters())),
    )


def test_a_rank_that_has_no_valid_token_changes_nothing():
    out = run_ranks(lone_rank_without_labels, 2, FAMILIES["llama"], layout(2))
    expected, grads = reference(FAMILIES["llama"], out[0][3], [0])
    assert out[1][1] == 0.0
    assert out[0][0] == pytest.approx(expected, rel=1e-6)
    assert worst(out[0][2], grads) < 1e-5


def bf16_step(context, config, how):
    out = one_step(context, config, how)
    return out["loss"], out["grads"], out["weights"]


def test_bf16_mixed_is_within_its_rounding():
    out = run_ranks(bf16_step, 2, FAMILIES["llama"], layout(2, micro_batch=4, param_dtype="bf16"))
    expected, grads = reference(FAMILIES["llama"], out[0][2], range(GLOBAL_BATCH))
    assert out[0][0] == pytest.approx(expected, rel=2e-3)
    assert worst(out[0][1], grads) < 3e-2


def documents_apart(context, config, attention):
    """Hidden states of a row before and after its first document is changed."""
    from shardwise.model import attention as path

    model = sharded(config, layout(1, attention=attention))
    model.eval()
    data = Packed()
    ids, positions = torch.from_numpy(data.ids[:1]), torch.from_numpy(data.positions[:1])
    changed = ids.clone()
    a, b = data.spans[0][0]
    changed[0, a:b] = (changed[0, a:b] + 1) % 257
    path.set_borders(path.borders(positions, torch.device("cpu")))
    with torch.no_grad():
        return [
            model(input_ids=x, position_ids=positions, use_cache=False).logits[0, b:].numpy() for x in (ids, changed)
        ], data.spans[0]


@pytest.mark.parametrize("attention", ["document", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2 tied"])
def test_changing_document_one_leaves_the_logits_of_the_others_unchanged(family, attention):
    (before, after), spans = run_ranks(documents_apart, 1, FAMILIES[family], attention)[0]
    assert len(spans) > 1 and np.array_equal(before, after)
