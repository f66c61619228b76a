"""Building a model with no memory, and naming what FSDP gathers together.

Parameters are made on the meta device, buffers for real (rotary tables are computed in ``__init__`` and are in no checkpoint: after
``to_empty`` they would be garbage, facts/failures.md 2). The head becomes a ``LossHead``, and the model gets ``token_loss``.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..errors import UsageError
from ..loss import LossHead
from ..source import ModelSource
from . import attention

# What a model may do between its last hidden state and the logits that LossHead does not: name -> value that means "nothing".
_BETWEEN = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
}


@dataclass(frozen=True)
class Unit:
    """What one all-gather fetches.

    Attributes:
        modules: Names of the modules that form one FSDP group (two when a tied weight is used by both).
        kind: Equal blocks are planned once.
    """

    name: str
    modules: tuple[str, ...]
    kind: Literal["block", "embedding", "head", "embedding+head"]


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have meta parameters and real buffers. At most one parameter is (lazily) allocated at a time."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = type(param)(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build(source: ModelSource, *, attention_path: str = "sdpa", chunk_tokens: int = 1024) -> nn.Module:
    """The module of ``source``, fp32 parameters on meta, with ``token_loss(input_ids, position_ids, labels)``.

    Args:
        attention_path: ``sdpa`` (mask of documents) or ``document`` (no mask, see ``attention``).
        chunk_tokens: Tokens the head handles at a time.

    Raises:
        UsageError: The model does something between hidden state and logits that the chunked loss does not, or the factory fails its contract.
    """
    if source.kind == "factory":
        return _from_factory(source)
    from transformers import AutoConfig, AutoModelForCausalLM

    if source.folder:
        config = _config_of(source)
    else:
        assert source.config is not None, "a shape has a config"
        config = AutoConfig.for_model(**source.config)
    _refuse_odd_logits(
        source,
        [f"{key}={getattr(config, key)}" for key, nothing in _BETWEEN.items() if getattr(config, key, None) not in nothing],
    )
    if attention_path == "document":
        attention.register()
    try:
        with parameters_on_meta():
            model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention.NAME if attention_path == "document" else "sdpa",
                trust_remote_code=source.trust_remote_code,
            )
    except ValueError as error:
        raise UsageError(
            f"`{source.name}` cannot be built: {str(error).split('. ')[0]}",
            why="shardwise keeps packed documents apart through that attention",
            hints=["`model: {factory: package.module:function}` with a module of your own"],
        ) from error
    model.tie_weights()
    head = model.get_output_embeddings()
    _refuse_odd_logits(source, [] if type(head) is nn.Linear else [type(head).__name__])
    head.__class__ = LossHead
    setattr(head, "chunk_tokens", chunk_tokens)  # noqa: B010 - mypy knows the class it had
    model.token_loss = types.MethodType(_token_loss, model)
    model.config.use_cache = False
    return model  # type: ignore[no-any-return]


def _refuse_odd_logits(source: ModelSource, odd: list[str]) -> None:
    if odd:
        raise UsageError(
            f"the head of `{source.name}` is not a plain linear layer: {', '.join(odd)}",
            why="the loss is computed by the head itself, without whole logits,\nas linear + cross-entropy",
            hints=["`model: {factory: package.module:function}` with a loss of your own"],
        )


def _config_of(source: ModelSource) -> Any:
    """The transformers config of a folder.

    Raises:
        UsageError: It needs code of its own, which never runs unasked, or a newer transformers.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.folder, trust_remote_code=source.trust_remote_code, local_files_only=True)
    except ValueError as error:
        if "custom code" in str(error):
            raise UsageError(
                f"`{source.name}` brings Python code of its own",
                where=f"{source.folder}/config.json",
                why="code of a model runs only when the run file says so",
                hints=["read the *.py files in its folder, then `--set trust_remote_code=true`"],
            ) from error
        raise UsageError(
            f"the config of `{source.name}` is not understood: {str(error).splitlines()[0]}",
            where=f"{source.folder}/config.json",
            hints=["a newer transformers may know it: `pip install -U transformers`"],
        ) from error


def _token_loss(self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """0-d fp64 loss sum over the valid labels of one micro-batch ``[B, S]``."""
    hidden = self.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
    return self.get_output_embeddings()(hidden, labels)  # type: ignore[no-any-return]


def _from_factory(source: ModelSource) -> nn.Module:
    """A user's module: the factory returns ``(module, loss)`` or a module whose ``forward(batch)`` gives ``(loss_sum, token_count)``."""
    assert source.factory, "kind factory has a factory"
    module_name, _, function_name = source.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"factory `{source.factory}` cannot be imported: {error}",
            why="it is read as package.module:function",
            hints=["run from the folder that holds the module, or install its package"],
        ) from error
    with parameters_on_meta():
        made = factory()
    model, loss = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"factory `{source.factory}` returned {type(model).__name__}, not a torch.nn.Module",
            hints=["return `module`, or `(module, loss)` with loss(module, batch) -> (loss_sum, token_count)"],
        )

    def token_loss(self: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        batch = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        loss_sum, _ = loss(self, batch) if loss else self.forward(batch)
        return loss_sum.double()  # type: ignore[no-any-return]

    model.token_loss = types.MethodType(token_loss, model)  # type: ignore[assignment]
    return model


def units(model: nn.Module) -> tuple[Unit, ...]:
    """The groups FSDP gathers, in the order of the forward pass; what is left belongs to the root.

    Blocks are the modules whose class the model names in ``_no_split_modules``; without that, the children of the largest ``ModuleList``.
    The embedding and the head are units of their own; a tied weight puts both in one unit, since FSDP gathers a parameter in one group only.
    """
    blocks = _blocks(model)
    found = [Unit(name, (name,), "block") for name in blocks]
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = {id(module): name for name, module in model.named_modules()}
    if embedding is None or head is None:
        return tuple(found)
    if embedding.weight is head.weight:
        return (*found, Unit("embedding+head", (names[id(embedding)], names[id(head)]), "embedding+head"))
    return (Unit("embedding", (names[id(embedding)],), "embedding"), *found, Unit("head", (names[id(head)],), "head"))


def _blocks(model: nn.Module) -> list[str]:
    classes = set(getattr(model, "_no_split_modules", None) or ())
    named = [name for name, module in model.named_modules() if type(module).__name__ in classes]
    if not named:
        lists = [
            (sum(p.numel() for p in module.parameters()), name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        ]
        if not lists:
            return []
        _, prefix, largest = max(lists, key=lambda entry: entry[0])
        named = [f"{prefix}.{child}" if prefix else child for child, _ in largest.named_children()]
    # The outermost of nested ones: what is inside is gathered with it.
    return [name for name in named if not any(name.startswith(other + ".") for other in named)]
