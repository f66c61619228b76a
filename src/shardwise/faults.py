"""Foreign failures in our words: one table from an exception's text to its cause and a way out.

Only texts that were raised for real in a test or read in torch's source are here. What no row knows keeps its own words and is called our bug.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from .errors import LostWorker, NotReady, OutOfMemory, ShardwiseError, UsageError


@dataclass(frozen=True)
class Fault:
    """One kind of foreign failure.

    Attributes:
        pattern: Found anywhere in ``TypeName: text``.
        make: From the match and the rank to our error.
    """

    pattern: str
    make: Callable[[re.Match[str], int], ShardwiseError]


def _oom(match: re.Match[str], rank: int) -> ShardwiseError:
    return OutOfMemory(
        f"rank {rank} ran out of memory: {match[0].strip()}",
        hints=[
            "`--set layout.activation_checkpointing=full` keeps one activation a block, about a third more compute",
            "`--set layout.micro_batch=1` holds the fewest rows at a time",
        ],
    )


FAULTS = (
    Fault(r"CUDA out of memory[^.]*\.[^.]*\.?|can't allocate memory: you tried to allocate \d+ bytes|MemoryError.*", _oom),
    Fault(
        r"No space left on device|File too large|Errno 28|Errno 27",
        lambda match, rank: NotReady(
            f"the disk is full or a file limit was reached (rank {rank}): {match[0]}",
            hints=[
                "free space, or `--set run_dir=...` on another disk",
                "`--set checkpoint.keep_last=1` keeps fewer checkpoints",
            ],
        ),
    ),
    Fault(
        r"expects uniform original parameter dtype but got (.*)",
        lambda match, rank: UsageError(
            f"parameters of one FSDP unit are stored in more than one dtype: {match[1]}",
            why="FSDP gathers a unit as one buffer of one dtype",
            hints=["make every parameter of the module fp32 in the factory"],
            common=True,
        ),
    ),
    Fault(
        r"got mixed torch\.Tensor and DTensor",
        lambda match, rank: UsageError(
            "a weight is used outside the forward of the module that FSDP gathers it for",
            why="FSDP gathers a unit's parameters when its forward is called, and only then",
            hints=["in a factory's model, use the weight inside its own module's forward"],
            common=True,
        ),
    ),
    Fault(
        r"fully_shard doesn't support scalar parameters\. Change (\S+)",
        lambda match, rank: UsageError(
            f"parameter `{match[1]}` has no dimension to cut",
            why="FSDP2 shards dim 0",
            hints=[f"make `{match[1]}` a tensor of shape [1] in the factory"],
            common=True,
        ),
    ),
    Fault(
        r"(?i)connection (closed|reset) by peer|timed out waiting \d+ms",
        lambda match, rank: LostWorker(
            f"rank {rank} lost its peers: {match[0].lower()}",
            why="another rank ended or hangs; its own error, where there is one, comes first",
        ),
    ),
)


def describe(error: BaseException, rank: int) -> ShardwiseError:
    """``error`` of ``rank`` as one of our errors."""
    text = f"{type(error).__name__}: {error}"
    for fault in FAULTS:
        match = re.search(fault.pattern, text)
        if match:
            return fault.make(match, rank)
    frame = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    return ShardwiseError(
        f"rank {rank}: {text}",
        where=f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}, in `{frame.name}`" if frame else "",
        hints=["`--verbose` shows the whole traceback"],
    )
