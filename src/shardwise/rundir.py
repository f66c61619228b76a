"""A run as a folder, readable while it runs.

config.yaml     the run file, overrides written in
plan.json       the plan that is obeyed
metrics.jsonl   one JSON object a step, and one an evaluation
events.jsonl    started, checkpoint, failed, ended: with time
model/          config of the model, for the export
tokenizer/      files of the tokenizer
checkpoints/    step-N, whole ones only
superseded/     what lay beyond the step that a resume went back to
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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

    def go_on_from(self, step: int, config_text: str, plan: dict[str, Any]) -> list[int]:
        """Make the folder that of a run which stands at ``step``: what came after it moves to ``superseded/``, nothing is deleted.

        Later checkpoints would otherwise be taken for this run's own, and hinder its saves. The config and plan before are kept there too.

        Returns:
            The steps of the checkpoints that moved.
        """
        later = sorted(
            int(p.name[5:]) for p in self.checkpoints.glob("step-*") if p.name[5:].isdigit() and int(p.name[5:]) > step
        )
        old = self._records("metrics.jsonl")
        kept = [record for record in old if record.get("step", 0) <= step]
        changed = config_text != self.config_text() or plan != self.plan()
        if later or len(kept) < len(old) or changed:
            aside = _free_name(self.path / "superseded" / "before")
            aside.mkdir(parents=True)
            for name in ("config.yaml", "plan.json", "metrics.jsonl"):
                if (self.path / name).is_file():
                    shutil.copy(self.path / name, aside)
            for late in later:
                (self.checkpoints / f"step-{late}").rename(aside / f"step-{late}")
            _replace(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))
            _replace(self.path / "plan.json", json.dumps(plan, indent=1) + "\n")
            _replace(self.path / "config.yaml", config_text)
        return later

    def _records(self, name: str) -> list[dict[str, Any]]:
        """Every whole line; a crash may have left half a one."""
        found = []
        for line in (self.path / name).read_text("utf-8").splitlines() if (self.path / name).is_file() else []:
            with contextlib.suppress(ValueError):
                found.append(dict(json.loads(line)))
        return found

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


def _replace(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all."""
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(text, "utf-8")
    aside.replace(path)


def _free_name(path: Path) -> Path:
    """The first of path-2, path-3, ... that is free."""
    number = 2
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate
