"""A run as a folder, readable while it runs.

config.yaml     the run file, overrides written in
plan.json       the plan that is obeyed
metrics.jsonl   one JSON object a step, and one an evaluation
events.jsonl    started, checkpoint, failed, ended: with time
model/          config of the model, for the export
tokenizer/      files of the tokenizer
checkpoints/    step-N, whole ones only
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from .errors import OnDisk


class RunDir:
    """One run folder. ``create`` makes it, ``open`` finds it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """A run never writes over another.

        Raises:
            OnDisk: ``path`` exists and is not an empty folder.
        """
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            is_run = (path / "config.yaml").is_file()
            raise OnDisk(
                f"run folder `{path}` exists",
                where="`run_dir`",
                why="a run never writes over another",
                hints=[
                    *([f"`shardwise train --resume {path}` goes on with it"] if is_run else []),
                    f"`--set run_dir={_free_name(path)}` starts a new one",
                ],
            )

    @classmethod
    def create(cls, path: Path, config_text: str, plan: dict[str, Any]) -> RunDir:
        """Make the folder of a new run.

        Raises:
            OnDisk: It exists, or cannot be made.
        """
        cls.refuse_existing(path)
        run = cls(path)
        try:
            run.checkpoints.mkdir(parents=True)
            (path / "plan.json").write_text(json.dumps(plan, indent=1) + "\n", "utf-8")
            (path / "config.yaml").write_text(config_text, "utf-8")  # last: it makes the folder a run
        except OSError as error:
            raise OnDisk(
                f"run folder `{path}` cannot be made: {error.strerror}",
                where="`run_dir`",
                hints=["`--set run_dir=FOLDER` elsewhere"],
            ) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """A run folder that is there.

        Raises:
            OnDisk: ``path`` holds no run.
        """
        if not (path / "config.yaml").is_file():
            raise OnDisk(f"`{path}` is no run folder: it has no `config.yaml`", hints=["give the `run_dir` of a run"])
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def plan(self) -> dict[str, Any]:
        """The plan the run obeys, as JSON.

        Raises:
            OnDisk: It is missing or torn.
        """
        try:
            record: dict[str, Any] = json.loads((self.path / "plan.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise OnDisk(f"`{self.path}/plan.json` is missing or torn: {error}", hints=["`--plan FILE` gives another"]) from error
        return record

    def config_text(self) -> str:
        return (self.path / "config.yaml").read_text("utf-8")

    def metrics(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, visible at once."""
        self._append("metrics.jsonl", record)

    def event(self, kind: str, **facts: Any) -> None:
        """Append what happened, with the time, to events.jsonl."""
        self._append("events.jsonl", {"event": kind, "time": time.time(), **facts})

    def _append(self, name: str, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        with (self.path / name).open("ab+") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line  # a run that died here left half a line: ours stays readable
            file.write(line)


def _free_name(path: Path) -> Path:
    """The first of path-2, path-3, ... that is free."""
    number = 2
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate
