"""The command line: verbs, their flags, exit codes. Imports no torch, so that help and refusals come at once.

Data go to stdout, words to stderr. Every verb takes ``--json``, ``--quiet`` and ``--verbose``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .console import Console
from .errors import EXIT_OK, Interrupted, OnDisk, ShardwiseError, Terminated, UsageError
from .units import bytes_text

if TYPE_CHECKING:
    from .job import Ready

_NOISE_BYTES = 4 << 20  # Python's own large blocks come and go by about this much; below it a share says nothing
_EPILOG = (
    "exit codes: 0 done, 1 the answer is no, 2 usage, 3 machine not ready, 4 on disk,\n"
    "5 not finite, 6 out of memory, 7 hang or lost worker, 70 our bug, 130 Ctrl-C,\n143 SIGTERM after a whole save"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message, hints=[f"`{self.prog} --help`"])


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no number of 1 or more")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(
        prog="shardwise",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
        description="Trains PyTorch models that do not fit on one GPU, on PyTorch's own FSDP2.",
    )
    top.add_argument("--version", action="version", version=f"shardwise {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object on stdout")
    common.add_argument("--quiet", action="store_true", help="errors only")
    common.add_argument("--verbose", action="store_true", help="tracebacks too")

    train = verbs.add_parser(
        "train",
        parents=[common],
        help="plan, train, evaluate, checkpoint; starts its own workers",
        description="Train what CONFIG says: plan, start the workers, train, evaluate, checkpoint.",
    )
    train.add_argument("config", nargs="?", metavar="CONFIG", help="run file (not needed with --resume)")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set any key of the run file: --set data.seq_len=512"
    )
    train.add_argument(
        "--workers", type=_positive, metavar="N", help="ranks on this machine (default: the run file's, else all GPUs)"
    )
    train.add_argument("--plan", type=Path, metavar="FILE", help="obey this plan.json instead of planning")
    train.add_argument("--resume", metavar="RUN[@STEP]", help="go on with a run from its newest (or that) checkpoint")

    export = verbs.add_parser(
        "export",
        parents=[common],
        help="a Hugging Face folder that anyone can load",
        description="Write the weights of a run as a folder for AutoModelForCausalLM.from_pretrained.",
    )
    export.add_argument("run", type=Path, metavar="RUN")
    export.add_argument("out", type=Path, metavar="OUT")
    export.add_argument("--step", type=int, help="checkpoint to take (default: the newest)")
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: that of the source model")

    check = verbs.add_parser(
        "checkpoint",
        parents=[common],
        help="list, verify or prune a run's checkpoints",
        description="What is saved in RUN and whether it is whole.",
    )
    check.add_argument("action", choices=["list", "verify", "prune"])
    check.add_argument("run", type=Path, metavar="RUN")
    check.add_argument("--keep", type=int, default=1, metavar="N", help="prune: how many of the newest stay (default 1)")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code.

    A rank of torchrun leaves hard: after an error its peers may be stuck in a collective, and gloo's threads, alive at the interpreter's own end, were seen to
    abort it (facts/feasibility.md B.1).
    """
    code = _run(argv)
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    console = Console(json="--json" in words, quiet="--quiet" in words, verbose="--verbose" in words)
    try:
        args = parser().parse_args(words)
        return {"train": _train, "export": _export, "checkpoint": _checkpoint}[args.verb](args, console)
    except ShardwiseError as error:
        if not error.common or os.environ.get("RANK", "0") == "0":  # what all ranks of torchrun met is said once
            console.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        console.error(Interrupted("interrupted"))
        return Interrupted.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        console.error(
            ShardwiseError(
                f"{type(error).__name__}: {error}", hints=["this is a bug of shardwise: please report it with the lines above"]
            )
        )
        traceback.print_exc()
        return ShardwiseError.exit_code


def _train(args: argparse.Namespace, console: Console) -> int:
    from . import start
    from .job import Request
    from .runfile import load_run_file

    resume = None
    if args.resume:
        name, _, step = args.resume.partition("@")
        if step and not step.isdigit():
            raise UsageError(f"`{args.resume}` is not RUN or RUN@STEP", where="`--resume`", hints=[f"`--resume {name}`"])
        resume = Path(name), int(step) if step else None
        if not (resume[0] / "config.yaml").is_file():
            raise OnDisk(
                f"`{name}` is no run folder: it has no `config.yaml`", where="`--resume`", hints=["give the `run_dir` of the run"]
            )
    if not args.config and not resume:
        raise UsageError("no run file was given", hints=["`shardwise train run.yaml`", "`shardwise train --resume RUN`"])
    overrides = [*args.set, *([f"run_dir={resume[0]}"] if resume else [])]
    run = load_run_file(Path(args.config) if args.config else resume[0] / "config.yaml", overrides)  # type: ignore[index]
    request = Request(run, args.workers, args.plan, resume)
    watcher = _Watcher(console, run.config.log_every)
    launch = start.run_as_rank if start.under_torchrun() else start.run_here
    try:
        summary = launch(request, watcher.ready, watcher.hear)
    finally:
        watcher.close()
    if os.environ.get("RANK", "0") == "0":
        _say_summary(console, summary)
        if args.json:
            print(json.dumps(summary))
    if summary["status"] == "terminated":
        raise Terminated(
            f"stopped by SIGTERM after step {summary['steps']}, which is saved whole",
            hints=[f"`shardwise train --resume {run.config.run_dir}`"],
        )
    return EXIT_OK


class _Watcher:
    """Turns the messages of a run into lines on the screen."""

    def __init__(self, console: Console, log_every: int) -> None:
        self.console = console
        self.progress = console.progress(log_every)

    def ready(self, ready: Ready) -> None:
        if ready.preview:
            self.console.say(ready.preview)
        self.console.say(f"data    {ready.data_text}")
        self.progress.start(ready.total_steps, ready.done_steps)

    def hear(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "say":
            self.progress.note(message["text"])
        elif kind == "ranks":
            self.console.say(
                f"workers {message['ranks']}, {message['threads']} thread{'s' if message['threads'] > 1 else ''} each"
            )
        elif kind == "step":
            self.progress.step(message)
        elif kind == "eval":
            losses = ", ".join(f"{name} {loss:.4f}" for name, loss in message["validation"].items())
            self.progress.note(
                f"step {message['step']}: validation loss {losses}" + (" (before training)" if message["untrained"] else "")
            )
        elif kind == "saved":
            self.progress.note(f"step {message['step']}: checkpoint saved")

    def close(self) -> None:
        self.progress.stop()


def _say_summary(console: Console, summary: dict[str, Any]) -> None:
    predicted = summary["predicted_peak_allocated_bytes"]
    measured = summary["measured_peak_allocated_bytes"]
    console.say("")
    if summary["validation_loss"] is not None:
        before = summary["untrained_validation_loss"]
        share = f", {summary['validation_loss'] / before:.0%} of the {before:.3f} before training" if before else ""
        console.say(f"validation loss  {summary['validation_loss']:.3f}{share}")
    console.say(f"peak a rank      predicted {bytes_text(predicted)} allocated ({summary['measured_how']})")
    for rank, peak in enumerate(measured):
        console.say(
            f"  rank {rank}         measured  {bytes_text(peak)}, unexplained {bytes_text(peak - predicted)} ({(peak - predicted) / predicted:+.1%})"
        )
    if measured and abs(max(measured) - predicted) > max(0.05 * predicted, _NOISE_BYTES):
        console.warn("the measured peak differs from the plan by more than 5 %")
    console.say(f"run              {summary['run_dir']}, {summary['steps']} steps")


def _export(args: argparse.Namespace, console: Console) -> int:
    from .export import export_run

    result = export_run(args.run, args.out, step=args.step, dtype=args.dtype, progress=console.say)
    console.say(
        f"exported step {result['step']}: {result['num_params']:,} parameters, {result['dtype']}, {bytes_text(result['bytes'])}, to {result['path']}"
    )
    if args.json:
        print(json.dumps(result))
    return EXIT_OK


def _best(folder: Path) -> set[int]:
    """The step that the newest checkpoint calls the best, which a prune keeps too."""
    from . import checkpoint

    whole = checkpoint.steps(folder)
    state = json.loads((checkpoint.folder_of(folder, whole[-1]) / "state.json").read_text("utf-8")) if whole else {}
    return {step for step in [state.get("progress", {}).get("best_step")] if step is not None}


def _checkpoint(args: argparse.Namespace, console: Console) -> int:
    from . import checkpoint
    from .rundir import RunDir

    folder = RunDir.open(args.run).checkpoints
    if args.action == "prune":
        removed = checkpoint.prune(folder, args.keep, _best(folder))
        console.say(f"removed {', '.join(f'step {step}' for step in removed) or 'nothing'}")
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "bytes": checkpoint.size(folder, step),
            **({"faults": checkpoint.verify(checkpoint.folder_of(folder, step))} if args.action == "verify" else {}),
        }
        for step in checkpoint.steps(folder)
    ]
    for row in rows:
        faults = row.get("faults")
        console.say(
            f"step {row['step']}  {bytes_text(row['bytes'])}"
            + ("" if faults is None else "  whole" if not faults else "  " + "; ".join(faults))
        )
    if args.json:
        print(json.dumps({"run": str(args.run), "checkpoints": rows}))
    return 1 if any(row.get("faults") for row in rows) else EXIT_OK
