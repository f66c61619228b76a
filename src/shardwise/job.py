"""What is passed between the command line and the ranks: a request, a job, and what to say about it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .config import RunConfig
from .layout import Layout
from .plan import Plan
from .runfile import RunFile
from .source import ModelSource


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line.

    Attributes:
        workers: ``--workers``: ranks on this machine; None takes the run file's, else all GPUs, else 1 on CPU.
        plan_file: ``--plan``: obey this plan instead of making one.
        resume: The run folder to go on with, and the step (None = newest).
    """

    run: RunFile
    workers: int | None = None
    plan_file: Path | None = None
    resume: tuple[Path, int | None] | None = None


@dataclass(frozen=True)
class Job:
    """All a rank needs to know, picklable.

    Attributes:
        data_folder: The prepared data set (``data.Prepared.folder``).
        resume_from: A checkpoint folder, or None for a fresh start.
        stored_bytes: Parameter bytes the plan says every rank stores; a run that stores other bytes stops.
    """

    config: RunConfig
    layout: Layout
    source: ModelSource
    data_folder: Path
    run_dir: Path
    device_type: str
    stored_bytes: int
    resume_from: Path | None = None


@dataclass(frozen=True)
class Ready:
    """A job and what to say about it."""

    job: Job
    plan: Plan
    preview: str
    data_text: str
    total_steps: int
    done_steps: int
