"""Keys that are right alone and impossible together. Pure: plain values in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from .yamltext import typed


@dataclass(frozen=True)
class Write:
    """One key to write: a way out of a problem.

    Attributes:
        key: Dotted.
        value: As it is typed.
        then: What that gives, said after it.
    """

    key: str
    value: str
    then: str = ""


@dataclass(frozen=True)
class Impossible:
    """One combination that cannot be.

    Attributes:
        key: The key to blame: the one that asks for what another rules out.
        what: What disagrees, both values; read after the key's name.
        ways: What to do instead; several are alternatives.
    """

    key: str
    what: str
    ways: tuple[Write | str, ...]


_Rule = Callable[[Callable[[str], Any]], Iterator[Impossible]]
_RULES: list[tuple[tuple[str, ...], _Rule]] = []


def _rule(*keys: str) -> Callable[[_Rule], _Rule]:
    """Registers a rule with the keys it reads; it is not asked where one of them is in doubt already."""

    def register(rule: _Rule) -> _Rule:
        _RULES.append((keys, rule))
        return rule

    return register


def impossible(values: Mapping[str, Any], doubtful: Set[str] = frozenset()) -> list[Impossible]:
    """All impossible combinations in a whole run file.

    Args:
        values: Nested, as in the run file, with every default filled in.
        doubtful: Dotted keys whose value is wrong or will come from another key; a key inside one is doubtful too.
    """

    def get(key: str) -> Any:
        found: Any = values
        for part in key.split("."):
            if not isinstance(found, Mapping):
                return None
            found = found.get(part)
        return found

    def sure(key: str) -> bool:
        return not any(key == one or key.startswith(one + ".") or one.startswith(key + ".") for one in doubtful)

    return [found for keys, rule in _RULES if all(map(sure, keys)) for found in rule(get)]


@_rule("early_stop", "eval_every", "data.validation")
def _early_stop(get: Callable[[str], Any]) -> Iterator[Impossible]:
    if get("early_stop") is None:
        return
    if get("data.validation") is None:
        yield Impossible(
            "early_stop",
            "watches the validation loss, and `data.validation` is not given",
            (Write("data.validation", "0.02"), "leave `early_stop` out"),
        )
    if get("eval_every") is None:
        yield Impossible(
            "early_stop",
            "counts evaluations, and `eval_every` is not given: there is none before the end",
            (Write("eval_every", "100"), "leave `early_stop` out"),
        )


@_rule("checkpoint.keep_best", "data.validation")
def _keep_best(get: Callable[[str], Any]) -> Iterator[Impossible]:
    if get("checkpoint.keep_best") and get("data.validation") is None:
        yield Impossible(
            "checkpoint.keep_best",
            "compares validation losses, and `data.validation` is not given",
            (Write("data.validation", "0.02"), Write("checkpoint.keep_best", "0")),
        )


@_rule("eval_every", "data.validation")
def _eval_every(get: Callable[[str], Any]) -> Iterator[Impossible]:
    if get("eval_every") is not None and get("data.validation") is None:
        yield Impossible(
            "eval_every",
            "evaluates on `data.validation`, which is not given",
            (Write("data.validation", "0.02"), "leave `eval_every` out"),
        )


@_rule("reduce_dtype", "precision")
def _reduce(get: Callable[[str], Any]) -> Iterator[Impossible]:
    if get("reduce_dtype") == "bf16" and get("precision") == "fp32":
        yield Impossible(
            "reduce_dtype",
            "bf16 would round gradients that `precision: fp32` computes exactly",
            (Write("reduce_dtype", "fp32"), Write("precision", "bf16-mixed")),
        )


@_rule("optimizer.warmup", "steps")
def _warmup(get: Callable[[str], Any]) -> Iterator[Impossible]:
    warmup, steps = get("optimizer.warmup"), get("steps")
    if warmup >= 1 and warmup != int(warmup):
        yield Impossible(
            "optimizer.warmup",
            f"from 1 on it counts steps, and {warmup:g} is not a whole number",
            (Write("optimizer.warmup", str(int(warmup))),),
        )
    elif steps is not None and warmup > steps:
        yield Impossible(
            "optimizer.warmup",
            f"{warmup:g} steps of warm-up are more than the {steps} of `steps`",
            (Write("optimizer.warmup", "0.03", "a share of all steps"), Write("steps", str(10 * int(warmup)))),
        )


@_rule("optimizer.min_lr", "optimizer.lr", "optimizer.schedule")
def _min_lr(get: Callable[[str], Any]) -> Iterator[Impossible]:
    low, lr = get("optimizer.min_lr"), get("optimizer.lr")
    if low and get("optimizer.schedule") == "constant":
        yield Impossible(
            "optimizer.min_lr",
            "has no effect with `schedule: constant`, which never falls",
            (Write("optimizer.schedule", "cosine"), "leave `min_lr` out"),
        )
    elif low and lr < 0.1 and low <= lr:
        yield Impossible(
            "optimizer.min_lr",
            f"is a share of `lr`, and {typed(low)} reads like a rate: it would end at {typed(float(f'{low * lr:.3g}'))}",
            (Write("optimizer.min_lr", f"{low / lr:.3g}", f"ends at {typed(low)}"), Write("optimizer.min_lr", "0", "ends at 0")),
        )


@_rule("optimizer.betas")
def _betas(get: Callable[[str], Any]) -> Iterator[Impossible]:
    first, second = get("optimizer.betas")
    if first > second:
        yield Impossible(
            "optimizer.betas",
            f"the mean's {first:g} comes first, and is never above the mean square's {second:g}",
            (Write("optimizer.betas", f"[{second:g}, {first:g}]"),),
        )


@_rule("global_batch", "layout.micro_batch", "layout.grad_accum")
def _split(get: Callable[[str], Any]) -> Iterator[Impossible]:
    whole, micro, accum = get("global_batch"), get("layout.micro_batch"), get("layout.grad_accum")
    piece = (micro or 1) * (accum or 1)
    if whole % piece == 0:
        return
    said = " x ".join(f"`{name}: {value}`" for name, value in (("micro_batch", micro), ("grad_accum", accum)) if value)
    below, above = whole // piece * piece, (whole // piece + 1) * piece
    yield Impossible(
        "global_batch",
        f"{whole} sequences do not divide into {said} = {piece}"
        if micro and accum
        else f"{whole} sequences do not divide by {said}",
        (
            *([Write("global_batch", str(below))] if below else []),
            Write("global_batch", str(above)),
            "leave the split to the plan",
        ),
    )


@_rule("data.format", "data.system")
def _system(get: Callable[[str], Any]) -> Iterator[Impossible]:
    if get("data.format") == "text" and get("data.system") is not None:
        yield Impossible(
            "data.system",
            "goes before conversations, and `format: text` has none",
            (Write("data.format", "chat"), "leave `system` out"),
        )


@_rule("data.format", "data.long")
def _long(get: Callable[[str], Any]) -> Iterator[Impossible]:
    if get("data.format") == "text" and get("data.long") == "drop":
        yield Impossible("data.long", "has no effect with `format: text`, which is cut into rows whole", ("leave `long` out",))


@_rule("data.train")
def _weights(get: Callable[[str], Any]) -> Iterator[Impossible]:
    sets = get("data.train")
    if not isinstance(sets, (list, tuple)):
        return
    weighted = [isinstance(one, Mapping) and one.get("weight") is not None for one in sets]
    if any(weighted) and not all(weighted):
        yield Impossible(
            "data.train",
            f"{sum(weighted)} of {len(sets)} sets have a `weight`; all have one or none has",
            ("give each a `weight`", "leave `weight` out: every row comes once"),
        )


@_rule("tokenizer", "model")
def _fresh_tokenizer(get: Callable[[str], Any]) -> Iterator[Impossible]:
    if isinstance(get("tokenizer"), Mapping) and isinstance(get("model"), str):
        yield Impossible(
            "tokenizer",
            "a new vocabulary means nothing to the trained weights of `model`",
            ("leave `tokenizer` out: the model's own is used", "take random weights: `model: {shape: NAME}`"),
        )
