"""The record of what lives under fake tensors: every storage, its birth and death, marks between them, and the account of it by row."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..spec import Point

_ATEN = torch.ops.aten
_PROMOTING = {
    _ATEN.add.Tensor,
    _ATEN.sub.Tensor,
    _ATEN.mul.Tensor,
    _ATEN.div.Tensor,
    _ATEN.add_.Tensor,
    _ATEN.sub_.Tensor,
    _ATEN.mul_.Tensor,
    _ATEN.div_.Tensor,
}


_MATMULS = {_ATEN.mm.default, _ATEN.mm.out, _ATEN.bmm.default, _ATEN.addmm.default}
# oneDNN compiles a kernel for every distinct bf16 product (shapes and layouts) and keeps it for the life of the process.
# Source: measured with livebytes, torch 2.15 on avx512_bf16, 84 products: 586 to 604 KiB each, whatever the shape; fp32 (MKL) keeps nothing.
ONEDNN_KERNEL_BYTES = 586 * 2**10


def _scratch(func: Any, args: Sequence[Any], kind: str) -> int:
    """Bytes a kernel allocates beside its result, which no dispatch mode sees.

    ``logsumexp`` makes its exp, as large as its input. A CPU kernel of two tensors of different dtypes first makes a copy of one in the common dtype
    (CUDA casts while it reads).

    Source: measured with livebytes, torch 2.15: logsumexp of 32 MiB held 32 MiB more; ``fp32 += bf16`` of 2 MiB held 4 MiB more.
    """
    if func is _ATEN.logsumexp.default:
        return int(args[0].numel() * args[0].element_size())
    if kind == "cpu" and func in _PROMOTING and isinstance(args[1], torch.Tensor):
        common = torch.result_type(args[0], args[1])
        return sum(t.numel() * common.itemsize for t in args[:2] if t.ndim and t.dtype != common)
    return 0


class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every storage made under it, its death, and marks between."""

    def __init__(self, square: int, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.square, self.kind = square, kind
        self.events: list[tuple[str, int, int]] = []  # (what, storage number, bytes)
        self.masks: set[int] = set()
        self.matmuls: set[Any] = set()
        self.marks: list[tuple[str, int]] = []
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._refs: list[weakref.ref[Any]] = []

    def number(self, tensor: torch.Tensor) -> int | None:
        return self._known.get(tensor.untyped_storage())

    def ignore(self, tensor: torch.Tensor) -> None:
        self._known[tensor.untyped_storage()] = -1

    def see(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        known = self._known.get(storage)
        if known is not None:
            return known
        number = len(self._refs)
        self._known[storage] = number
        size = storage.nbytes()

        def died(ref: Any) -> None:
            self.events.append(("free", number, size))

        self._refs.append(weakref.ref(storage, died))
        self.events.append(("alloc", number, size))
        if tensor.ndim == 4 and tensor.shape[1] == 1 and tensor.shape[-1] == tensor.shape[-2] == self.square:
            self.masks.add(number)  # [B, 1, S, S]
        return number

    def mark(self, event: str, unit: int) -> None:
        self.events.append(("mark", len(self.marks), 0))
        self.marks.append((event, unit))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # the one value that is asked for: "is there a single document in every row?" - no, plan for the mask
        out = func(*args, **(kwargs or {}))
        if func in _MATMULS and args[-1].dtype == torch.bfloat16:
            self.matmuls.add(tuple((tuple(t.shape), t.stride()) for t in args[-2:]))
        size = _scratch(func, args, self.kind)
        if size:
            self.events.append(("scratch", 0, size))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return out


def account(
    log: Log, inputs: set[int], grads: set[int], names: list[str], kinds: dict[str, str], activation_checkpointing: str
) -> list[Point]:
    """Turn the log into points: what lived at each mark and the most until the next, by row."""
    born: dict[int, int] = {}
    died: dict[int, int] = {}
    window = -1
    for what, number, _ in log.events:
        if what == "mark":
            window = number
        elif what == "alloc":
            born[number] = window
        elif what == "free" and number >= 0:
            died[number] = window

    def unit_kind(at: int) -> tuple[str, str]:
        event, unit = log.marks[at] if at >= 0 else ("", -1)
        return event, kinds.get(names[unit], "root") if unit >= 0 else ""

    def row(number: int) -> str:
        if number in inputs:
            return "inputs"
        if number in grads:
            return "grads_unsharded"
        if number in log.masks:
            return "attention_masks"
        event, kind = unit_kind(born[number])
        if event == "loss" or (kind in ("head", "embedding+head") and event == "pre_backward"):
            return "loss_and_head"
        forward = event.endswith("_forward")
        crosses = died.get(number, window + 1) > born[number]
        recomputed = activation_checkpointing == "full" and event == "pre_backward" and kind == "block"
        return "activations" if (forward and crosses) or recomputed else "temporaries"

    rows = {number: row(number) for number in born}
    points: list[Point] = []
    live: dict[str, int] = {}
    total = best = 0
    peak: dict[str, int] = {}
    start: dict[str, int] = {}
    current: tuple[str, int] | None = None
    for what, number, size in log.events:
        if what == "mark":
            if current:
                points.append(Point(*current, _nonzero(start), _nonzero(peak)))
            current, start, peak, best = log.marks[number], dict(live), dict(live), total
            continue
        if what == "scratch":
            if total + size > best:
                best, peak = total + size, {**live, "temporaries": live.get("temporaries", 0) + size}
            continue
        if number < 0:
            continue
        signed = size if what == "alloc" else -size
        key = rows[number]
        live[key] = live.get(key, 0) + signed
        total += signed
        if total > best:
            best, peak = total, dict(live)
    assert current, "the step was marked"
    points.append(Point(*current, _nonzero(start), _nonzero(peak)))
    return points


def _nonzero(rows: dict[str, int]) -> dict[str, int]:
    return {key: size for key, size in rows.items() if size}
