"""A layout holds every choice, and reading one defaults nothing."""

import json

import pytest

from shardwise.layout import CHUNK_BYTES, Layout, chunk_tokens, mesh_of


def made(**changes):
    keys = {
        "strategy": "full_shard",
        "wrap": "auto",
        "world_size": 2,
        "dp_shard": 2,
        "dp_replicate": 1,
        "master_dtype": "fp32",
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "activation_checkpointing": "none",
        "micro_batch": 2,
        "grad_accum": 4,
        "grad_sync": "each",
        "offload": "none",
        "loss": "chunked",
        "loss_chunk_tokens": 512,
        "optimizer": "adamw",
        "optimizer_impl": "fused",
        "attention": "document",
        "compile": False,
    }
    return Layout(**{**keys, **changes})


def test_a_layout_survives_json():
    assert Layout.from_json(json.loads(json.dumps(made().to_json()))) == made()


@pytest.mark.parametrize("key", list(made().to_json()))
def test_no_key_is_defaulted_on_reading(key):
    record = made().to_json()
    del record[key]
    with pytest.raises(ValueError, match=key):
        Layout.from_json(record)


def test_an_unknown_key_is_refused_on_reading():
    with pytest.raises(ValueError, match="tensor_parallel"):
        Layout.from_json({**made().to_json(), "tensor_parallel": 2})


def test_no_shard_replicates_over_every_rank():
    assert mesh_of("no_shard", 8) == (1, 8)
    assert mesh_of("full_shard", 8) == mesh_of("shard_grad_op", 8) == (8, 1)


@pytest.mark.parametrize("vocab", [257, 1024, 32000, 128256, 262144])
def test_a_chunk_of_logits_is_at_most_32_mib_unless_that_is_fewer_than_64_tokens(vocab):
    tokens = chunk_tokens(vocab)
    assert tokens == 64 or (tokens > 64 and tokens * vocab * 4 <= CHUNK_BYTES)
