"""What the user's real module allocates in one forward and backward, learnt on fake tensors: no memory, no weights, no device.

The module is run with at most three blocks of each kind and with hooks where FSDP2 has its own, so that the bytes found fall between the same events
that the ledger simulates. Implementations of one shape differ by 35 % in activations (facts/planning.md 4.4), which is why this is traced.
Not here: FSDP's own buffers (``ledger``). Traces are cached on disk by all that determines them.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from ..errors import UsageError
from ..loss import LossHead
from ..spec import ModelSpec, Point, Trace, UnitKind, UnitSpec, digest
from .attending import attending
from .log import ONEDNN_KERNEL_BYTES, Log, account

if TYPE_CHECKING:
    from ..model import Unit

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CHUNKS = 4  # a head that handles more chunks than this is traced with 3 and 4 and continued, since all further ones are alike


def model_spec(model: nn.Module, units: Sequence[Unit], name: str) -> ModelSpec:
    """Shapes of every unit and of the root, and which traced unit stands for each."""
    owned: set[int] = set()
    specs: list[tuple[str, UnitKind, list[nn.Parameter]]] = []
    for unit in units:
        params = [param for module in unit.modules for param in model.get_submodule(module).parameters()]
        params = [param for i, param in enumerate(params) if id(param) not in {id(p) for p in params[:i]}]
        owned.update(map(id, params))
        specs.append((unit.name, unit.kind, params))
    specs.append(("root", "root", [param for param in model.parameters() if id(param) not in owned]))
    order = {"embedding": 0, "embedding+head": 0, "block": 1, "head": 2, "root": 3}
    specs.sort(key=lambda entry: order[entry[1]])
    traced, templates = _templates(model, units)
    names = _traced_names(units, traced)
    templates["root"] = len(names) - 1
    templates.update({unit.name: names.index(unit.name) for unit in units if unit.kind != "block"})
    found = tuple(UnitSpec(key, kind, tuple(tuple(p.shape) for p in params), templates[key]) for key, kind, params in specs)
    return ModelSpec(name, sum(param.numel() for param in model.parameters()), found)


def _traced_names(units: Sequence[Unit], traced: list[str]) -> list[str]:
    return [*traced, *(unit.name for unit in units if unit.kind != "block"), "root"]


def _templates(model: nn.Module, units: Sequence[Unit]) -> tuple[list[str], dict[str, int]]:
    """Blocks to trace (the first three of each kind, in order) and, for each block, the traced one that stands for it.

    The first, a middle and the last block differ in what the loop around them still holds: the first one's input is also the embedding's output,
    the last one's output goes to the final norm. Two blocks are of one kind if class, parameter shapes and the config's ``layer_types`` agree.
    """
    layer_types = getattr(getattr(model, "config", None), "layer_types", None) or []
    seen: dict[Any, list[str]] = {}
    kinds: list[tuple[str, Any]] = []
    for index, unit in enumerate(unit for unit in units if unit.kind == "block"):
        block = model.get_submodule(unit.modules[0])
        kind = (
            type(block).__name__,
            tuple((key, tuple(p.shape)) for key, p in block.named_parameters()),
            layer_types[index] if index < len(layer_types) else None,
        )
        kinds.append((unit.name, kind))
        if len(seen.setdefault(kind, [])) < 3:
            seen[kind].append(unit.name)
    traced = [name for name, kind in kinds if name in seen[kind]]
    templates: dict[str, int] = {}
    for place, (name, kind) in enumerate(kinds):
        own = seen[kind]
        middle = own[-1] if place == len(kinds) - 1 else own[min(1, len(own) - 1)]
        templates[name] = traced.index(own[0] if name == own[0] else middle)
    return traced, templates


def trace_step(
    model: nn.Module,
    units: Sequence[Unit],
    *,
    micro_batch: int,
    seq_len: int,
    dtype: str,
    activation_checkpointing: str,
    attention_path: str,
    chunk_tokens: int,
    kind: str = "cpu",
    cache: Path | None = None,
) -> Trace:
    """Bytes of one forward and backward of ``model`` between FSDP's events.

    Args:
        model: On the meta device, as ``model.build`` makes it; left as it is.
        dtype: ``fp32`` or ``bf16``: what FSDP computes in (parameters and floating inputs are cast to it).
        kind: ``cuda`` puts a stand-in for the variable-length flash kernel in the place of ``document`` attention.
        cache: Folder of earlier traces; None neither reads nor writes.

    Raises:
        UsageError: The module's memory depends on the values it computes (a mixture of experts, for one).
    """
    heads = [module for module in model.modules() if isinstance(module, LossHead)]
    tokens = micro_batch * seq_len
    ask = functools.partial(
        _trace_once, model, units, micro_batch, seq_len, dtype, activation_checkpointing, attention_path, kind
    )
    key = digest(
        [
            _identity(model),
            [(u.name, u.modules) for u in units],
            micro_batch,
            seq_len,
            dtype,
            activation_checkpointing,
            attention_path,
            chunk_tokens,
            kind,
            torch.__version__,
            _transformers_version(),
            _FORMAT,
        ]
    )
    file = cache / f"{key}.json" if cache else None
    if file and file.is_file():
        return Trace.from_json(json.loads(file.read_text("utf-8")))
    long = bool(heads) and tokens > _CHUNKS * chunk_tokens
    found = _with_long_head(ask(tokens), heads[0], tokens, chunk_tokens, dtype, kind) if long else ask(chunk_tokens)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(found.to_json()), "utf-8")
        aside.replace(file)
    return found


_FORMAT = 3


def _transformers_version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _identity(model: nn.Module) -> Any:
    """What determines a module's behaviour as far as can be said: its config, else its printed structure."""
    config: Any = getattr(model, "config", None)
    text = json.dumps(config.to_dict(), sort_keys=True, default=str) if hasattr(config, "to_dict") else repr(model)
    return [type(model).__module__, type(model).__qualname__, text, [tuple(p.shape) for p in model.parameters()]]


class _PostBackward(torch.autograd.Function):
    """Identity whose backward marks that a unit's gradients are complete, the way FSDP2 finds that out."""

    @staticmethod
    def forward(done: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.done = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.done()
        return (None, *grads)


def _trace_once(
    model: nn.Module,
    units: Sequence[Unit],
    micro_batch: int,
    seq_len: int,
    dtype: str,
    activation_checkpointing: str,
    attention_path: str,
    kind: str,
    chunk_tokens: int,
) -> Trace:
    traced, _ = _templates(model, units)
    names = _traced_names(units, traced)
    compute = DTYPES[dtype]
    small = _truncated(model, units, traced)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.random.fork_rng(devices=[]):
        log = Log(seq_len, kind)
        params = _fake_parameters(small, compute, log)
        for module in small.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = (
                        fake.from_tensor(buffer) if not buffer.is_meta else torch.empty(buffer.shape, dtype=buffer.dtype)
                    )
                    log.ignore(module._buffers[key])
            if isinstance(module, LossHead):
                module.chunk_tokens = chunk_tokens
        with attending(small, attention_path, kind, micro_batch, seq_len):
            owners = _hook(small, units, names, traced, compute, activation_checkpointing, log)
            inputs = [torch.zeros(micro_batch, seq_len, dtype=torch.int64) for _ in range(3)]
            numbers = [log.see(tensor) for tensor in inputs]
            grads = _run(small, inputs, log, params, owners, names)
    has_mkldnn = kind == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    compiled = has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return Trace(
        tuple(names),
        tuple(account(log, set(numbers), grads, names, {unit.name: unit.kind for unit in units}, activation_checkpointing)),
        len(log.matmuls) * ONEDNN_KERNEL_BYTES if compiled else 0,
    )


def _truncated(model: nn.Module, units: Sequence[Unit], traced: list[str]) -> Any:
    """A copy of the model with the traced blocks only, where the blocks stand in a list."""
    small = copy.deepcopy(model)
    modules = {unit.name: unit.modules[0] for unit in units if unit.kind == "block"}
    parents = {path.rpartition(".")[0] for path in modules.values()}
    for parent_name in parents:
        parent = small.get_submodule(parent_name)
        kept = [small.get_submodule(modules[name]) for name in traced if modules[name].rpartition(".")[0] == parent_name]
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            parent._modules = {str(index): block for index, block in enumerate(kept)}
    config: Any = getattr(small, "config", None)
    if hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = len(traced)
    return small.train()


def _fake_parameters(model: nn.Module, dtype: torch.dtype, log: Log) -> list[nn.Parameter]:
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in made:
                floating = param.is_floating_point()
                made[id(param)] = nn.Parameter(
                    torch.empty(param.shape, dtype=dtype if floating else param.dtype, device="cpu"),
                    requires_grad=param.requires_grad,
                )
                log.ignore(made[id(param)])
            module._parameters[key] = made[id(param)]
    return list(made.values())


def _hook(
    model: Any,
    units: Sequence[Unit],
    names: list[str],
    traced: list[str],
    compute: torch.dtype,
    activation_checkpointing: str,
    log: Log,
) -> dict[int, int]:
    """Put marks where FSDP2 has its hooks; returns parameter id -> unit, root's left out.

    Source: torch 2.15 ``_fsdp_state.py`` ``_pre_forward`` / ``_post_forward``, ``_fsdp_param_group.py`` ``RegisterPostBackwardFunction``.
    """
    owners: dict[int, int] = {}
    paths = {unit.name: list(unit.modules) for unit in units if unit.kind != "block"}
    lists: dict[str, int] = {}
    for unit in units:
        if unit.name in traced:
            prefix = unit.modules[0].rpartition(".")[0]
            index = lists.setdefault(prefix, 0)
            lists[prefix] += 1
            inside = isinstance(model.get_submodule(prefix), nn.ModuleList | nn.Sequential)
            paths[unit.name] = [f"{prefix}.{index}" if inside else unit.modules[0]]
    for name, modules in paths.items():
        unit_number = names.index(name)
        for index, path in enumerate(modules):
            module = model.get_submodule(path)
            owners.update({id(param): unit_number for param in module.parameters()})
            if name in traced and activation_checkpointing == "full":
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
            if isinstance(module, LossHead):
                module.register_forward_pre_hook(lambda module, args, unit_number=unit_number: log.mark("loss", unit_number))
            module.register_forward_pre_hook(_before(log, unit_number, compute, first=index == 0), prepend=True, with_kwargs=True)
            if index == len(modules) - 1:
                module.register_forward_hook(_after(log, unit_number))
    return owners


def _before(log: Log, unit: int, compute: torch.dtype, *, first: bool) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if first:
            log.mark("pre_forward", unit)
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(compute) if t.is_floating_point() else t, (args, kwargs))
        wanted = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if first and wanted and torch.is_grad_enabled():
            passed = iter(_PostBackward.apply(lambda: log.mark("post_backward", unit), *wanted))
            args, kwargs = tree_map_only(torch.Tensor, lambda t: next(passed) if t.requires_grad else t, (args, kwargs))
        return args, kwargs

    return hook


def _after(log: Log, unit: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        log.mark("post_forward", unit)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda grad: _mark_once(log, unit))  # type: ignore[no-untyped-call]

    return hook


def _mark_once(log: Log, unit: int) -> None:
    if ("pre_backward", unit) not in log.marks:
        log.mark("pre_backward", unit)


def _run(
    model: Any, inputs: list[torch.Tensor], log: Log, params: list[nn.Parameter], owners: dict[int, int], names: list[str]
) -> set[int]:
    """One forward and backward; returns the storages that became parameters' gradients."""
    root = len(names) - 1
    grads: set[int] = set()
    mark, finished = log.mark, set()

    def marking(event: str, unit: int) -> None:
        mark(event, unit)
        if event == "post_backward":
            finished.add(unit)
            for param in params:
                if owners.get(id(param), root) == unit and param.grad is not None:
                    grads.add(log.see(param.grad))
                    param.grad = None

    log.mark = marking  # type: ignore[method-assign]
    try:
        with log:
            log.mark("pre_forward", root)
            loss = model.token_loss(*inputs)
            log.mark("post_forward", root)
            loss.register_hook(lambda grad: _mark_once(log, root))
            (loss * 1.0).backward()
            grads.update(log.see(param.grad) for param in params if param.grad is not None)
            log.mark("final", root)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"memory of {type(model).__name__} depends on what it computes (`{error.func}`), so it cannot be planned yet",
            why="a mixture of experts routes tokens by value; routing is not modelled in this version",
            hints=["choose a dense model (`--set model.shape=llama-3.1-8b`)"],
        ) from error
    finally:
        log.mark = mark  # type: ignore[method-assign]
        for param in params:
            param.grad = None
    return grads


def _with_long_head(whole: Trace, head: LossHead, tokens: int, chunk_tokens: int, dtype: str, kind: str) -> Trace:
    """Replace the peaks of the head's windows, traced with one chunk, by those of ``tokens / chunk_tokens`` chunks.

    With C tokens a chunk the peak is a straight line in T from the third chunk on; it is taken from 3 and 4 chunks.
    """
    three, four = (_trace_head(head, chunk_tokens, count, dtype, kind) for count in (3, 4))
    chunks = tokens / chunk_tokens

    def line(at: int) -> dict[str, int]:
        a, b = three[at], four[at]
        return {key: round(a.get(key, 0) + (b.get(key, 0) - a.get(key, 0)) * (chunks - 3)) for key in a.keys() | b.keys()}

    at = next(i for i, point in enumerate(whole.points) if point.event == "loss")
    old, extra = whole.points[at], line(0)
    peak = {key: old.live.get(key, 0) + extra.get(key, 0) for key in old.live.keys() | extra.keys()}
    return Trace(
        whole.units, (*whole.points[:at], Point(old.event, old.unit, old.live, peak), *whole.points[at + 1 :]), whole.kernel_bytes
    )


def _trace_head(head: LossHead, chunk_tokens: int, chunks: int, dtype: str, kind: str) -> list[dict[str, int]]:
    """Excess of the head's forward over what lived before it, by row."""
    tokens = chunk_tokens * chunks
    with FakeTensorMode():
        log = Log(-1, kind)
        weight = torch.empty(head.weight.shape, dtype=DTYPES[dtype], requires_grad=True)
        log.ignore(weight)
        small: Any = nn.Linear(1, 1)
        small.__class__ = LossHead
        small.weight = nn.Parameter(weight)
        log.ignore(small.weight)
        small.bias = None if head.bias is None else nn.Parameter(torch.empty(head.bias.shape, dtype=DTYPES[dtype]))
        small.chunk_tokens = chunk_tokens
        hidden = torch.empty(tokens, head.weight.shape[1], dtype=DTYPES[dtype], requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.int64)
        log.ignore(hidden)
        log.ignore(labels)
        with log:
            log.mark("loss", 0)
            loss = small(hidden, labels)
            log.mark("post_forward", 0)
            del loss
    return [account(log, set(), set(), ["head"], {}, "none")[0].peak]
