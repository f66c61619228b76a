"""A run file is read whole or refused whole: every problem at once, with its place and something to write instead."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import RunConfig
from shardwise.config.reference import all_keys
from shardwise.errors import OnDisk, UsageError
from shardwise.runfile import load_run_file
from shardwise.runfile.foreign import OUT, foreign_key
from shardwise.runfile.words import WORDS

GOOD = """\
model: org/name
data:
  train: texts/*.txt
  validation: 0.02
  seq_len: 512
global_batch: 64
optimizer: {lr: 1e-5}
run_dir: runs/first
"""
HINT = "\n\nhint: docs/run-file.md has every key: what it takes, its default and its price"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(text: str = GOOD, *overrides: str):
    Path("run.yaml").write_text(text, "utf-8")
    return load_run_file(Path("run.yaml"), overrides)


def refused(text: str = GOOD, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(text, *overrides)
    return caught.value.text()


def plus(*lines: str) -> str:
    """The good file with more lines; the first of them is line 9."""
    return GOOD + "\n".join(lines) + "\n"


# ---- what is read


def test_values_come_from_the_file_the_flags_and_the_defaults_in_that_order_of_weakness():
    run = load(plus("seed: 1", "epochs: 2"), "seed=3")
    assert (run.config.seed, run.config.epochs, run.config.steps) == (3, 2, None)
    assert run.config.optimizer.lr == 1e-5


def test_each_given_key_knows_its_line_or_its_flag():
    run = load(GOOD, "seed=3", "optimizer.clip=0.5")
    assert run.sources["data.seq_len"] == "run.yaml:5"
    assert run.sources["optimizer.lr"] == "run.yaml:7"
    assert run.sources["seed"] == "--set seed=3"
    assert run.sources["optimizer.clip"] == "--set optimizer.clip=0.5"
    assert "epochs" not in run.sources


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("data.seq_len", "`data.seq_len: 512` (run.yaml:5)"),
        ("data", "`data` (run.yaml:2)"),
        ("seed", "`--set seed=3`"),
        ("data.columns.text", "`--set data.columns={text: body}`"),
        ("log_every", "`log_every: 50` (default)"),
        ("optimizer.betas", "`optimizer.betas: [0.9, 0.95]` (default)"),
        ("data.cache_dir", "`data.cache_dir`, not given"),
        ("layout", "`--set layout.grad_accum=2`"),
        ("layout.strategy", "`layout.strategy`, not given"),
    ],
)
def test_where_names_a_key_its_value_and_its_place(key, text):
    assert load(plus("layout: auto"), "seed=3", "data.columns={text: body}", "layout.grad_accum=2").where(key) == text


def test_a_run_file_crosses_a_process_border():
    run = load(GOOD, "layout.strategy=full_shard")
    assert pickle.loads(pickle.dumps(run)) == run


def test_setting_a_key_of_the_layout_replaces_auto_and_keeps_nothing_else():
    layout = load(plus("layout: auto"), "layout.strategy=ShardingStrategy.SHARD_GRAD_OP", "layout.grad_accum=2").config.layout
    assert (layout.strategy, layout.grad_accum, layout.micro_batch) == ("shard_grad_op", 2, None)


def test_setting_the_model_s_shape_replaces_a_hub_id():
    assert load(GOOD, "model.shape=llama-3.1-8B-hf").config.model.shape == "llama-3.1-8B-hf"


def test_the_last_of_two_flags_of_one_key_wins():
    assert load(GOOD, "seed=1", "seed=2").config.seed == 2


def test_a_number_given_by_flag_to_a_key_of_text_is_text_since_a_shell_eats_quotes():
    assert load(GOOD, "run_dir=2024").config.run_dir == "2024"
    assert load(GOOD, "data.system=1e5").config.data.system == "1e5"


def test_an_entry_of_a_list_can_be_set():
    text = GOOD.replace("texts/*.txt", "[{path: a, weight: 1}, {path: b, weight: 1}]")
    assert load(text, "data.train.1.weight=3").config.data.train[1].weight == 3


def test_the_text_with_overrides_is_the_file_itself_where_there_are_none():
    assert load().text_with_overrides() == GOOD


def test_the_text_with_overrides_loads_to_the_same_config():
    run = load(GOOD, "layout.strategy=ddp", "run_dir=1e5", "optimizer.warmup=0.03")
    assert run.text_with_overrides().startswith(
        "# run.yaml with --set layout.strategy=ddp --set run_dir=1e5 --set optimizer.warmup=0.03\n"
    )
    assert load(run.text_with_overrides()).config == run.config


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm():
    Path("run.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    run = load_run_file(Path("run.yaml"))
    assert (run.config.model, run.sources["data.seq_len"]) == ("org/name", "run.yaml:5")


@pytest.mark.parametrize("example", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_that_ships_loads(example):
    assert load_run_file(example).config.global_batch > 0


# ---- the form of a refusal


def test_all_problems_are_told_at_once_in_the_order_of_the_file_then_of_the_flags():
    text = """\
model: llama-3.1-8b
data:
  train: chats/*.jsonl
  max_seq_length: 2048
  formt: chat
epochs: "3"
per_device_train_batch_size: 4
bf16: true
optimizer: {name: AdamW, lr: 1e-5, betas: [0.95]}
layout: {strategy: HYBRID_SHARD, micro_batch: 0}
run_dir: runs/x
early_stop: {patience: 3}
"""
    assert (
        refused(text, "cluster.device=h100", "data.show=x", "foo")
        == """\
error: run.yaml: 16 problems
  1: `model: llama-3.1-8b` (run.yaml:1)
     names a shape, `{shape: llama-3.1-8b}`, not trained weights, and no folder
     that is here
     write `model: {shape: llama-3.1-8b}` (random weights), or give a folder or
     a hub id, ORG/NAME, for trained ones
  2: `data.max_seq_length: 2048` (run.yaml:4)
     is TRL's word for `data.seq_len`
     write `seq_len: 2048` under `data`
  3: `data.formt: chat` (run.yaml:5)
     is no key; the nearest is `data.format`
     write `format: chat` under `data`
  4: `epochs: "3"` (run.yaml:6)
     `epochs` takes a whole number from 1 up; this is a number in quotes
     write `epochs: 3`
  5: `per_device_train_batch_size: 4` (run.yaml:7)
     is Hugging Face Trainer's word for `layout.micro_batch`: the plan finds it
     where it is left out; `global_batch` counts all ranks
     write `micro_batch: 4` under `layout`
  6: `bf16: true` (run.yaml:8)
     is Hugging Face Trainer's word for `precision`
     write `precision: bf16-mixed`
  7: `optimizer.name: AdamW` (run.yaml:9)
     `name` takes `adamw`
     write `name: adamw` under `optimizer`
  8: `optimizer.betas: [0.95]` (run.yaml:9)
     `betas` takes [a, b], each a number from 0 and below 1; this is a list of
     1
     leave it out: the default is `[0.9, 0.95]`
  9: `layout.strategy: HYBRID_SHARD` (run.yaml:10)
     hybrid sharding is not built yet; `strategy` takes `full_shard`,
     `shard_grad_op`, `no_shard` or `null`
     write `strategy: full_shard` under `layout` (cut over all ranks), or leave
     it to the plan
  10: `layout.micro_batch: 0` (run.yaml:10)
      `micro_batch` takes a whole number from 1 up or `null`; this is out of
      range
      leave it out
  11: `early_stop: {patience: 3}` (run.yaml:12)
      watches the validation loss, and `data.validation` is not given
      write `validation: 0.02` under `data`, or leave `early_stop` out
  12: `early_stop: {patience: 3}` (run.yaml:12)
      counts evaluations, and `eval_every` is not given: there is none before
      the end
      write `eval_every: 100`, or leave `early_stop` out
  13: `global_batch` is missing
      rows a step, over all ranks; the plan splits it among them and never
      changes it
      write `global_batch: 64`
  14: `--set cluster.device=h100`
      is no device shardwise knows by that name
      write `--set cluster.device=h100-80gb`, or
      `--set cluster.device=h100-96gb`
  15: `--set data.show=x`
      `show` takes a whole number from 0 up; this is text
      leave it out: the default is `0`
  16: `--set foo`
      is not KEY=VALUE
      write for example `--set data.seq_len=512`

hint: docs/run-file.md has every key: what it takes, its default and its price"""
    )


def problem(text: str, *overrides: str) -> str:
    """The only problem, without its number and indent."""
    first, *rest = refused(text, *overrides).removesuffix(HINT).split("\n")
    assert first == "error: run.yaml: 1 problem"
    return "\n".join(line[5:] for line in rest)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        # another tool's words, with their values translated
        ("learning_rate: 2e-5", "is Hugging Face Trainer's word for `optimizer.lr`\nwrite `lr: 2.0e-5` under `optimizer`"),
        ("gradient_accumulation_steps: 8",
         "is Hugging Face Trainer's word for `layout.grad_accum`: the plan finds it\nwhere it is left out\nwrite `layout: {grad_accum: 8}`"),
        ("fp16: true",
         "is Hugging Face Trainer's word for `precision`: fp16 is not built yet,\nbf16 needs no loss scaling\nwrite `precision: bf16-mixed`"),
        ("fp16: false",
         "is Hugging Face Trainer's word for `precision`: fp16 is not built yet,\nbf16 needs no loss scaling; off is what it is without\nleave it out"),
        ("num_train_epochs: 3.0", "is Hugging Face Trainer's word for `epochs`\nwrite `epochs: 3`"),
        ("max_steps: 500", "is Hugging Face Trainer's word for `steps`\nwrite `steps: 500`"),
        ("max_steps: -1",
         "is Hugging Face Trainer's word for `steps`; `-1` has no counterpart: it\ntakes a whole number from 1 up or `null`\nleave it out"),
        ("warmup_ratio: 0.03", "is Hugging Face Trainer's word for `optimizer.warmup`\nwrite `warmup: 0.03` under `optimizer`"),
        ("warmup_steps: 100", "is Hugging Face Trainer's word for `optimizer.warmup`\nwrite `warmup: 100` under `optimizer`"),
        ("lr_scheduler_type: constant_with_warmup",
         "is Hugging Face Trainer's word for `optimizer.schedule`\nwrite `schedule: constant` under `optimizer`"),
        ("lr_scheduler_type: polynomial",
         "is Hugging Face Trainer's word for `optimizer.schedule`; `polynomial` has\nno counterpart: it takes `cosine`, `linear` or `constant`\n"
         "leave it out"),
        ("output_dir: out", "is Hugging Face Trainer's word for `run_dir`\nwrite `run_dir: out`"),
        ("save_total_limit: 3", "is Hugging Face Trainer's word for `checkpoint.keep_last`\nwrite `checkpoint: {keep_last: 3}`"),
        ("max_grad_norm: 0", "is Hugging Face Trainer's word for `optimizer.clip`\nwrite `clip: null` under `optimizer`"),
        ("gradient_checkpointing: true",
         "is Hugging Face Trainer's word for `layout.activation_checkpointing`\nwrite `layout: {activation_checkpointing: full}`"),
        ("fsdp: full_shard auto_wrap", "is Hugging Face Trainer's word for `layout.strategy`\nwrite `layout: {strategy: full_shard}`"),
        ("fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}",
         "is accelerate's word for `layout.strategy`: units, prefetch and state\ndicts need no keys\nwrite `layout: {strategy: shard_grad_op}`"),
        ("fsdp_sharding_strategy: 3", "is accelerate's word for `layout.strategy`\nwrite `layout: {strategy: no_shard}`"),
        ("sharding_strategy: HYBRID_SHARD",
         "is FSDP1's word for `layout.strategy`; hybrid sharding is not built yet\nwrite `layout: {strategy: full_shard}`, or leave it to the plan"),
        ("zero_stage: 3", "is DeepSpeed's word for `layout.strategy`\nwrite `layout: {strategy: full_shard}`"),
        ("zero_optimization: {stage: 2}", "is DeepSpeed's word for `layout.strategy`\nwrite `layout: {strategy: shard_grad_op}`"),
        ("cpu_offload: true", "is FSDP1's word: offload to host memory is not built yet\nleave it out"),
        ("mixed_precision: bf16", "is accelerate's word for `precision`\nwrite `precision: bf16-mixed`"),
        ("mixed_precision: fp16", "is accelerate's word for `precision`; `fp16` is not built yet\nwrite `precision: bf16-mixed`"),
        ("torch_dtype: torch.float32",
         "is transformers' word for `precision`: weights are kept in fp32 either way\nwrite `precision: fp32`"),
        ("model_name_or_path: a/b", "is Hugging Face Trainer's word for `model`\nwrite `model: a/b`"),
        ("packing: true", "is TRL's word: rows are packed always, and documents never see each other\nleave it out"),
        ("report_to: [wandb, tensorboard]",
         "is Hugging Face Trainer's word for `trackers`: metrics.jsonl is written\nalways, wandb is not built yet\nwrite `trackers: [tensorboard]`"),
        ("resume_from_checkpoint: true",
         "is Hugging Face Trainer's word: a flag says it:\n`shardwise train --resume RUN`\nleave it out"),
        # our own words in another place or spelling
        ("weight_decay: 0.01", "stands in another place: the key is `optimizer.weight_decay`\nwrite `weight_decay: 0.01` under `optimizer`"),
        ("strategy: full_shard", "stands in another place: the key is `layout.strategy`\nwrite `layout: {strategy: full_shard}`"),
        ("data.seq_len: 5", "points are for `--set`; in the file a key stands under its section\nwrite `seq_len: 5` under `data`"),
        ("Log-Every: 5", "is spelled `log_every`\nwrite `log_every: 5`"),
        ("log_evry: 5", "is no key; the nearest is `log_every`\nwrite `log_every: 5`"),
        ("per_device_train_batchsize: 5",
         "is no key; the nearest, `per_device_train_batch_size`, is Hugging Face\nTrainer's word for `layout.micro_batch`: the plan finds it where it is\n"
         "left out; `global_batch` counts all ranks\nwrite `layout: {micro_batch: 5}`"),
        ("zzz: 1",
         "is no key; there are: model, tokenizer, trust_remote_code, data, epochs,\nsteps, global_batch, seed, optimizer, precision, reduce_dtype, cluster,\n"
         "layout, eval_every, log_every, early_stop, checkpoint, trackers, margin,\nrun_dir\ntake it out"),
        # wrong types and ranges
        ("steps: 1e3", "`steps` takes a whole number from 1 up or `null`; this is not whole\nwrite `steps: 1000`"),
        ("epochs: 2.5", "`epochs` takes a whole number from 1 up; this is not whole\nleave it out: the default is `1`"),
        ("seed: -1", "`seed` takes a whole number from 0 up; this is out of range\nleave it out: the default is `0`"),
        ("log_every:", "`log_every` takes a whole number from 1 up; this is nothing\nleave it out: the default is `50`"),
        ("trust_remote_code: yes", "`trust_remote_code` takes `true` or `false`; this is none of these\nwrite `trust_remote_code: true`"),
        ("margin: 5", "`margin` takes a number from 0 to 0.5\nwrite `margin: 0.05`"),
        ("trackers: tensorboard", "`trackers` takes a list of `tensorboard`\nwrite `trackers: [tensorboard]`"),
        ("trackers: wandb",
         "a tracker for wandb is not built yet; `trackers` takes a list of\n`tensorboard`\nwrite `trackers: [tensorboard]`, or leave it out"),
        ("checkpoint: 100", "`checkpoint` takes `{every: ...}`; this is a number\nleave it out"),
        ("early_stop: 3", "`early_stop` takes `{patience: ...}` or `null`\nwrite `early_stop: {patience: 3}`"),
        # values spelled another tool's way
        ("precision: bf16", "`precision` takes `bf16-mixed` or `fp32`\nwrite `precision: bf16-mixed`"),
        ("precision: fp16-mixed", "fp16 is not built yet; `precision` takes `bf16-mixed` or `fp32`\nwrite `precision: bf16-mixed`"),
        ("layout: full_shard", "`layout` takes `auto` or `{strategy: ...}`\nwrite `layout: {strategy: full_shard}`"),
        # names that mean nothing
        ("tokenizer: {train_bpe: 100}", "`train_bpe` takes a whole number from 257 up; this is out of range\nwrite `train_bpe: 1024` under `tokenizer`"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_refused_with_what_to_write_instead(line, told):
    head, rest = problem(plus(line)).split("\n", 1)
    assert head.endswith(" (run.yaml:9)")
    assert rest == told


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("data.seq_len=long", "`seq_len` takes a whole number from 2 up; this is text\nwrite `--set data.seq_len=2048`"),
        ("data.validation=5",
         "`validation` takes a number above 0 and below 1, text, a mapping of names\nto text or `null`\nwrite `--set data.validation=0.05`"),
        ("optimizer.clip=0", "`clip` takes a number above 0 or `null`\nwrite `--set optimizer.clip=null`"),
        ("layout.strategy=zero3",
         "is DeepSpeed's word; `strategy` takes `full_shard`, `shard_grad_op`,\n`no_shard` or `null`\nwrite `--set layout.strategy=full_shard`"),
        ("layout.strategy=hybrid_shard",
         "hybrid sharding is not built yet; `strategy` takes `full_shard`,\n`shard_grad_op`, `no_shard` or `null`\n"
         "write `--set layout.strategy=full_shard` (cut over all ranks), or leave it\nto the plan"),
        ("layout.activation_checkpointing=selective",
         "selective activation checkpointing is not built yet;\n`activation_checkpointing` takes `none`, `full` or `null`\n"
         "write `--set layout.activation_checkpointing=full`, or\n`--set layout.activation_checkpointing=none`"),
        ("optimizer.name=adamw_bnb_8bit", "`adamw_bnb_8bit` is not built yet; `name` takes `adamw`\nwrite `--set optimizer.name=adamw`"),
        ("optimizer.lr=0", "`lr` takes a number above 0; this is out of range\nwrite `--set optimizer.lr=1.0e-5`"),
        ("data.columns.body=text", "our name comes first, then yours\nwrite `--set data.columns.text=body`"),
        ("data.columns.mesages=m",
         "is no column of ours; there are: text, prompt, completion, system,\nmessages, conversations, instruction, input, output\n"
         "write `--set data.columns.messages=m`"),
        ("cluster.device=h100", "is no device shardwise knows by that name\nwrite `--set cluster.device=h100-80gb`, or\n`--set cluster.device=h100-96gb`"),
        ("cluster.device=cuda", "is no card; left out it is what this machine has\nleave it out"),
        ("model=llama-3.1-8b",
         "names a shape, `{shape: llama-3.1-8b}`, not trained weights, and no folder\nthat is here\n"
         "write `--set model.shape=llama-3.1-8b` (random weights), or give a folder\nor a hub id, ORG/NAME, for trained ones"),
        ("model=gtp2",
         "is no folder here, and a hub id is written ORG/NAME; the nearest shapes:\ngpt2\n"
         "write `--set model.shape=gpt2` (random weights), or give a folder or a hub\nid, ORG/NAME, for trained ones"),
        ("model.shape=llama-3.1-9b",
         "is none of the 38 shapes that ship with shardwise; the nearest:\nLlama-3.1-8B, Llama-3.1-70B, Llama-3.1-405B\n"
         "write `--set model.shape=Llama-3.1-8B`, or give the shape itself:\n`{model_type: llama, hidden_size: 512, ...}`"),
        ("model={shape: gpt2, factory: a.b:c}", "`shape` and `factory` exclude each other\nkeep one of the two"),
        ("model.shape.hidden_size=64",
         "has no `model_type`, which names the transformers architecture\nwrite `--set model.shape.model_type=llama`"),
        # the flag itself
        ("seed", "is not KEY=VALUE\nwrite for example `--set data.seq_len=512`"),
        ("a..b=1", "is not KEY=VALUE\nwrite for example `--set data.seq_len=512`"),
        ("seed=", "has no value\nwrite `--set seed=null` for none"),
        ("data.system=[x", "is not YAML after the `=`: it ends inside a quote or a bracket\nwrite `--set 'data.system=\"[x\"'` for text"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_refused_with_the_flag_to_write_instead(flag, told):
    head, rest = problem(GOOD, flag).split("\n", 1)
    assert head == f"`--set {flag}`"
    assert rest == told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["data.validation=null", "eval_every=10"],
         "`--set eval_every=10`\nevaluates on `data.validation`, which is not given\nwrite `--set data.validation=0.02`, or leave `eval_every` out"),
        (["data.validation=null", "checkpoint.keep_best=1"],
         "`--set checkpoint.keep_best=1`\ncompares validation losses, and `data.validation` is not given\n"
         "write `--set data.validation=0.02`, or `--set checkpoint.keep_best=0`"),
        (["early_stop.patience=2"],
         "`--set early_stop.patience=2`\ncounts evaluations, and `eval_every` is not given: there is none before\nthe end\n"
         "write `--set eval_every=100`, or leave `early_stop` out"),
        (["precision=fp32", "reduce_dtype=bf16"],
         "`--set reduce_dtype=bf16`\nbf16 would round gradients that `precision: fp32` computes exactly\n"
         "write `--set reduce_dtype=fp32`, or `--set precision=bf16-mixed`"),
        (["steps=50", "optimizer.warmup=100"],
         "`--set optimizer.warmup=100`\n100 steps of warm-up are more than the 50 of `steps`\n"
         "write `--set optimizer.warmup=0.03` (a share of all steps), or\n`--set steps=1000`"),
        (["optimizer.warmup=1.5"],
         "`--set optimizer.warmup=1.5`\nfrom 1 on it counts steps, and 1.5 is not a whole number\nwrite `--set optimizer.warmup=1`"),
        (["optimizer.min_lr=1e-6"],
         "`--set optimizer.min_lr=1e-6`\nis a share of `lr`, and 1.0e-6 reads like a rate: it would end at 1.0e-11\n"
         "write `--set optimizer.min_lr=0.1` (ends at 1.0e-6), or\n`--set optimizer.min_lr=0` (ends at 0)"),
        (["optimizer.min_lr=0.1", "optimizer.schedule=constant"],
         "`--set optimizer.min_lr=0.1`\nhas no effect with `schedule: constant`, which never falls\n"
         "write `--set optimizer.schedule=cosine`, or leave `min_lr` out"),
        (["optimizer.betas=[0.99,0.9]"],
         "`--set optimizer.betas=[0.99,0.9]`\nthe mean's 0.99 comes first, and is never above the mean square's 0.9\n"
         "write `--set 'optimizer.betas=[0.9, 0.99]'`"),
        (["layout={micro_batch: 3, grad_accum: 4}"],
         "`global_batch: 64` (run.yaml:6)\n64 sequences do not divide into `micro_batch: 3` x `grad_accum: 4` = 12\n"
         "write `global_batch: 60`, or `global_batch: 72`, or leave the split to the\nplan"),
        (["layout.micro_batch=128"],
         "`global_batch: 64` (run.yaml:6)\n64 sequences do not divide by `micro_batch: 128`\nwrite `global_batch: 128`, or leave the split to the plan"),
        (["data.format=text", "data.system=hi"],
         "`--set data.system=hi`\ngoes before conversations, and `format: text` has none\nwrite `--set data.format=chat`, or leave `system` out"),
        (["data.format=text", "data.long=drop"],
         "`--set data.long=drop`\nhas no effect with `format: text`, which is cut into rows whole\nleave `long` out"),
        (["tokenizer.train_bpe=1024"],
         "`--set tokenizer.train_bpe=1024`\na new vocabulary means nothing to the trained weights of `model`\n"
         "leave `tokenizer` out: the model's own is used, or take random weights:\n`model: {shape: NAME}`"),
        (["data.train=[{path: a, weight: 2}, b]"],
         "`--set data.train=[{path: a, weight: 2}, b]`\n1 of 2 sets have a `weight`; all have one or none has\n"
         "give each a `weight`, or leave `weight` out: every row comes once"),
    ],
)  # fmt: skip
def test_keys_that_exclude_each_other_are_refused_with_both_values(flags, told):
    assert problem(GOOD, *flags) == told


def test_what_is_missing_is_told_with_an_example_and_the_place_to_write_it():
    assert (
        refused("model: a/b\ndata:\n  train: a\n")
        == """\
error: run.yaml: 4 problems
  1: `data.seq_len` is missing (run.yaml:2)
     length of a row; documents are packed into rows and do not see each other
     write `seq_len: 2048` under `data`
  2: `global_batch` is missing
     rows a step, over all ranks; the plan splits it among them and never
     changes it
     write `global_batch: 64`
  3: `optimizer.lr` is missing
     highest learning rate, reached after the warm-up
     write `optimizer: {lr: 1.0e-5}`
  4: `run_dir` is missing
     folder of the run; it must not exist yet
     write `run_dir: runs/first`

hint: docs/run-file.md has every key: what it takes, its default and its price"""
    )


def test_a_key_that_a_foreign_word_will_give_is_not_told_missing_and_breaks_no_rule():
    text = "model: a/b\ndataset_name: a\nvalidation_file: b\nmax_seq_length: 8\ntrain_batch_size: 4\nlearning_rate: 1\noutput_dir: c\neval_every: 5\n"
    told = refused(text)
    assert told.startswith("error: run.yaml: 6 problems\n")
    assert "missing" not in told
    assert "eval_every" not in told


def test_a_model_that_is_a_folder_may_have_the_name_of_a_shape():
    Path("gpt2").mkdir()
    assert load(GOOD, "model=gpt2").config.model == "gpt2"


def test_trainer_s_two_betas_become_one_key():
    told = refused(plus("adam_beta1: 0.8", "adam_beta2: 0.99"))
    assert told.count("write `betas: [0.8, 0.99]` under `optimizer`") == 2
    assert "write `betas: [0.8, 0.999]` under `optimizer`" in refused(plus("adam_beta1: 0.8"))


def test_a_key_given_twice_is_refused_with_both_lines():
    assert problem(plus("seed: 1", "seed: 2")) == "`seed` (run.yaml:10)\nis given on line 9 already\nkeep one of the two"


def test_a_list_entry_that_is_not_there_is_refused():
    text = GOOD.replace("texts/*.txt", "[a, b]")
    assert problem(text, "data.train.5.path=x") == (
        "`--set data.train.5.path=x`\n`data.train` is a list of 2, counted from 0: it has no entry `5`\nset the list as a whole: `--set data.train=[...]`"
    )


# ---- files that are no run file


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1,", "not YAML: it ends inside a quote or a bracket\n  line: `a: [1,`\n  where: run.yaml:1:7\n\nhint: close the quote or bracket that is open"),
        ("data:\n\t- 1", "not YAML: a tab stands where YAML takes spaces\n  line: `\t- 1`\n  where: run.yaml:2:1\n\nhint: indent with spaces"),
        ("a: 1\nb\nc: 2",
         "not YAML: a key has no `: ` after it\n  line: `c: 2`\n  where: run.yaml:3:1\n\nhint: write `key: value`, with a space after the colon"),
        ("a: b: c", "not YAML: a `: ` stands where no key can be\n  line: `a: b: c`\n  where: run.yaml:1:5\n\n"
                    "hint: a line above may lack its `: `; text with `: ` in it goes in quotes"),
        ("a:\n  b: 1\n c: 2",
         "not YAML: the indentation fits no line above\n  line: ` c: 2`\n  where: run.yaml:3:2\n\nhint: keys of one section begin in one column"),
        ("a: 1\n---\nb: 2", "not YAML: a second document begins\n  line: `---`\n  where: run.yaml:2:1\n\nhint: take the line `---` out"),
        ("a: @b", "not YAML: text begins with a character that means something else\n  line: `a: @b`\n  where: run.yaml:1:4\n\nhint: put the text in quotes"),
        ("", "run file `run.yaml` is empty\n\nhint: docs/run-file.md shows the smallest run file"),
        ("# only words\n", "run file `run.yaml` is empty\n\nhint: docs/run-file.md shows the smallest run file"),
        ("- a\n- b", "run file `run.yaml` is a list, not a mapping of keys\n\nhint: docs/run-file.md shows the smallest run file"),
        ("hello", "run file `run.yaml` is a single value, not a mapping of keys\n\nhint: docs/run-file.md shows the smallest run file"),
        ("model: \x07", "not YAML: the character '\\x07' is not allowed\n  line: `model: \x07`\n  where: run.yaml:1:8\n\n"
                         "hint: text with `: ` or ` #` in it goes in quotes"),
    ],
)  # fmt: skip
def test_a_torn_file_is_refused_with_the_line_itself(text, told):
    assert refused(text) == f"error: {told}"


def on_disk(path: str) -> str:
    with pytest.raises(OnDisk) as caught:
        load_run_file(Path(path))
    assert caught.value.exit_code == 4
    return caught.value.text()


def test_a_missing_file_names_the_nearest_that_is_there():
    Path("run.yaml").write_text(GOOD)
    assert on_disk("rum.yaml") == "error: run file `rum.yaml` does not exist\n\nhint: `run.yaml` is there"
    assert on_disk("no/run.yaml") == (
        "error: run file `no/run.yaml` does not exist\n  why: there is no folder `no`\n\nhint: docs/run-file.md shows the smallest one"
    )


def test_a_folder_is_no_run_file_and_a_run_s_folder_is_one_to_resume():
    Path("some").mkdir()
    assert on_disk("some") == "error: `some` is a folder, a run file is wanted"
    Path("some/config.yaml").write_text(GOOD)
    assert (
        on_disk("some") == "error: `some` is a folder, a run file is wanted\n\nhint: `--resume some` goes on with the run in it"
    )


def test_a_file_that_is_no_text_is_refused_with_byte_and_line():
    Path("run.yaml").write_bytes(b"model: a/b\nrun_dir: \xff\n")
    assert (
        on_disk("run.yaml")
        == "error: `run.yaml` is not UTF-8 text: byte 0xff on line 2\n  where: run.yaml:2\n\nhint: save it as UTF-8"
    )


# ---- what holds for every word and every value


def test_every_line_of_the_table_of_foreign_words_leads_to_a_key_of_ours_or_out():
    known = {key.name for key in all_keys()} | {"data.columns.text"}
    for word, row in WORDS.items():
        assert row.ours in known or (not row.ours and row.note), word
        for value in (True, False, None, 3, 0.5, "x", [1], {"a": 1}):
            found = foreign_key(word, value, {})
            assert found is not None
            assert found.ways, word


def test_no_foreign_word_is_also_a_key_of_ours():
    assert not {key.name.rpartition(".")[2] for key in all_keys()} & set(WORDS)


@pytest.mark.parametrize("word", sorted(WORDS))
def test_what_a_foreign_word_tells_to_write_is_what_the_key_takes(word):
    likely = {"strategy": "FULL_SHARD", "precision": "bf16", "schedule": "cosine", "attention": "sdpa", "name": "adamw_torch", "format": True,
              "trackers": "tensorboard", "activation_checkpointing": True, "train": "a", "model": "a/b", "run_dir": "a", "validation": 0.1,
              "text": "a", "tokenizer": "a", "system": "a", "cache_dir": "a", "lr": 0.1, "eps": 0.1, "betas": 0.8, "warmup": 0.1, "clip": 1.0}  # fmt: skip
    value = {"zero_stage": 3, "zero_optimization": {"stage": 3}, "deepspeed": {"zero_optimization": {"stage": 3}}, "deepspeed_config": "zero3",
             "fsdp_config": {}, "validation_split_percentage": 5}.get(word, likely.get(WORDS[word].ours.rpartition(".")[2], 4))  # fmt: skip
    found = foreign_key(word, value, {})
    assert found is not None
    for way in found.ways:
        if way != OUT and not isinstance(way, str):
            changes = ["eval_every=5"] if way.key == "early_stop.patience" else []
            load(GOOD, f"{way.key}={way.value}", *changes)


def test_every_line_of_a_refusal_fits_80_columns():
    for word, value in itertools.product(sorted(WORDS), (1, "x", "true")):
        for line in refused(plus(f"{word}: {value}")).splitlines():
            assert len(line) <= 80, line


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["", "x", "auto", "64", "no", "HYBRID_SHARD", "a/b", "[", "1e-5"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["shape", "path", "train", "strategy", "x", "weight"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
NAMES = [key.name.replace("[]", ".0") for key in all_keys()]


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*NAMES, "zzz", "bf16", "data.zzz", "fsdp_config", "<text>", "data.<list>", "data.columns.[key]"]),
        ANY,
        min_size=1,
        max_size=4,
    )
)
def test_any_values_at_all_give_a_config_or_a_usage_error_and_nothing_else(changes):
    from shardwise.config.yamltext import typed

    Path("run.yaml").write_text(GOOD, "utf-8")
    try:
        run = load_run_file(Path("run.yaml"), [f"{key}={typed(value)}" for key, value in changes.items()])
    except UsageError as error:
        assert error.lines
        return
    assert isinstance(run.config, RunConfig)
    for key in NAMES:
        assert f"`{key}" in run.where(key) or "`--set " in run.where(key)
