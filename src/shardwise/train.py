"""The training loop of one rank: build, shard, fill, then steps with evaluation, checkpoints and records.

Reads a ``Job`` and nothing else. What differs from rank to rank is the rank's shards and rows; every decision (stop, best, save) is taken on numbers
that are equal on all ranks.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import checkpoint, optim, sharding, step
from .config import RunConfig
from .data import Order, Prepared, open_prepared
from .errors import NotFinite, OnDisk, ShardwiseError, UsageError
from .job import Job
from .meter import Meter
from .model import Unit, build, initialise, load_weights, units
from .rundir import RunDir
from .source import ModelSource
from .world import RankContext

_TRAINING_WINDOWS = ("first", "steady")


@dataclass
class Progress:
    """Where a run is: what a checkpoint keeps beside tensors. Equal on all ranks."""

    step: int = 0
    tokens_seen: int = 0
    last_loss: float | None = None
    untrained_validation_loss: float | None = None
    validation: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    evaluated_step: int = -1


class Trainer:
    """One rank of one run."""

    def __init__(self, context: RankContext, job: Job) -> None:
        self._stop = False
        signal.signal(
            signal.SIGTERM, self._ask_to_stop
        )  # first, so that a stop asked for while loading is heeded after the first step
        self.context, self.job, self.config, self.layout = context, job, job.config, job.layout
        self.rank, self.world_size = context.rank, context.world_size
        self.device = torch.device("cuda", torch.cuda.current_device()) if job.device_type == "cuda" else torch.device("cpu")
        self.run = RunDir.open(job.run_dir)
        self.data: Prepared = open_prepared(job.data_folder)
        self.order = Order(
            [data.num_rows for data in self.data.train.sets], self.data.train.weights, self.config.seed, self.config.global_batch
        )
        self.total_steps = total_steps(self.config, self.order.steps_per_epoch)
        self.progress = Progress()
        self._saved_step = -1
        self._began = time.monotonic()
        self._steps_here = 0
        self._steady_tokens, self._steady_s = 0, 0.0  # of all steps but the first, which allocates and warms up
        self.meter = Meter(job.device_type)
        self.model, self.units = self._build()
        self.params = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = optim.make_optimizer(self.model, self.config.optimizer)
        self._tensorboard = self._open_tensorboard()
        torch.manual_seed(
            self.config.seed * 1_000_003 + self.rank
        )  # dropout differs by rank; data order never asks this generator

    def _build(self) -> tuple[nn.Module, tuple[Unit, ...]]:
        self._say("building the model")
        model = build(self.job.source, attention_path=self.layout.attention, chunk_tokens=self.layout.loss_chunk_tokens)
        if self.layout.param_dtype == "fp32":
            products = {
                (param.shape[0], param.shape[1])
                for module in model.modules()
                if isinstance(module, nn.Linear)
                for param in [module.weight]
            }
            self.meter.warm(products, self.layout.micro_batch * self.config.data.seq_len)
        self.meter.start()  # here: building allocates no weights, but imports the model's code
        found = units(model)
        sharding.shard(model, found, self.layout, sharding.make_mesh(self.layout, self.job.device_type))
        sharding.materialise(model, self.device)
        if self.job.resume_from is None:
            if self.job.source.kind == "weights":
                assert self.job.source.folder, "trained weights lie in a folder"
                load_weights(model, Path(self.job.source.folder), self._say)
            else:
                initialise(model, self.config.seed, self.job.source.name)
        stored = sharding.stored_bytes(model)
        if stored != self.job.stored_bytes:
            raise ShardwiseError(
                f"rank {self.rank} stores {stored:,} bytes of parameters, the plan says {self.job.stored_bytes:,}",
                why="what runs must be what was planned",
                hints=["this is a bug of shardwise: please report it with plan.json"],
            )
        return model, found

    def _say(self, text: str) -> None:
        if self.rank == 0:
            self.context.send({"kind": "say", "text": text})

    # ---- the loop

    def train(self) -> dict[str, Any]:
        """Run to the last step; the summary of ``summary``, on every rank.

        Collective: every rank runs it with the same job.
        """
        if self.job.resume_from is not None:
            self._resume(self.job.resume_from)
            if self._due_for_evaluation() and self.progress.evaluated_step != self.progress.step:
                self._evaluate()  # SIGTERM came before it
        else:
            self._evaluate(untrained=True)
        terminated = stopped_early = False
        while self.progress.step < self.total_steps and not (terminated or stopped_early):
            terminated = self._step().stop
            done = self.progress.step
            if self._due_for_evaluation() and not terminated:
                self._evaluate()
                stopped_early = self._should_stop_early()
            if self.config.checkpoint.every and done % self.config.checkpoint.every == 0 and done < self.total_steps:
                self._save()
        if not terminated and not stopped_early:
            self._evaluate()
        self._save()
        if self._tensorboard:
            self._tensorboard.close()
        return self.summary("terminated" if terminated else "stopped early" if stopped_early else "done")

    def _due_for_evaluation(self) -> bool:
        """After the steps that ``eval_every`` names; the last step's evaluation is made at the end."""
        done, every = self.progress.step, self.config.eval_every
        return every is not None and done % every == 0 and 0 < done < self.total_steps

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        self._stop = True

    def _step(self) -> step.StepResult:
        began = time.monotonic()
        now = self.progress.step
        ids = self.order.step_ids(now)
        real = ids[ids >= 0]
        global_tokens = int(self.data.train.valid[real].sum())
        rows = step.rows_of(ids, self.rank, self.world_size, self.layout.micro_batch)
        lr = optim.lr_at(self.config.optimizer, now, self.total_steps)
        optim.set_lr(self.optimizer, lr)
        with self.meter.window("first" if self._steps_here == 0 else "steady"):
            loss_sum = self._accumulate(rows, global_tokens)
            try:
                result = step.reduce_and_check(
                    self.params,
                    loss_sum,
                    global_tokens,
                    self._stop,
                    step=now + 1,
                    rows=rows,
                    find_rank=lambda: self._find_not_finite(rows, global_tokens),
                )
            except NotFinite as error:
                error.hints = tuple(self._ways_back())
                raise
            clip = self.config.optimizer.clip
            if clip is not None and result.grad_norm > clip:
                optim.scale_gradients(self.params, clip / (result.grad_norm + 1e-6))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._steps_here += 1
        self.progress.step += 1
        self.progress.tokens_seen += len(real) * self.config.data.seq_len
        self.progress.last_loss = result.loss
        self._record(result, lr, time.monotonic() - began, len(real) * self.config.data.seq_len, global_tokens)
        return result

    def _rate(self) -> float | None:
        """Tokens per second of the job over all steps but the first; None before the second."""
        return self._steady_tokens / self._steady_s if self._steady_s else None

    def _accumulate(self, rows: list[list[int]], global_tokens: int) -> torch.Tensor:
        return step.accumulate(self.model, self.data.train, rows, global_tokens, self.layout.grad_sync, self.device)

    def _find_not_finite(self, rows: list[list[int]], global_tokens: int) -> str:
        blocks = [name for unit in self.units if unit.kind == "block" for name in unit.modules]
        return step.find_not_finite(self.model, blocks, lambda: self._accumulate(rows, global_tokens))

    def _record(self, result: step.StepResult, lr: float, step_s: float, tokens: int, trained: int) -> None:
        if self._steps_here > 1:
            self._steady_tokens, self._steady_s = self._steady_tokens + tokens, self._steady_s + step_s
        if self.rank != 0:
            return
        progress = self.progress
        rate = self._rate() or tokens / step_s
        left = (self.total_steps - progress.step) * tokens / rate
        record = {
            "step": progress.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": tokens,
            "trained_tokens": trained,
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "epoch": (progress.step - 1) // self.order.steps_per_epoch,
            "peak_allocated_bytes": max((self.meter.peaks.get(name, 0) for name in _TRAINING_WINDOWS), default=0) or None,
        }
        self.run.metrics(record)
        self._scalars("train", progress.step, {key: record[key] for key in ("loss", "grad_norm", "lr", "tokens_per_s")})
        self.context.send({"kind": "step", **record, "tokens_per_s": rate, "left_s": left, "total_steps": self.total_steps})

    # ---- evaluation

    def _evaluate(self, untrained: bool = False) -> None:
        if not self.data.validation:
            return
        began = time.monotonic()
        with self.meter.window("evaluation"):
            losses = {
                name: step.evaluate(self.model, data, self.layout.micro_batch, self.device)
                for name, data in self.data.validation.items()
            }
        progress = self.progress
        bad = [f"{name} {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
        if bad:
            raise NotFinite(
                f"validation loss is not finite after step {progress.step}: {', '.join(bad)}",
                why="the last updates spoilt the weights; nothing of this step was saved",
                hints=self._ways_back(),
                common=True,
            )
        progress.validation, progress.evaluated_step = losses, progress.step
        first = next(iter(losses.values()))
        if untrained:
            progress.untrained_validation_loss = first
        elif progress.best is None or first < progress.best:
            progress.best, progress.best_step, progress.evals_since_best = first, progress.step, 0
            if self.config.checkpoint.keep_best:
                self._save()
        else:
            progress.evals_since_best += 1
        if self.rank == 0:
            record = {"step": progress.step, "validation": losses, "eval_s": time.monotonic() - began}
            self.run.metrics(record)
            self._scalars("validation", progress.step, losses)
            self.context.send({"kind": "eval", **record, "untrained": untrained})

    def _ways_back(self) -> list[str]:
        """What to type after a loss that is not finite."""
        whole = checkpoint.steps(self.run.checkpoints)
        lower = "--set optimizer.lr=... with a lower rate"
        if whole:
            return [f"`shardwise train --resume {self.run.path}@{whole[-1]}\n      {lower}`"]
        return [f"start again, `{lower}`", "`--set checkpoint.every=50` would keep what went well"]

    def _should_stop_early(self) -> bool:
        early = self.config.early_stop
        return early is not None and self.progress.evals_since_best >= early.patience

    # ---- checkpoints

    def _save(self) -> None:
        """Save this step unless it is saved already, then drop what ``checkpoint`` does not ask to keep."""
        now = self.progress.step
        if now == self._saved_step:
            return
        self._saved_step = now
        began = time.monotonic()
        state = {
            "progress": asdict(self.progress),
            "total_steps": self.total_steps,
            "data": self.job.data_folder.name,
            "source_dtype": source_dtype(self.job.source),
            "world_size": self.world_size,
            "global_batch": self.config.global_batch,
        }
        with self.meter.window("save"):
            checkpoint.save(self.run.checkpoints, now, self.model, self.optimizer, state)
        if self.rank == 0:
            best = self.progress.best_step
            checkpoint.prune(
                self.run.checkpoints,
                self.config.checkpoint.keep_last,
                {best} if self.config.checkpoint.keep_best and best else set(),
            )
            self.run.event("checkpoint", step=now, seconds=time.monotonic() - began)
            self.context.send({"kind": "saved", "step": now})
        dist.barrier()

    def _resume(self, folder: Path) -> None:
        state = checkpoint.load(folder, self.model, self.optimizer)
        if state["data"] != self.job.data_folder.name:
            raise OnDisk(
                f"the data are not those of the checkpoint: prepared as {self.job.data_folder.name}, saved with {state['data']}",
                where=str(folder),
                why="files, tokenizer, seq_len, format or seed changed, so the order of rows would be another",
                hints=[
                    "restore the data of the run",
                    "start a new run from its export: `shardwise export RUN OUT`, `--set model=OUT`",
                ],
                common=True,
            )
        if state["global_batch"] != self.config.global_batch:
            raise UsageError(
                f"the checkpoint was made with global_batch {state['global_batch']}, this run has {self.config.global_batch}",
                where=str(folder),
                why="rows would be skipped or come twice",
                hints=[f"`--set global_batch={state['global_batch']}`"],
                common=True,
            )
        self.progress = Progress(**state["progress"])
        self._saved_step = self.progress.step
        if state["total_steps"] != self.total_steps:
            self._say(
                f"the run has {self.total_steps} steps now, {state['total_steps']} before: the learning rate follows the new number"
            )
        if not state["rng_restored"]:
            self._say(f"resumed on {self.world_size} ranks from {state['world_size']}: the same batches, another dropout")

    # ---- records

    def _open_tensorboard(self) -> Any:
        if self.rank != 0 or "tensorboard" not in self.config.trackers:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.run.path / "tensorboard"), purge_step=None)

    def _scalars(self, group: str, at: int, values: dict[str, Any]) -> None:
        if self._tensorboard:
            for name, value in values.items():
                self._tensorboard.add_scalar(f"{group}/{name}", value, at)

    def summary(self, status: str) -> dict[str, Any]:
        """The run in one object: what ``train --json`` prints, with measured peaks of every rank.

        Collective: gathers one small object a rank.
        """
        everyone: list[dict[str, int]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(everyone, self.meter.peaks)
        progress = self.progress
        return {
            "status": status,
            "final_loss": progress.last_loss,
            "validation_loss": next(iter(progress.validation.values()), None),
            "validation": progress.validation,
            "untrained_validation_loss": progress.untrained_validation_loss,
            "steps": progress.step,
            "total_steps": self.total_steps,
            "tokens_seen": progress.tokens_seen,
            "tokens_per_s": self._rate(),
            "measured_peak_allocated_bytes": [
                max((peaks.get(name, 0) for name in _TRAINING_WINDOWS), default=0) for peaks in everyone
            ],
            "measured_peaks": everyone,
            "measured_how": self.meter.how,
            "best_step": progress.best_step,
            "wall_s": time.monotonic() - self._began,
        }


def total_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run: the epochs, cut by ``steps`` where given."""
    whole = config.epochs * steps_per_epoch
    return min(whole, config.steps) if config.steps is not None else whole


def source_dtype(source: ModelSource) -> str:
    """The dtype the weights came in, which an export gives back: ``bfloat16``, ``float16`` or ``float32``."""
    if source.kind != "weights":
        return "float32"
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=source.trust_remote_code, local_files_only=True)
    return str(config.dtype or torch.float32).removeprefix("torch.")


def run_rank(context: RankContext, job: Job) -> dict[str, Any]:
    """What every rank runs; returns the summary.

    Collective: every rank runs it with the same job.
    """
    return Trainer(context, job).train()
