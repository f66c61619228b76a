"""Words on stderr and nothing on stdout: plain lines in a pipe, a live bar on a terminal, 80 columns, nothing but errors when quiet."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from shardwise.console import Console, step_line
from shardwise.errors import AnswerIsNo, OnDisk, OutOfMemory, ShardwiseError
from shardwise.units import GIB

RECORD = {
    "step": 212,
    "loss": 1.184,
    "tokens_per_s": 5430.2,
    "allocated_bytes": 44.2 * GIB,
    "device_total_bytes": 79.1 * GIB,
    "left_s": 4080,
}


def test_a_step_is_one_line_of_position_loss_speed_memory_and_time_left():
    assert step_line(RECORD, 551) == "step 212/551  loss 1.184  5,430 tok/s  44.2 of 79.1 GiB  left 1 h 08 min"


def test_what_is_not_known_of_a_step_is_left_out():
    assert step_line({"step": 1, "loss": 10.8}, None) == "step 1  loss 10.800"
    assert step_line({"step": 1, "loss": 10.8, "peak_allocated_bytes": 277 * 2**20}, 9) == "step 1/9  loss 10.800  277.0 MiB"


@pytest.mark.parametrize(
    ("width", "last"), [(79, "left 1 h 08 min"), (60, "left 1 h 08 min"), (41, "left 1 h 08 min"), (25, "loss 1.184")]
)
def test_a_step_fits_any_width_and_gives_up_memory_first_and_the_time_left_last(width, last):
    line = step_line(RECORD, 551, width)
    assert len(line) <= width
    assert line.endswith(last)


def test_a_step_of_the_largest_job_fits_80_columns():
    big = {
        "step": 1_999_999,
        "loss": 12.345,
        "tokens_per_s": 45_678_901,
        "allocated_bytes": 180 * GIB,
        "device_total_bytes": 191.98 * GIB,
        "left_s": 9e6,
    }
    assert len(step_line(big, 2_000_000)) <= 80


def test_a_loss_that_is_not_a_number_is_shown_as_it_is():
    assert step_line({"step": 1, "loss": float("nan")}, 2) == "step 1/2  loss nan"


def test_in_a_pipe_there_is_a_line_every_log_every_steps_and_for_the_first_and_last(capsys):
    progress = Console().progress(log_every=5)
    progress.start(12, done=2)
    for step in range(3, 13):
        progress.step({"step": step, "loss": 1.0})
    progress.note("step 12: validation loss 0.9")
    progress.stop()
    progress.stop()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 3/12  loss 1.000", "step 5/12  loss 1.000", "step 10/12  loss 1.000", "step 12/12  loss 1.000", "step 12: validation loss 0.9",
    ]  # fmt: skip


def test_the_total_may_come_with_the_steps(capsys):
    Console().progress(50).step({"step": 1, "loss": 1.0, "total_steps": 7})
    assert capsys.readouterr().err == "step 1/7  loss 1.000\n"


def test_quiet_says_nothing_but_errors(capsys):
    console = Console(quiet=True)
    console.say("a")
    console.warn("b")
    progress = console.progress(1)
    progress.start(2)
    progress.step({"step": 1, "loss": 1.0})
    with console.work("tokenising") as tell:
        tell("1 document")
    console.error(OnDisk("it is not there"))
    assert capsys.readouterr() == ("", "error: it is not there\nexit code 4 (on disk)\n")


def test_a_warning_is_named_one(capsys):
    Console().warn("`data.show` has no effect with `--json`")
    assert capsys.readouterr().err == "warning: `data.show` has no effect with `--json`\n"


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (OutOfMemory("x"), "exit code 6 (out of memory)"),
        (AnswerIsNo("x"), "exit code 1"),
        (ShardwiseError("x"), "exit code 70 (our bug)"),
    ],
)
def test_the_last_line_of_an_error_is_its_exit_code(error, last, capsys):
    Console().error(error)
    assert capsys.readouterr().err.splitlines()[-1] == last


def test_verbose_shows_what_lies_behind_an_error_and_plain_does_not(capsys):
    try:
        try:
            {}["missing"]
        except KeyError as cause:
            raise OnDisk("torn") from cause
    except OnDisk as error:
        Console(verbose=True).error(error)
        shown = capsys.readouterr().err
        Console().error(error)
    assert re.search(r"Traceback .*KeyError: 'missing'\nerror: torn\nexit code 4", shown, re.S)
    assert capsys.readouterr().err == "error: torn\nexit code 4 (on disk)\n"


def test_long_work_ends_with_its_last_words_and_time(capsys):
    with Console().work("tokenising") as tell:
        tell("1,200 documents")
        tell("2,400 documents")
    assert re.fullmatch(r"tokenising: 2,400 documents, \d\.\d s\n", capsys.readouterr().err)


def test_work_that_fails_leaves_the_telling_to_the_error(capsys):
    with pytest.raises(OnDisk), Console().work("tokenising") as tell:
        tell("1 document")
        raise OnDisk("torn")
    assert capsys.readouterr().err == ""


# ---- on a real terminal

SCRIPT = """
from shardwise.console import Console
from shardwise.errors import OnDisk
console = Console()
with console.work("tokenising") as tell:
    tell("1,200 documents")
progress = console.progress(2)
progress.start(4)
for step in range(1, 5):
    progress.step({"step": step, "loss": 1.184, "tokens_per_s": 5430.2, "allocated_bytes": 44.2 * 2**30, "device_total_bytes": 79.1 * 2**30, "left_s": 4080})
    progress.note(f"step {step}: [bold]checkpoint saved")
console.error(OnDisk("torn"))
progress.stop()
"""


def on_terminal(columns: int = 80, **environment: str) -> str:
    """What a terminal of that width receives from SCRIPT."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env={**plain, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    received = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not part:
            break
        received += part
    os.close(ours)
    assert process.wait() == 0
    return received.decode()


def lines_of(received: str) -> list[str]:
    """The text of every line that was ever shown, without what moves the cursor."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", received)
    return [line for line in re.split(r"[\r\n]+", plain) if line]


def test_on_a_terminal_a_bar_stands_under_the_lines_and_is_gone_at_the_end():
    received = on_terminal()
    bars = [line for line in lines_of(received) if "━" in line and "/4  loss" in line]
    assert bars[0].endswith("1/4  loss 1.184  5,430 tok/s  44.2/79.1 GiB  left 1 h 08 min")
    assert received.rstrip().endswith("error: torn\r\nexit code 4 (on disk)")
    assert "\x1b[?25h" in received, "the cursor is shown again"


def test_on_a_terminal_no_line_is_wider_than_80_columns_nor_than_the_terminal():
    for columns in (200, 80, 50):
        assert max(map(len, (line for line in lines_of(on_terminal(columns)) if "━" in line))) < min(columns, 81)


def test_lines_come_through_whole_while_the_bar_is_there():
    shown = lines_of(on_terminal())
    assert [line for line in shown if line.startswith("step")] == [
        line for step in (1, 2, 3, 4) for line in (
            [step_line({**RECORD, "step": step}, 4)] * (step != 3) + [f"step {step}: [bold]checkpoint saved"])
    ]  # fmt: skip
    assert any(re.fullmatch(r"tokenising: 1,200 documents, \d\.\d s", line) for line in shown)


def test_no_color_takes_every_colour_off():
    assert re.search(r"\x1b\[[0-9;]*m", on_terminal())
    assert not re.search(r"\x1b\[[0-9;]*3[0-9];?[0-9;]*m", on_terminal(NO_COLOR="1"))


def test_a_dumb_terminal_gets_plain_lines():
    assert "\x1b" not in on_terminal(TERM="dumb")
