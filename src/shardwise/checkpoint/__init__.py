"""Saved resumable state: tensors through ``torch.distributed.checkpoint`` (DCP), all else as JSON, visible only when whole.

    step-N/               appears by one rename, after every file was flushed and the manifest written
      __R_0.distcp        DCP: model.<name>, optim.<name>.exp_avg, optim.<name>.exp_avg_sq, rng.<world>.<rank>
      .metadata           DCP: which tensor lies where
      state.json          what the trainer passed in, the optimizer's step counts, the world size
      manifest.json       size and xxh3 of every other file: without it the folder was never finished
    .tmp-step-N/          a save or a removal that did not end; swept by the next save

Every item is a tensor: DCP pickles other values and unpickles them without care (facts/feasibility.md B.2). Another world size reads the same files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .folder import find, folder_of, prune, require_whole, size, steps, verify

if TYPE_CHECKING:
    from .state import Reader, load, save

__all__ = ["Reader", "find", "folder_of", "load", "prune", "require_whole", "save", "size", "steps", "verify"]


def __getattr__(name: str) -> object:
    """``save``, ``load`` and ``Reader`` import torch, so they come when they are asked for; listing and verifying need none."""
    if name in ("save", "load", "Reader"):
        from . import state

        return getattr(state, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
