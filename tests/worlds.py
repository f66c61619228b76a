"""What tests with real ranks share: tiny models of several families, packed batches with known documents, a sharded model in one call."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise import model as models
from shardwise import sharding
from shardwise.layout import Layout
from shardwise.source import ModelSource

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
QWEN = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 257,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
FAMILIES = {"llama": LLAMA, "llama tied": {**LLAMA, "tie_word_embeddings": True}, "qwen2 tied": QWEN, "gpt2": GPT2}


def layout(world_size: int, strategy: str = "full_shard", **changes: Any) -> Layout:
    """A complete layout for ``world_size`` ranks in fp32."""
    whole = strategy == "no_shard"
    values: dict[str, Any] = {
        "strategy": strategy,
        "wrap": "auto",
        "world_size": world_size,
        "dp_shard": 1 if whole else world_size,
        "dp_replicate": world_size if whole else 1,
        "master_dtype": "fp32",
        "param_dtype": "fp32",
        "reduce_dtype": "fp32",
        "activation_checkpointing": "none",
        "micro_batch": 2,
        "grad_accum": 1,
        "grad_sync": "each",
        "offload": "none",
        "loss": "chunked",
        "loss_chunk_tokens": 37,
        "optimizer": "adamw",
        "optimizer_impl": "fused",
        "attention": "document",
        "compile": False,
    }
    return Layout(**{**values, **changes})


def sharded(config: dict[str, Any], how: Layout, seed: int = 0) -> torch.nn.Module:
    """The model cut over the ranks and filled with the seeded random weights. Collective."""
    source = ModelSource("shape", "tiny", config=config)
    model = models.build(source, attention_path=how.attention, chunk_tokens=how.loss_chunk_tokens)
    sharding.shard(model, models.units(model), how, sharding.make_mesh(how, "cpu"))
    sharding.materialise(model, torch.device("cpu"))
    models.initialise(model, seed, source.name)
    return model


@dataclass
class Rows:
    """What ``data.Batch`` is to a step."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray

    @property
    def num_valid(self) -> int:
        return int((self.labels != -100).sum())


class Packed:
    """Rows of several documents each, some with few labels and two with none, as the data room would give them."""

    def __init__(self, num_rows: int = 12, length: int = 64, vocab: int = 257, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.num_rows = num_rows
        self.ids = rng.integers(0, vocab, (num_rows, length))
        self.positions = np.zeros((num_rows, length), np.int64)
        self.labels = np.full((num_rows, length), -100, np.int64)
        self.spans: list[list[tuple[int, int]]] = []
        for row in range(num_rows):
            cuts = [0, *sorted(int(c) for c in rng.choice(np.arange(1, length), 3, replace=False)), length]
            self.spans.append(list(itertools.pairwise(cuts)))
            for a, b in self.spans[-1]:
                self.positions[row, a:b] = np.arange(b - a)
                self.labels[row, a : b - 1] = self.ids[row, a + 1 : b]
            self.labels[row, rng.random(length) < rng.random()] = -100
        self.labels[[1, 3]] = -100
        self.valid = (self.labels != -100).sum(1)

    def rows(self, ids: Any) -> Rows:
        index = np.asarray(ids)
        labels = self.labels[index].copy()
        labels[index < 0] = -100
        return Rows(self.ids[index], self.positions[index], labels)


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Gathered copies that can be sent between processes. Collective."""
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone().numpy() for name, t in tensors.items()}


def worst(mine: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Largest ``|a - b| / max(|b|, 1e-3 * global norm)`` over the names, which must be the same."""
    assert set(mine) == set(other)
    everything = np.sqrt(sum(float((v.astype(np.float64) ** 2).sum()) for v in other.values()))
    return max(
        float(np.linalg.norm(mine[n].astype(np.float64) - other[n])) / max(float(np.linalg.norm(other[n])), 1e-3 * everything)
        for n in other
    )
