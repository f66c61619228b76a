"""What to write instead of another tool's key, or of a value that is spelled another tool's way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config.combinations import Write
from ..config.reference import all_keys, takes
from ..config.yamltext import short, typed
from .words import (
    ATTENTION,
    CHECKPOINTING,
    NOT_YET,
    OPTIMIZERS,
    SCHEDULES,
    WORDS,
    by_table,
    if_true,
    plain,
    precision_of,
    stage_of,
    strategy_of,
    tracker_names,
)

OUT = "leave it out"
_TAKES = {one.name: takes(one.hint) for one in all_keys()}


@dataclass(frozen=True)
class Foreign:
    """What a foreign word means here.

    Attributes:
        what: Whose word it is and for what, read after the key.
    """

    what: str
    ways: tuple[Write | str, ...]


def foreign_key(word: str, value: Any, beside: Mapping[str, Any]) -> Foreign | None:
    """What to write instead of another tool's key, or None where the word is in no table.

    Args:
        beside: The keys it stands among: Trainer's two betas are one key here.
    """
    row = WORDS.get(word.lower().replace("-", "_"))
    if row is None:
        return None
    if not row.ours:
        return Foreign(f"is {_of(row.whose)} word: {row.note}", (OUT,))
    ours = row.value(value)
    if row.ours == "optimizer.betas":  # Trainer's defaults: 0.9 and 0.999
        ours = typed([beside.get("adam_beta1", 0.9), beside.get("adam_beta2", 0.999)])
    what = f"is {_of(row.whose)} word for `{row.ours}`" + (f": {row.note}" if row.note else "")
    if ours is not None:
        return Foreign(what, (Write(row.ours, ours),))
    if value is False or value is None:
        return Foreign(f"{what}; off is what it is without", (OUT,))
    if row.ours == "precision":
        return Foreign(f"{what}; `{short(value)}` {NOT_YET}", (Write("precision", "bf16-mixed"),))
    if row.ours == "layout.strategy":
        return Foreign(_no_strategy(what, value), (Write("layout.strategy", "full_shard"), "leave it to the plan"))
    return Foreign(f"{what}; `{short(value)}` has no counterpart: it takes {_TAKES[row.ours]}", (OUT,))


def _of(whose: str) -> str:
    return whose + ("'" if whose.endswith("s") else "'s")


def _no_strategy(what: str, value: Any) -> str:
    return (
        f"{what}; hybrid sharding {NOT_YET}"
        if "hybrid" in str(value).lower() or plain(value) in ("4", "5")
        else f"{what}; `{short(value)}` names no strategy"
    )


def foreign_value(key: str, value: Any) -> Foreign | None:
    """What to write instead of a value of one of our keys that is spelled another tool's way, or None.

    Args:
        key: Dotted; the value is known not to be ours.
    """
    word = plain(value).replace("-", "_")
    if key in ("layout.strategy", "layout"):
        return _foreign_strategy(word, value)
    if key == "precision" and word in _UNBUILT_PRECISIONS:
        return Foreign(f"{_UNBUILT_PRECISIONS[word]} {NOT_YET}", (Write(key, "bf16-mixed"),))
    if key == "layout.activation_checkpointing" and word in ("selective", "op"):
        return Foreign(f"selective activation checkpointing {NOT_YET}", (Write(key, "full"), Write(key, "none")))
    if key == "optimizer.name" and any(part in word for part in ("8bit", "4bit", "muon", "lion", "sgd", "adafactor", "shampoo")):
        return Foreign(f"`{short(value)}` {NOT_YET}", (Write(key, "adamw"),))
    if key == "trackers" and tracker_names(value) is None and isinstance(value, (str, list)):
        names = ", ".join(map(str, value)) if isinstance(value, list) else value
        return (
            Foreign("no tracker is written `[]`", (Write(key, "[]"),))
            if word in ("none", "no")
            else Foreign(f"a tracker for {names} {NOT_YET}", (Write(key, "[tensorboard]"), OUT))
        )
    table = _VALUES.get(key)
    ours = table(value) if table else None
    return Foreign("", (Write(key, ours),)) if ours is not None else None


_UNBUILT_PRECISIONS = {
    "fp16": "fp16",
    "fp16_mixed": "fp16",
    "float16": "fp16",
    "16": "fp16",
    "16_mixed": "fp16",
    "half": "fp16",
    "16_true": "fp16",
    "bf16_pure": "pure bf16",
    "bf16_true": "pure bf16",
    "fp8": "fp8",
    "float8": "fp8",
    "int8": "int8",
}
_VALUES: dict[str, Callable[[Any], str | None]] = {
    "precision": precision_of,
    "reduce_dtype": lambda value: {"bf16-mixed": "bf16"}.get(precision_of(value) or "", precision_of(value)),
    "optimizer.name": OPTIMIZERS,
    "optimizer.schedule": SCHEDULES,
    "optimizer.clip": lambda value: "null" if value in (0, False, "none") and value is not None else None,
    "data.format": by_table(
        messages="chat",
        sharegpt="chat",
        chatml="chat",
        conversational="chat",
        conversations="chat",
        alpaca="chat",
        instruction="chat",
        completion="prompt",
        prompt_completion="prompt",
        plain="text",
        raw="text",
        pretrain="text",
    ),
    "data.long": by_table(true="truncate", cut="truncate", false="drop", skip="drop"),
    "layout.activation_checkpointing": CHECKPOINTING,
    "layout.attention": ATTENTION,
    "layout.grad_sync": by_table(true="each", false="last", no_sync="last"),
    "checkpoint.keep_best": if_true("1", "0"),
    "trackers": tracker_names,
    "data.validation": lambda value: (
        "null"
        if value in (0, False) and value is not None
        else typed(value / 100)
        if isinstance(value, (int, float)) and 1 <= value < 50
        else None
    ),
    "margin": lambda value: typed(value / 100) if isinstance(value, (int, float)) and 1 <= value <= 50 else None,
    "early_stop": lambda value: (
        f"{{patience: {value}}}" if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
    ),
    "layout.micro_batch": by_table(auto="null"),
    "layout.grad_accum": by_table(auto="null"),
    "cluster.gpus_per_node": by_table(auto="null"),
}


def _foreign_strategy(word: str, value: Any) -> Foreign | None:
    if "hybrid" in word:
        return Foreign(
            f"hybrid sharding {NOT_YET}", (Write("layout.strategy", "full_shard", "cut over all ranks"), "leave it to the plan")
        )
    if word.startswith("zero") and (stage := stage_of(word)):
        return Foreign("is DeepSpeed's word", (Write("layout.strategy", stage),))
    ours = strategy_of(word) if isinstance(value, str) and not word.isdigit() else None
    return Foreign("", (Write("layout.strategy", ours),)) if ours else None
