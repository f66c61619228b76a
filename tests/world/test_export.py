"""An export is a folder that plain transformers loads, with the very weights of the checkpoint, and nothing of ours is needed to read it."""

import json
import resource
import signal

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from shardwise import checkpoint, export, meter, optim
from shardwise.config import OptimizerConfig
from shardwise.errors import NotReady, OnDisk
from shardwise.rundir import RunDir
from shardwise.world import run_ranks
from tests.worlds import FAMILIES, LLAMA, layout, sharded, whole

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
IDS = torch.arange(24).reshape(2, 12) * 7 % 257


def saving(context, folder, config, dtype):
    """Two steps of two checkpoints; the weights of the last."""
    model = sharded(config, layout(context.world_size))
    optimizer = optim.make_optimizer(model, OptimizerConfig(lr=1e-3))
    for step in (1, 2):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.01 * step)
        checkpoint.save(folder, step, model, optimizer, {"source_dtype": dtype})
    return whole(dict(model.named_parameters()))


def made(path, config, dtype="float32"):
    """A run folder with two checkpoints of two ranks, and plain transformers with the weights of the last."""
    run = RunDir.create(path, "", {})
    weights = run_ranks(saving, 2, run.checkpoints, config, dtype)[0]
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    loaded = plain.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False)
    assert not loaded.unexpected_keys
    plain.tie_weights()
    (path / "model").mkdir()
    plain.config.save_pretrained(path / "model")
    GenerationConfig(max_new_tokens=7).save_pretrained(path / "model")
    words = Tokenizer(models.WordLevel({"to": 0, "be": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", chat_template=TEMPLATE).save_pretrained(path / "tokenizer")
    (path / "tokenizer/tokenizer.json").chmod(0o600)
    return run, plain.eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return made(tmp_path_factory.mktemp("runs") / "llama", LLAMA, "bfloat16")


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def stored(out):
    """Name -> tensor of every file, as the safetensors library reads them."""
    found = {}
    for file in out.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"} and not set(found) & set(handle.keys())
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no iterator
    return found


@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2"])
def test_plain_transformers_loads_it_and_gives_the_same_logits(tmp_path, family):
    config = FAMILIES[family]
    run, plain = made(tmp_path / "run", config)
    out = tmp_path / "deep" / "out"
    result = export.export_run(run.path, out)
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert again.dtype == torch.float32 and torch.equal(logits(again), logits(plain))
    tied = again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert tied == (family != "llama")
    names = set(stored(out))
    assert names == {name for name, _ in plain.named_parameters()}, "each weight once, under its own name"
    num_params = sum(param.numel() for param in plain.parameters())
    assert result == {
        "path": str(out),
        "num_params": num_params,
        "dtype": "float32",
        "bytes": 4 * num_params,
        "step": 2,
        "verified": "tensors",
    }


def test_tokenizer_chat_template_and_generation_config_come_along_and_everyone_may_read_them(llama, tmp_path):
    export.export_run(llama[0].path, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer("to be").input_ids == [0, 1]
        and tokenizer.apply_chat_template([{"role": "user", "content": "be"}], tokenize=False) == "<|user|>be"
    )
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 7
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o644}
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize(("asked", "given"), [(None, "bfloat16"), ("float32", "float32"), ("float16", "float16")])
def test_the_dtype_is_that_of_the_source_unless_another_is_asked_for(llama, tmp_path, asked, given):
    run, plain = llama
    result = export.export_run(run.path, tmp_path / "out", dtype=asked)
    dtype = getattr(torch, given)
    facts = json.loads((tmp_path / "out/config.json").read_text())
    assert (result["dtype"], facts["dtype"], "torch_dtype" in facts) == (given, given, False)
    assert all(torch.equal(tensor, plain.get_parameter(name).to(dtype)) for name, tensor in stored(tmp_path / "out").items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == dtype and torch.equal(again.lm_head.weight, plain.lm_head.weight.to(dtype))


def test_what_exceeds_a_file_is_cut_into_several_with_an_index(llama, tmp_path, monkeypatch):
    run, plain = llama
    monkeypatch.setattr(export, "_FILE_BYTES", 50_000)
    said = []
    export.export_run(run.path, tmp_path / "out", dtype="float32", progress=said.append)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(said) == len(files)
    assert set(index["weight_map"].values()) == set(files) and index["metadata"]["total_size"] == 4 * sum(
        p.numel() for p in plain.parameters()
    )
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, framework="pt") as handle:
            assert name in handle.keys()  # noqa: SIM118 - no iterator
    assert all((tmp_path / "out" / file).stat().st_size < 50_000 + 4 * 257 * 64 for file in files)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(plain))


class Odd(nn.Module):
    """Numbers that exporters have lost: scalars, integers, truth, empty and odd-sized tensors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5, -2.5, 3.5]))
        self.scalar = nn.Parameter(torch.tensor(5.0))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.arange(5, dtype=torch.int32))
        self.register_buffer("exact", torch.tensor([0.1], dtype=torch.float64))
        self.register_buffer("nothing", torch.empty(0, 3))


def test_scalars_integers_and_odd_sizes_survive_also_from_a_model_without_a_config(tmp_path):
    run, model = RunDir.create(tmp_path / "run", "", {}), Odd()
    checkpoint.save(run.checkpoints, 1, model, torch.optim.AdamW(model.parameters()), {"source_dtype": "bfloat16"})
    said = []
    export.export_run(run.path, tmp_path / "out", progress=said.append)
    assert said[-1].startswith("no config.json: ")
    found = stored(tmp_path / "out")
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert found[name].dtype == expected.dtype and torch.equal(found[name], expected), name


def test_the_newest_checkpoint_is_taken_unless_a_step_is_asked_for(llama, tmp_path):
    run, plain = llama
    assert export.export_run(run.path, tmp_path / "old", step=1, dtype="float32")["step"] == 1
    old = stored(tmp_path / "old")["lm_head.weight"]
    np.testing.assert_allclose(plain.lm_head.weight.detach() - old, 0.02, rtol=1e-3)
    with pytest.raises(OnDisk, match="no whole checkpoint of step 7") as caught:
        export.export_run(run.path, tmp_path / "out", step=7)
    assert "1, 2" in caught.value.why and not (tmp_path / "out").exists()


def test_nothing_is_ever_written_over(llama, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    for place in (tmp_path / "taken", tmp_path / "taken/file", llama[0].path):
        with pytest.raises(OnDisk, match="is not empty"):
            export.export_run(llama[0].path, place)
    assert [file.name for file in (tmp_path / "taken").iterdir()] == ["file"]


def test_an_empty_folder_and_the_rest_of_a_killed_export_are_taken(llama, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "killed/.part").mkdir(parents=True)
    (tmp_path / "killed/.part/model.safetensors").write_text("torn")
    for name in ("empty", "killed"):
        export.export_run(llama[0].path, tmp_path / name)
        AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert not (tmp_path / name / ".part").exists()


def test_a_damaged_checkpoint_is_refused_before_anything_is_written(tmp_path):
    run, _ = made(tmp_path / "run", LLAMA)
    file = run.checkpoints / "step-2/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(OnDisk, match="checkpoint `step-2` is not whole") as caught:
        export.export_run(run.path, tmp_path / "out")
    assert "__0_0.distcp" in caught.value.lines[0][1] and not (tmp_path / "out").exists()
    assert export.export_run(run.path, tmp_path / "out", step=1)["step"] == 1


def exporting_with_small_files(context, run, out):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    export.export_run(run, out)


def test_a_full_disk_is_named_and_leaves_nothing(llama, tmp_path):
    with pytest.raises(NotReady, match="the export cannot be written: File too large"):
        run_ranks(exporting_with_small_files, 1, llama[0].path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def exporting_measured(context, folder):
    """Peak bytes above the start while 16 tensors of 8 MiB each are exported as bf16."""
    run = RunDir.create(folder / "run", "", {})
    model = nn.ModuleList(nn.Linear(2048, 1024, bias=False) for _ in range(16))
    checkpoint.save(run.checkpoints, 1, model, torch.optim.AdamW(model.parameters()), {"source_dtype": "bfloat16"})
    measure = meter.Meter("cpu")
    measure.start()
    with measure.window("export"):
        export.export_run(run.path, folder / "out")
    return measure.kind, measure.peaks["export"]


def test_an_export_holds_one_tensor_at_a_time_not_the_model(tmp_path):
    ((kind, peak),) = run_ranks(exporting_measured, 1, tmp_path)
    if kind != "livebytes":
        pytest.skip("no C compiler on this machine, so the peak cannot be measured exactly")
    # The tensor, the piece of it that DCP reads, and the cast: 8 + 8 + 4 MiB at most, of 128.
    assert 8 * 2**20 <= peak <= 21 * 2**20
