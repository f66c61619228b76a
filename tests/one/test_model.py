"""Models are built without memory, with real buffers, and cut where they repeat; what the loss cannot do is refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise import model as models
from shardwise.errors import OnDisk, ShardwiseError, UsageError
from shardwise.model.attention import borders
from shardwise.source import ModelSource, find_shape, resolve, shapes
from tests.worlds import FAMILIES, LLAMA


def built(config, **options):
    return models.build(ModelSource("shape", "tiny", config=config), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_on_meta_and_buffers_are_real_and_right(family):
    model = built(FAMILIES[family])
    assert {p.device.type for p in model.parameters()} == {"meta"}
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[family]))
    expected = dict(reference.named_buffers())
    assert {name for name, _ in model.named_buffers()} == set(expected)
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())


def test_a_large_shape_is_built_in_seconds_with_the_published_number_of_parameters():
    name, entry = find_shape("llama-3.1-8b")
    model = built({"model_type": entry["model_type"], **entry["config"]})
    assert name == "Llama-3.1-8B" and sum(p.numel() for p in model.parameters()) == entry["params"] == 8_030_261_248


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", ["embedding", "block", "block", "block", "head"]),
        ("llama tied", ["block", "block", "block", "embedding+head"]),
        ("gpt2", ["block", "block", "embedding+head"]),
    ],
)
def test_units_are_blocks_embedding_and_head_and_a_tied_weight_is_in_one(family, kinds):
    found = models.units(built(FAMILIES[family]))
    assert [unit.kind for unit in found] == kinds
    names = [name for unit in found for name in unit.modules]
    assert len(names) == len(set(names))


def test_a_plain_module_is_cut_at_its_largest_list_of_children():
    model = torch.nn.ModuleDict(
        {
            "small": torch.nn.ModuleList([torch.nn.Linear(2, 2)] * 2),
            "body": torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))),
        }
    )
    assert [unit.modules for unit in models.units(model)] == [("body.0",), ("body.1",), ("body.2",)]


def test_a_model_that_caps_its_logits_is_refused_by_name():
    config = {
        "model_type": "gemma2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
    }
    with pytest.raises(UsageError) as caught:
        built(config)
    assert caught.value.what == "the head of `tiny` is not a plain linear layer: final_logit_softcapping=30.0"


@pytest.mark.parametrize(
    ("positions", "spans"),
    [
        ([[0, 1, 2, 3]], [(0, 0, 4)]),
        ([[0, 1, 0, 1]], [(0, 0, 2), (0, 2, 4)]),
        ([[0, 0, 0, 1], [0, 1, 2, 0]], [(0, 0, 1), (0, 1, 2), (0, 2, 4), (1, 0, 3), (1, 3, 4)]),
        ([[5, 6, 0, 1]], [(0, 0, 2), (0, 2, 4)]),
    ],
)
def test_documents_begin_where_positions_return_to_zero_and_at_every_row(positions, spans):
    found = borders(torch.tensor(positions), torch.device("cpu"))
    assert list(found.spans) == spans and found.longest == max(b - a for _, a, b in spans)


def test_shape_names_match_without_case_and_without_hf():
    assert (
        find_shape("LLAMA-2-7B")[0] == "Llama-2-7b-hf"
        and find_shape("meta-llama/Llama-3.1-8B")[0] == "Llama-3.1-8B"
        and find_shape("nothing") is None
    )
    assert len(shapes()) == 38


@pytest.mark.parametrize(
    ("model", "kind", "what"),
    [
        ({"shape": "llama-3.1-9b"}, UsageError, "`llama-3.1-9b` is none of the 38 shapes that ship with shardwise"),
        ("llama-3.1-8b", UsageError, "`llama-3.1-8b` is the name of a shape, not of trained weights"),
        ("no-such-thing", UsageError, "`no-such-thing` is no folder here and no hub id"),
        ("./missing", OnDisk, "model folder `./missing` does not exist"),
    ],
)
def test_a_model_that_cannot_be_meant_is_refused_with_the_nearest(model, kind, what):
    with pytest.raises(kind) as caught:
        resolve(model)
    assert caught.value.what == what and caught.value.hints


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(OnDisk, match=r"is a folder without `config.json`"):
        resolve(str(tmp_path))


def factory_of_nothing():
    return 3


@pytest.mark.parametrize(
    ("factory", "what"),
    [
        ("tests.one.test_model:nowhere", "cannot be imported"),
        ("no_such_module:make", "cannot be imported"),
        ("tests.one.test_model:factory_of_nothing", "returned int"),
    ],
)
def test_a_factory_that_fails_its_contract_is_refused(factory, what):
    with pytest.raises(ShardwiseError, match=what):
        models.build(ModelSource("factory", factory, factory=factory))


def test_remote_code_is_not_run_unless_asked_for(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    model.save_pretrained(tmp_path)
    config = (
        (tmp_path / "config.json")
        .read_text()
        .replace('"model_type": "llama"', '"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}')
    )
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UsageError) as caught:
        models.build(resolve(str(tmp_path)))
    assert "trust_remote_code" in caught.value.text() and not (tmp_path / "ran").exists()
