"""What a rank holds is its part and never the whole: while building, at rest, with random and with trained weights."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise import model as models
from shardwise import optim, sharding
from shardwise.config import OptimizerConfig
from shardwise.errors import OnDisk
from shardwise.ledger import shard_numel
from shardwise.meter import Meter
from shardwise.source import resolve
from shardwise.world import run_ranks
from tests.worlds import FAMILIES, LLAMA, layout, sharded, whole

DEEP = {**LLAMA, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}


def built_and_measured(context, config):
    models.build(models_source(config))  # imports of the model's code are no weights
    meter = Meter("cpu")
    meter.start()
    with meter.window("build"):
        model = sharded(config, layout(context.world_size))
    return meter.peaks["build"], sum(p.numel() * 4 for p in model.parameters()), sharding.stored_bytes(model)


def models_source(config):
    from shardwise.source import ModelSource

    return ModelSource("shape", "tiny", config=config)


def test_no_rank_ever_holds_the_whole_model_while_it_is_built():
    for peak, everything, stored in run_ranks(built_and_measured, 4, DEEP):
        largest_block = everything / 12
        assert stored < everything / 4 * 1.05
        assert peak < stored + 2.5 * largest_block < everything / 2


def stored(context, config, strategy):
    model = sharded(config, layout(context.world_size, strategy))
    optimizer = optim.make_optimizer(model, OptimizerConfig(lr=1e-3))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    state = sum(
        entry[key].to_local().untyped_storage().nbytes()
        for entry in optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    )
    return sharding.stored_bytes(model), state, [tuple(p.shape) for p in model.parameters()]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_rank_stores_one_nth_padding_included_as_the_ledger_says(family):
    for world in (1, 2, 4):
        for bytes_here, state, shapes in run_ranks(stored, world, FAMILIES[family], "full_shard"):
            assert bytes_here == sum(shard_numel(shape, world) for shape in shapes) * 4
            assert state <= 2 * bytes_here
    assert run_ranks(stored, 2, FAMILIES[family], "no_shard")[0][0] == sum(int(np.prod(shape)) for shape in shapes) * 4


def loaded(context, folder):
    source = resolve(str(folder))
    how = layout(context.world_size)
    model = models.build(source)
    sharding.shard(model, models.units(model), how, sharding.make_mesh(how, "cpu"))
    sharding.materialise(model, torch.device("cpu"))
    try:
        models.load_weights(model, folder)
    except OnDisk as error:
        return error.text()
    return whole({**dict(model.named_parameters()), **dict(model.named_buffers())})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_weights_arrive_as_transformers_would_load_them(tmp_path, family, dtype):
    torch.manual_seed(1)
    saved = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[family])).to(dtype)
    saved.save_pretrained(tmp_path, max_shard_size="100KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for tensors in run_ranks(loaded, 3, tmp_path):
        assert set(tensors) == {n for n, _ in [*expected.named_parameters(), *expected.named_buffers()]}
        for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
            assert np.array_equal(tensors[name], tensor.detach().numpy()), name


def damaged(folder, change):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return run_ranks(loaded, 1, folder)[0]


def test_missing_misnamed_and_misshapen_tensors_are_named_all_at_once(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_prj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:200].clone()

    text = damaged(tmp_path, change)
    assert text.startswith(f"error: weights in `{tmp_path}` do not fit the model: 2 missing, 1 unknown, 1 of another shape\n")
    assert "`model.layers.0.mlp.up_proj.weight`, nearest in the file `model.layers.0.mlp.up_prj.weight`" in text
    assert "`lm_head.weight`: model [257, 64], file [200, 64]" in text


def test_a_file_that_the_index_names_and_is_not_there_is_named(tmp_path):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(tmp_path, max_shard_size="100KB")
    name = sorted(set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values()))[1]
    (tmp_path / name).unlink()
    assert run_ranks(loaded, 1, tmp_path)[0].startswith(f"error: `{tmp_path}` lacks {name}\n")


def test_a_truncated_file_and_a_folder_of_pickles_are_refused(tmp_path):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(tmp_path / "a")
    file = tmp_path / "a/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "is not whole" in run_ranks(loaded, 1, tmp_path / "a")[0]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b/model.safetensors").rename(tmp_path / "b/pytorch_model.bin")
    assert "lacks a *.safetensors file" in run_ranks(loaded, 1, tmp_path / "b")[0]
