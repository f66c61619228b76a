"""The run file's keys: each documented once, strict in its type, and the page made from them is the one in docs."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shardwise.config import COLUMNS, DataConfig, LayoutConfig, OptimizerConfig, RunConfig, reference_page
from shardwise.config.combinations import impossible
from shardwise.config.reference import all_keys, takes
from shardwise.config.yamltext import read_tree, read_value, typed, write_tree

REPOSITORY = Path(__file__).parents[2]
SMALLEST = {
    "model": "org/name",
    "data": {"train": "a.txt", "seq_len": 8},
    "global_batch": 4,
    "optimizer": {"lr": 0.1},
    "run_dir": "runs/a",
}


def config(**changes):
    return RunConfig.model_validate({**SMALLEST, **changes})


def test_the_page_in_docs_is_the_one_made_from_the_keys():
    page = (REPOSITORY / "docs" / "run-file.md").read_text("utf-8")
    assert page == reference_page(), (
        "run `python -c 'from shardwise.config import reference_page as p; print(p(), end=\"\")' > docs/run-file.md`"
    )


def test_the_smallest_run_file_of_the_page_loads():
    block = re.search(r"```yaml\n(.*?)```", reference_page(), re.S)
    assert block is not None
    assert RunConfig.model_validate(yaml.safe_load(block[1])).optimizer.lr == 1e-5


def test_every_key_says_what_it_is_and_every_number_has_a_unit_or_is_a_plain_ratio():
    plain = {"seed", "optimizer.lr", "optimizer.betas", "optimizer.eps", "optimizer.clip"}
    for key in all_keys():
        assert len(key.what) > 10, key.name
        assert not key.what.endswith("."), key.name
        if "number" in takes(key.hint):
            assert key.unit or key.name in plain, f"{key.name} has no unit"


def test_every_key_that_must_be_given_has_an_example_that_it_takes():
    for key in all_keys():
        assert bool(key.example) == key.required, key.name
        if key.required and not key.sections:
            assert key.example == typed(read_value(key.example)), key.name


def test_what_changes_memory_or_time_says_its_price():
    levers = {"data.seq_len", "layout.strategy", "layout.micro_batch", "layout.activation_checkpointing", "layout.grad_sync",
              "layout.attention", "precision", "reduce_dtype", "optimizer.name", "checkpoint.every", "eval_every"}  # fmt: skip
    assert {key.name for key in all_keys() if key.price} >= levers


def test_the_names_of_columns_are_those_the_data_room_reads():
    from shardwise.data.columns import OURS

    assert COLUMNS == OURS


def test_the_smallest_run_file_has_the_documented_defaults():
    small = config()
    assert (small.epochs, small.steps, small.seed, small.precision, small.reduce_dtype, small.layout) == (
        1,
        None,
        0,
        "bf16-mixed",
        "fp32",
        "auto",
    )
    assert (small.optimizer.betas, small.optimizer.weight_decay, small.optimizer.clip, small.optimizer.schedule) == (
        (0.9, 0.95),
        0.1,
        1.0,
        "cosine",
    )
    assert (small.checkpoint.keep_last, small.checkpoint.keep_best, small.log_every, small.margin) == (2, 0, 50, 0.05)


def test_a_config_is_frozen_and_survives_pickling():
    one = config(layout={"strategy": "full_shard"}, data={"train": ["a", {"path": "b"}], "seq_len": 8, "validation": {"v": "c"}})
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(ValidationError, match="frozen"):
        one.seed = 2


def test_a_config_dumped_to_json_loads_equal():
    one = config(
        layout={"grad_accum": 2}, early_stop={"patience": 2}, eval_every=5, data={"train": "a", "seq_len": 8, "validation": 0.1}
    )
    assert RunConfig.model_validate_json(one.model_dump_json()) == one


@pytest.mark.parametrize("word", ["full_shard", "FULL_SHARD", "ShardingStrategy.FULL_SHARD", "FSDP.FULL_SHARD"])
def test_a_strategy_is_understood_in_fsdp1_s_spellings(word):
    assert LayoutConfig(strategy=word).strategy == "full_shard"


def test_ddp_is_another_name_of_no_shard():
    assert LayoutConfig(strategy="ddp").strategy == LayoutConfig(strategy="DDP").strategy == "no_shard"


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (OptimizerConfig, {"lr": "0.1"}),
        (OptimizerConfig, {"lr": 0}),
        (OptimizerConfig, {"lr": float("nan")}),
        (OptimizerConfig, {"lr": 1, "betas": [0.9]}),
        (OptimizerConfig, {"lr": 1, "betas": [0.9, 1.0]}),
        (OptimizerConfig, {"lr": True}),
        (DataConfig, {"train": "a", "seq_len": 8.0}),
        (DataConfig, {"train": "a", "seq_len": True}),
        (DataConfig, {"train": "", "seq_len": 8}),
        (DataConfig, {"train": [], "seq_len": 8}),
        (DataConfig, {"train": "a", "seq_len": 8, "validation": 1.0}),
        (DataConfig, {"train": "a", "seq_len": 8, "validation": True}),
        (DataConfig, {"train": "a", "seq_len": 8, "more": 1}),
        (LayoutConfig, {"strategy": "hybrid_shard"}),
        (LayoutConfig, {"micro_batch": 0}),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused(section, values):
    with pytest.raises(ValidationError):
        section.model_validate(values)


def test_keys_that_exclude_each_other_are_refused_in_python_too():
    with pytest.raises(ValidationError, match=r"eval_every: evaluates on `data\.validation`, which is not given"):
        config(eval_every=10)


def test_no_rule_about_several_keys_is_asked_about_a_value_that_is_wrong_already():
    values = {**config().model_dump(), "optimizer": {"warmup": "x", "betas": None, "min_lr": 0, "lr": None}}
    assert impossible(values, {"optimizer.warmup", "optimizer.betas", "optimizer.lr"}) == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("1.0e-5", 1e-5), ("1E5", 1e5), (".5", 0.5), ("1_000", 1000), ("010", 10), ("-3", -3), ('"64"', "64"), ("yes", "yes"),
        ("no", "no"), ("on", "on"), ("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("12:30:00", "12:30:00"),
        ("2024-01-01", "2024-01-01"), ("0x10", "0x10"), ("[1, a]", [1, "a"]), ("{a: 1}", {"a": 1}), ("e5", "e5"), ("1e", "1e"),
    ],
)  # fmt: skip
def test_yaml_is_read_as_version_1_2_says(text, value):
    found = read_value(text)
    assert found == value
    assert type(found) is type(value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")) | st.just(" ")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_-. 1", min_size=1, max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(PLAIN)
def test_what_is_written_as_yaml_reads_back_equal_in_both_forms(value):
    assert read_tree(write_tree(value)).value == value
    assert read_value(typed(value)) == value


def test_every_key_has_its_line_also_inside_lists_and_merged_mappings():
    tree = read_tree("a: &x\n  b: 1\nc:\n  - d: 2\n  - 3\ne:\n  <<: *x\n  f: 4\n")
    assert tree.value == {"a": {"b": 1}, "c": [{"d": 2}, 3], "e": {"b": 1, "f": 4}}
    assert {".".join(map(str, path)): line for path, line in tree.lines.items()} == {
        "a": 1, "a.b": 2, "c": 3, "c.0": 4, "c.0.d": 4, "c.1": 5, "e": 6, "e.b": 2, "e.f": 8,
    }  # fmt: skip


def test_a_mapping_that_holds_itself_ends():
    assert "nested" in read_tree("a: &x {b: *x}").faults[0].what


@pytest.mark.parametrize("value", ["[]", "{}", "x"])
def test_code_in_yaml_tags_is_never_run(value):
    tree = read_tree(f"a: !!python/object/apply:os.getcwd {value}")
    assert tree.value == {"a": None}
    assert tree.faults[0].what == "the tag `!!python/object/apply:os.getcwd` has no meaning here"


def test_a_tag_that_the_value_does_not_fit_is_a_fault_not_a_crash():
    assert read_tree("a: !!int b").faults[0].what == "is not what its tag `!!int` says"


def test_config_and_run_file_import_neither_torch_nor_transformers():
    code = "import sys, shardwise.runfile, shardwise.console; sys.exit(any(n in sys.modules for n in ('torch', 'transformers', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
