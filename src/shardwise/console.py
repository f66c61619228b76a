"""What a person sees: words on stderr, a live bar on a terminal, plain lines elsewhere. rich is imported when a bar is drawn.

Data go to stdout, and not from here. ``NO_COLOR`` takes the colour off the bar; nothing else has any.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from .errors import ShardwiseError
from .units import bytes_text, duration_text, gib

_MEANING = {
    2: "usage",
    3: "machine not ready",
    4: "on disk",
    5: "not finite",
    6: "out of memory",
    7: "hang or lost worker",
    70: "our bug",
    130: "Ctrl-C",
    143: "SIGTERM",
}
_WIDTH = 80
_REDRAW_S = 0.1  # a fast job must not spend its time on the screen
_REPEAT_S = 10.0  # between lines of one long work where no terminal is


class Console:
    """The words of one command.

    Args:
        json: stdout carries one JSON object; words are on stderr either way.
        quiet: Errors only.
        verbose: What lies behind an error too.
    """

    def __init__(self, json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.json, self.quiet, self.verbose = json, quiet, verbose
        self._live: Any = None

    def say(self, text: str) -> None:
        if not self.quiet:
            self._print(text)

    def warn(self, text: str) -> None:
        """Something that does not stop the work; said once, with what to do about it."""
        self.say(f"warning: {text}")

    def error(self, error: ShardwiseError) -> None:
        """The error in its fixed form, its exit code last; with ``--verbose`` the traceback of what caused it first."""
        self._hide()
        if self.verbose and error.__cause__ is not None:
            self._print("".join(traceback.format_exception(error.__cause__)).rstrip())
        meaning = _MEANING.get(error.exit_code)
        self._print(f"{error.text()}\nexit code {error.exit_code}" + (f" ({meaning})" if meaning else ""))

    def progress(self, log_every: int = 50) -> Progress:
        return Progress(self, log_every)

    def work(self, title: str) -> Work:
        """Work of unknown length: ``with console.work("tokenising") as tell: tell("1,200 documents")``."""
        return Work(self, title)

    @property
    def on_terminal(self) -> bool:
        return not self.quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def _print(self, text: str) -> None:
        if self._live is None:
            try:
                print(text, file=sys.stderr, flush=True)
            except BrokenPipeError:
                self.quiet = True  # nobody reads any more; the work goes on
        else:
            self._live.console.out(text, highlight=False)

    def _show(self, line: Any) -> None:
        """Put one line under everything that was said, in place of the one before."""
        if self._live is None:
            from rich.console import Console as Screen
            from rich.live import Live

            self._live = Live(console=Screen(file=sys.stderr, soft_wrap=True), transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(line, refresh=True)

    def _hide(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    @property
    def _columns(self) -> int:
        return min(_WIDTH, self._live.console.width - 1 if self._live else _WIDTH)


def step_line(record: dict[str, Any], total: int | None, width: int = _WIDTH, *, bar: bool = False) -> str:
    """A step on one line: ``step 212/551  loss 1.184  5,430 tok/s  44.2 of 79.1 GiB  left 1 h 08 min``.

    Args:
        record: As for ``Progress.step``; what is not known is left out.
        width: Columns; where they do not do, memory goes first, then tokens a second, then the time left.
        bar: It stands beside a bar, which needs the room: ``212/551 ... 44.2/79.1 GiB``.
    """
    where = f"{record['step']}/{total}" if total else str(record["step"])
    left, rate, memory = (
        record.get("left_s"),
        record.get("tokens_per_s"),
        record.get("allocated_bytes") or record.get("peak_allocated_bytes"),
    )
    parts = [
        where if bar else f"step {where}",
        f"loss {record['loss']:.3f}",
        "" if rate is None else f"{rate:,.0f} tok/s",
        _memory(memory, record.get("device_total_bytes"), "/" if bar else " of ") if memory else "",
        "" if left is None else f"left {duration_text(left)}",
    ]
    for least in (None, 3, 2, 4):
        if least is not None:
            parts[least] = ""
        line = "  ".join(filter(None, parts))
        if len(line) <= width:
            break
    return line


def _memory(used: int, whole: int | None, between: str) -> str:
    return f"{gib(used):.1f}{between}{gib(whole):.1f} GiB" if whole and gib(used) >= 0.05 else bytes_text(used)


class Progress:
    """The steps of a run: a line every ``log_every`` steps, and on a terminal a live bar under them."""

    def __init__(self, console: Console, log_every: int = 50) -> None:
        self._console, self._log_every = console, log_every
        self._total: int | None = None
        self._fresh, self._drawn_at = True, 0.0

    def start(self, total_steps: int, done: int = 0) -> None:
        """Training begins.

        Args:
            done: Steps of a resumed run that are behind already.
        """
        self._total = total_steps
        if self._console.on_terminal:
            self._draw(done, f"{done}/{total_steps}")

    def step(self, record: dict[str, Any]) -> None:
        """A step is done.

        Args:
            record: ``step`` and ``loss``; where known ``tokens_per_s``, ``left_s``, ``allocated_bytes`` or
                ``peak_allocated_bytes``, ``device_total_bytes``, ``total_steps``.
        """
        self._total = record.get("total_steps", self._total)
        step = record["step"]
        if self._fresh or step % self._log_every == 0 or step == self._total:
            self._console.say(step_line(record, self._total))
        self._fresh = False
        now = time.monotonic()
        if self._console.on_terminal and (now - self._drawn_at > _REDRAW_S or step == self._total):
            self._drawn_at = now
            self._draw(step, step_line(record, self._total, self._console._columns - 8, bar=True))

    def note(self, text: str) -> None:
        """Something happened beside the steps: a validation loss, a checkpoint."""
        self._console.say(text)

    def stop(self) -> None:
        """Take the bar away. May be called twice, and without a start."""
        self._console._hide()

    def _draw(self, done: int, text: str) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        room = self._console._columns - len(text) - 2
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(ProgressBar(total=self._total or 1, completed=done, width=max(4, min(24, room))), text)
        self._console._show(line)


class Work:
    """Work whose end is not known: a spinner with its last words on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title, self._text = console, title, ""
        self._began = self._said_at = time.monotonic()
        self._spinner: Any = None

    def __enter__(self) -> Work:
        self._began = self._said_at = time.monotonic()
        if self._console.on_terminal:
            self._draw()
        return self

    def __call__(self, text: str) -> None:
        """How far it is: ``1,200 documents``."""
        self._text, now = text, time.monotonic()
        if self._console.on_terminal:
            self._draw()
        elif now - self._said_at > _REPEAT_S:
            self._said_at = now
            self._console.say(f"{self._title}: {text}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._console._hide()
        if kind is None:
            self._console.say(
                f"{self._title}: " + (f"{self._text}, " if self._text else "") + duration_text(time.monotonic() - self._began)
            )

    def _draw(self) -> None:
        if self._spinner is None:
            from rich.spinner import Spinner

            self._spinner = Spinner("line")
        self._spinner.update(text=f"{self._title}: {self._text}"[: self._console._columns - 2] if self._text else self._title)
        self._console._show(self._spinner)
