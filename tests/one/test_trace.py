"""A trace finds what the real module allocates, beside parameters, between FSDP's events; without memory and without touching the module."""

import time

import pytest
import torch

from shardwise import model as models
from shardwise.source import ModelSource
from shardwise.spec import Trace
from shardwise.trace import model_spec, trace_step

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def built(**changes):
    model = models.build(ModelSource("shape", "small", config={**SHAPE, **changes}))
    return model, models.units(model)


def traced(model, units, **changes):
    keys = {
        "micro_batch": 2,
        "seq_len": 128,
        "dtype": "fp32",
        "activation_checkpointing": "none",
        "attention_path": "document",
        "chunk_tokens": 4096,
    }
    return trace_step(model, units, **{**keys, **changes})


def kept(trace, row="activations"):
    """Bytes of a row that live when the forward has ended."""
    point = next(p for p in trace.points if p.event == "post_forward" and trace.units[p.unit] == "root")
    return point.live.get(row, 0)


def test_the_traced_forward_keeps_what_the_real_one_keeps():
    """The same module, real tensors, counted by autograd's own hooks: every storage saved for backward, parameters left out."""
    model, units = built(num_hidden_layers=3)
    found = kept(traced(model, units, attention_path="sdpa", micro_batch=2)) + kept(
        traced(model, units, attention_path="sdpa"), "attention_masks"
    )
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(2, 128, dtype=torch.int64)
    positions = torch.arange(128).remainder(64).expand(2, -1).contiguous()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    real = sum(saved.values())
    # Beside what is saved, the output and the masks' bool original live while the forward runs.
    assert real == pytest.approx(found, rel=0.02), (real, found, hidden.shape)


def test_bytes_kept_grow_in_a_straight_line_with_the_micro_batch():
    model, units = built()
    two, three, four = (kept(traced(model, units, micro_batch=n)) for n in (2, 3, 4))
    assert four - three == three - two > 0


def test_a_middle_block_keeps_as_much_as_any_other_middle_block():
    deep, shallow = built(num_hidden_layers=8), built(num_hidden_layers=3)
    assert [p.peak for p in traced(*deep).points] == [p.peak for p in traced(*shallow).points]


def test_activation_checkpointing_keeps_one_hidden_state_a_block():
    model, units = built()
    points = {(p.event, p.unit): p for p in traced(model, units, activation_checkpointing="full").points}
    hidden = 2 * 128 * 64 * 4
    assert points["pre_forward", 2].live["activations"] - points["pre_forward", 1].live["activations"] == hidden
    assert kept(traced(model, units)) > 10 * hidden * 3


def test_bf16_keeps_less_than_fp32_but_norms_stay_fp32():
    model, units = built()
    half, whole = (kept(traced(model, units, dtype=dtype)) for dtype in ("bf16", "fp32"))
    assert 0.5 * whole < half < 0.75 * whole


def test_masks_are_a_row_with_sdpa_and_absent_with_document():
    model, units = built()
    masks = kept(traced(model, units, attention_path="sdpa"), "attention_masks")
    assert masks >= 3 * 2 * 128 * 128 * 4  # torch makes an fp32 copy of the bool mask in each of three blocks
    assert kept(traced(model, units), "attention_masks") == 0


def test_the_head_never_holds_whole_logits_and_its_peak_does_not_depend_on_how_many_chunks_there_are():
    model, units = built()

    def loss_bytes(micro_batch, chunk):
        trace = traced(model, units, micro_batch=micro_batch, chunk_tokens=chunk)
        return next(sum(p.peak.values()) - sum(p.live.values()) for p in trace.points if p.event == "loss")

    hidden = 128 * 64 * 4  # of one sequence; the gradient of the head's input grows with the batch
    assert loss_bytes(16, 64) - loss_bytes(8, 64) == 8 * hidden
    assert loss_bytes(8, 64) < 8 * 128 * 512 * 4


def test_a_long_head_continued_from_three_and_four_chunks_is_what_a_full_trace_finds(monkeypatch):
    import shardwise.trace as room

    model, units = built()

    def totals():
        return [
            (p.event, p.unit, sum(p.live.values()), sum(p.peak.values()))
            for p in traced(model, units, micro_batch=8, chunk_tokens=128).points
        ]

    short = totals()
    monkeypatch.setattr(room, "_CHUNKS", 10**9)
    assert totals() == short


def test_tracing_leaves_the_module_as_it_was():
    model, units = built()
    before = {name: (id(param), param.device.type, param.dtype) for name, param in model.named_parameters()}
    forwards = [module.forward for module in model.modules()]
    traced(model, units, dtype="bf16", activation_checkpointing="full")
    assert {name: (id(param), param.device.type, param.dtype) for name, param in model.named_parameters()} == before
    assert [module.forward for module in model.modules()] == forwards
    assert len(model.base_model.layers) == SHAPE["num_hidden_layers"] == model.config.num_hidden_layers
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_trace_is_read_from_disk_the_second_time_and_is_the_same(tmp_path):
    model, units = built()
    first = traced(model, units, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    stamp = file.stat().st_mtime_ns
    begin = time.perf_counter()
    assert traced(model, units, cache=tmp_path) == first
    assert time.perf_counter() - begin < 0.1 and file.stat().st_mtime_ns == stamp
    traced(model, units, cache=tmp_path, seq_len=64)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_trace_survives_json():
    trace = traced(*built())
    assert Trace.from_json(trace.to_json()) == trace


def test_a_tied_embedding_is_one_unit_with_the_head():
    model, units = built(tie_word_embeddings=True)
    spec = model_spec(model, units, "tied")
    assert spec.units[0].kind == "embedding+head" and spec.units[0].shapes == ((512, 64),)
    assert spec.num_params == sum(param.numel() for param in model.parameters()) == sum(unit.numel for unit in spec.units)
    assert any(p.event == "loss" for p in traced(model, units).points)


OTHERS = [
    {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 512,
        "n_positions": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    {**SHAPE, "model_type": "qwen3", "head_dim": 16},
    {**SHAPE, "model_type": "mixtral", "num_local_experts": 4},
]


@pytest.mark.parametrize("config", OTHERS, ids=lambda config: config["model_type"])
def test_other_architectures_are_traced_too(config):
    model = models.build(ModelSource("shape", "other", config=config))
    trace = traced(model, models.units(model))
    assert kept(trace) > 0 and trace.points[-1].event == "final"
