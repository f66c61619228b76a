"""The run file as types: every key once, with its type, default, unit and price. What is derived stands in the plan, never here.

Reading a file with its lines and foreign words is ``runfile``'s work; docs/run-file.md is made from these declarations by
``reference``. Keys that exclude each other are in ``combinations``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Strict, Tag, model_validator

from .combinations import impossible

# Strict: YAML has types, so that text in quotes is no number and 1 is no truth value. A whole number will do for any number.
Count = Annotated[int, Strict(), Ge(1)]
Whole = Annotated[int, Strict(), Ge(0)]
Rate = Annotated[float, Strict(), AllowInfNan(False), Gt(0)]
Amount = Annotated[float, Strict(), AllowInfNan(False), Ge(0)]
Decay = Annotated[float, Strict(), AllowInfNan(False), Ge(0), Lt(1)]
Text = Annotated[str, Strict(), MinLen(1)]
Truth = Annotated[bool, Strict()]
Format = Literal["auto", "text", "prompt", "chat"]

# Our names of columns; ``data.columns`` maps them to those of the data.
COLUMNS = ("text", "prompt", "completion", "system", "messages", "conversations", "instruction", "input", "output")
_BUILT = {"full_shard", "shard_grad_op", "no_shard"}


def _key(default: Any, what: str, *, unit: str = "", price: str = "", example: str = "") -> Any:
    """One key of the run file.

    Args:
        default: ``...`` where the key must be given.
        what: What it is, in one phrase; read after the key's name.
        unit: Of the number.
        price: What it costs or saves, in memory or time; empty where it costs nothing.
        example: A value as it is typed, for a key that must be given.
    """
    description = ". ".join(filter(None, [what, f"Unit: {unit}" if unit else "", f"Price: {price}" if price else ""]))
    extra: dict[str, Any] = {"what": what, "unit": unit, "price": price, "example": example}
    made = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return Field(**made, description=description, json_schema_extra=extra)


def _spelled(value: Any) -> Any:
    """A strategy in upper case, as a member of FSDP1's enum, or by its alias ``ddp``, in our spelling."""
    if not isinstance(value, str):
        return value
    word = value.removeprefix("ShardingStrategy.").removeprefix("FSDP.").lower()
    word = "no_shard" if word == "ddp" else word
    return word if word in _BUILT else value


def _kind(value: Any) -> str:
    """The tag of a value's YAML type; tags stand in angle brackets so that no key can be taken for one."""
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, (Mapping, BaseModel)):
        return "<mapping>"
    return {str: "<text>", list: "<list>", tuple: "<list>", int: "<number>", float: "<number>"}.get(type(value), "")


def _model_kind(value: Any) -> str:
    if isinstance(value, ModelFactory) or (isinstance(value, Mapping) and "factory" in value and "shape" not in value):
        return "<factory>"
    return _kind(value)


def _by_kind(pick: Any = _kind) -> Discriminator:
    """Decides a union by the YAML type of the value, so that a wrong one hears of the one alternative it comes closest to."""
    return Discriminator(pick, custom_error_type="one_of", custom_error_message="none of the kinds of value this key takes")


class Section(BaseModel):
    """Part of a run file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelShape(Section):
    shape: Annotated[Annotated[Text, Tag("<text>")] | Annotated[dict[str, Any], Tag("<mapping>")], _by_kind()] = _key(
        ...,
        "a shape that ships with shardwise, or the keys of a transformers config with `model_type`; weights are random",
        example="llama-3.1-8b",
    )


class ModelFactory(Section):
    factory: Text = _key(
        ...,
        "`package.module:function`, which returns `(module, loss)` or a module whose `forward(batch)` gives `(loss_sum, token_count)`",
        example="my_package.my_module:make",
    )


class TrainBPE(Section):
    train_bpe: Annotated[int, Strict(), Ge(257)] = _key(
        ...,
        "trains a byte-level BPE of this many tokens on the training text",
        unit="tokens",
        price="seconds for 5 MB of text, once; cached",
        example="1024",
    )


class DataSetConfig(Section):
    path: Text = _key(..., "file, glob or hub id", example="stories/*.jsonl")
    weight: Rate | None = _key(
        None,
        "share of an epoch's rows that come from this set, against the other sets' weights; every set has one or none has",
        unit="any, only ratios count",
    )
    format: Format | None = _key(None, "as `data.format`, for this set; null takes that one")
    columns: dict[Text, Text] | None = _key(None, "as `data.columns`, for this set; null takes those")
    split: Text = _key("train", "which split of a hub id")


class DataConfig(Section):
    train: Annotated[
        Annotated[Text, Tag("<text>")]
        | Annotated[
            Annotated[
                list[Annotated[Annotated[Text, Tag("<text>")] | Annotated[DataSetConfig, Tag("<mapping>")], _by_kind()]],
                MinLen(1),
            ],
            Tag("<list>"),
        ],
        _by_kind(),
    ] = _key(
        ...,
        "what to train on: a file, a glob, a hub id, or a list of these and of sets with a `path`; .txt is one document a file, .jsonl and .parquet one a row",
        example="texts/*.txt",
    )
    validation: (
        Annotated[
            Annotated[Annotated[float, Strict(), AllowInfNan(False), Gt(0), Lt(1)], Tag("<number>")]
            | Annotated[Text, Tag("<text>")]
            | Annotated[Annotated[dict[Text, Text], MinLen(1)], Tag("<mapping>")],
            _by_kind(),
        ]
        | None
    ) = _key(
        None,
        "documents to measure the loss on, never trained: a share of the training documents, a path, or several paths by name "
        "(the first decides which checkpoint is best)",
        unit="share of documents, where a number",
        price="a forward pass over all of it each `eval_every` steps",
    )
    format: Format = _key(
        "auto",
        "what a record holds: `text` trains every token, `prompt` the completion, `chat` what the assistant says; `auto` "
        "tells by the columns of the first record",
    )
    columns: dict[Text, Text] = _key(
        dict, "your column names by ours: `" + "`, `".join(COLUMNS) + "`; ours are tried where none is given"
    )
    seq_len: Annotated[int, Strict(), Ge(2)] = _key(
        ...,
        "length of a row; documents are packed into rows and do not see each other",
        unit="tokens",
        price="activations grow in proportion; attention's time with the square of a document's length",
        example="2048",
    )
    system: Text | None = _key(
        None, "system prompt put before conversations that have none", price="its tokens in every such conversation"
    )
    long: Literal["truncate", "drop"] = _key(
        "truncate",
        "what becomes of a conversation or prompt longer than `seq_len`; plain text is cut into rows and loses nothing",
    )
    show: Whole = _key(0, "print packed rows with their trained tokens marked before training", unit="rows")
    cache_dir: Text | None = _key(
        None,
        "folder of tokenised data; null is `$XDG_CACHE_HOME/shardwise`, else `~/.cache/shardwise`",
        price="disk: about 9 bytes a token; tokenised once, shared by all ranks and runs",
    )


class OptimizerConfig(Section):
    name: Literal["adamw"] = _key(
        "adamw", "the optimizer, PyTorch's fused AdamW", price="8 bytes of state a parameter, cut as the parameters are"
    )
    lr: Rate = _key(..., "highest learning rate, reached after the warm-up", example="1.0e-5")
    betas: tuple[Decay, Decay] = _key((0.9, 0.95), "decay of AdamW's mean and of its mean square")
    eps: Rate = _key(1e-8, "keeps AdamW's division finite")
    weight_decay: Amount = _key(
        0.1, "decoupled decay of matrices; vectors (norms, biases) have none", unit="share of `lr` a step"
    )
    warmup: Amount = _key(0.0, "steps over which the rate rises from 0 to `lr`", unit="below 1 a share of all steps, else steps")
    schedule: Literal["cosine", "linear", "constant"] = _key("cosine", "how the rate falls after the warm-up")
    min_lr: Annotated[float, Strict(), AllowInfNan(False), Ge(0), Le(1)] = _key(
        0.0, "the rate in the last step; a share, not a rate", unit="share of `lr`"
    )
    clip: Rate | None = _key(
        1.0,
        "largest norm of the whole gradient; a longer one is scaled down to it, null never does",
        price="none: the norm is computed and logged either way",
    )


class ClusterConfig(Section):
    nodes: Count = _key(1, "machines; more than one needs `torchrun` on each", unit="machines")
    gpus_per_node: Count | None = _key(
        None,
        "ranks on each machine; null is all its GPUs, one worker where there is none",
        unit="GPUs; on CPU worker processes",
        price="on CPU about 0.5 GiB of host memory a worker",
    )
    device: Text | None = _key(
        None, "card to plan for, by name (`h100-80gb`, `a100-40gb`, ...) or `cpu`; null is what this machine has"
    )
    memory_gib: Rate | None = _key(None, "memory of one device, in place of what the table or the driver says", unit="GiB")


class LayoutConfig(Section):
    strategy: Annotated[Literal["full_shard", "shard_grad_op", "no_shard"], BeforeValidator(_spelled)] | None = _key(
        None,
        "what the ranks cut among them: `full_shard` parameters, gradients and optimizer state; `shard_grad_op` the same, but "
        "parameters stay gathered from forward to backward; `no_shard` nothing (alias `ddp`). FSDP1's spellings are understood",
        price="full_shard 16 bytes a parameter over the ranks, shard_grad_op 2 to 4 more on every rank for one all-gather less a "
        "micro-batch, no_shard 16 on every rank (derived)",
    )
    micro_batch: Count | None = _key(
        None,
        "rows that a rank takes through forward and backward at a time",
        unit="sequences",
        price="activations grow in proportion",
    )
    grad_accum: Count | None = _key(
        None,
        "how many micro-batches of each rank make a step",
        unit="micro-batches",
        price="time in proportion; memory hardly, see `grad_sync`",
    )
    activation_checkpointing: Literal["none", "full"] | None = _key(
        None,
        "`full` keeps a block's input only and computes the rest again in backward",
        price="activations shrink to one block; about a third more compute (derived)",
    )
    grad_sync: Literal["each", "last"] | None = _key(
        None,
        "when ranks add up gradients: after `each` micro-batch, or once a step after the `last`",
        price="last keeps whole gradients on every rank, 4 bytes a parameter, for `grad_accum` - 1 reductions less (derived)",
    )
    attention: Literal["auto", "sdpa", "document"] | None = _key(
        None,
        "`document` attends inside each document without a mask, `sdpa` builds a mask, `auto` takes the faster on the device",
        price="sdpa holds a mask of seq_len x seq_len a row",
    )


class EarlyStop(Section):
    patience: Count = _key(
        ..., "evaluations in a row without a better validation loss after which the run ends", unit="evaluations", example="3"
    )


class CheckpointConfig(Section):
    every: Count | None = _key(
        None,
        "how often to save; the last step is always saved, null saves only that",
        unit="steps",
        price="disk: 12 bytes a parameter a checkpoint; ranks wait while it is written",
    )
    keep_last: Count = _key(
        2, "how many of the newest stay", unit="checkpoints", price="disk: one more while the next is written"
    )
    keep_best: Annotated[int, Strict(), Ge(0), Le(1)] = _key(
        0,
        "1 keeps the one with the lowest validation loss too",
        unit="checkpoints",
        price="disk: one checkpoint more; a save at every new best",
    )


class RunConfig(Section):
    """What to train. Raises pydantic's ValidationError in Python; ``runfile.load_run_file`` says more."""

    model: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[ModelShape, Tag("<mapping>")] | Annotated[ModelFactory, Tag("<factory>")],
        _by_kind(_model_kind),
    ] = _key(
        ...,
        "a folder or hub id (trained weights), `{shape: NAME}` (random weights) or `{factory: package.module:function}` (your module)",
        example="{shape: llama-3.1-8b}",
    )
    tokenizer: Annotated[Annotated[Text, Tag("<text>")] | Annotated[TrainBPE, Tag("<mapping>")], _by_kind()] | None = _key(
        None, "a folder, a hub id or `{train_bpe: N}`; null is the model's own"
    )
    trust_remote_code: Truth = _key(False, "run Python code that comes with the model or tokenizer; never without this key")
    data: DataConfig = _key(..., "what to train on, and how it is read", example="{train: texts/*.txt, seq_len: 2048}")
    epochs: Count = _key(1, "passes over the training rows, each in another order", unit="passes")
    steps: Count | None = _key(None, "end after this many optimizer steps, should the epochs give more", unit="steps")
    global_batch: Count = _key(
        ...,
        "rows a step, over all ranks; the plan splits it among them and never changes it",
        unit="sequences",
        price="none in memory: `layout.micro_batch` decides that",
        example="64",
    )
    seed: Whole = _key(0, "of random weights, order of rows, held-out share and dropout")
    optimizer: OptimizerConfig = _key(..., "how weights are changed", example="{lr: 1.0e-5}")
    precision: Literal["bf16-mixed", "fp32"] = _key(
        "bf16-mixed",
        "dtype of the computation; weights and optimizer state are kept in fp32 either way",
        price="bf16-mixed halves activations and gathered parameters of fp32",
    )
    reduce_dtype: Literal["fp32", "bf16"] = _key(
        "fp32",
        "dtype in which gradients are added up over the ranks",
        price="bf16 moves half the bytes, and rounds each sum to 8 bits",
    )
    cluster: ClusterConfig = _key(ClusterConfig, "what to train on or to plan for")
    layout: Annotated[Annotated[Literal["auto"], Tag("<text>")] | Annotated[LayoutConfig, Tag("<mapping>")], _by_kind()] = _key(
        "auto", "`auto`, or any of its keys fixed: those stay, the plan chooses what is null"
    )
    eval_every: Count | None = _key(
        None,
        "how often the validation loss is measured; before the first and after the last step always",
        unit="steps",
        price="a forward pass over the validation set",
    )
    log_every: Count = _key(50, "how often a line with loss, speed and time left is printed", unit="steps")
    early_stop: EarlyStop | None = _key(None, "end before the last step once the validation loss no longer falls")
    checkpoint: CheckpointConfig = _key(CheckpointConfig, "saved state to resume from")
    trackers: list[Literal["tensorboard"]] = _key(
        list, "`tensorboard` writes RUN/tensorboard beside metrics.jsonl", price="needs the extra `trackers`"
    )
    margin: Annotated[float, Strict(), AllowInfNan(False), Ge(0), Le(0.5)] = _key(
        0.05, "how much of a device stays free when the plan decides what fits", unit="share of its memory"
    )
    run_dir: Text = _key(..., "folder of the run; it must not exist yet", example="runs/first")

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        found = impossible(self.model_dump())
        if found:
            raise ValueError("; ".join(f"{one.key}: {one.what}".replace("\n", " ") for one in found))
        return self
