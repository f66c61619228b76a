"""From a run file to a job: model found, tokenizer and data prepared, layout planned, run folder made.

Runs once a run, in one process that imports torch, before any rank exists. What it returns is torch-free, so that the command line can print it and
start the ranks without importing torch itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import checkpoint, data, hardware, planner
from .config import RunConfig
from .data import Order, Prepared
from .errors import NotReady, OnDisk, UsageError
from .job import Job, Ready, Request
from .model import build, units
from .plan import Plan
from .rundir import RunDir
from .source import ModelSource, resolve
from .spec import Cluster, make_cluster
from .train import total_steps


def prepare(request: Request, say: Callable[[str], None]) -> Ready:
    """Do everything that needs no second rank.

    Args:
        say: Called with one line of progress at a time.

    Raises:
        ShardwiseError: Any of the kinds of bad input; nothing is left in ``run_dir`` then.
    """
    run, config = request.run, request.run.config
    run_dir = request.resume[0] if request.resume else Path(config.run_dir)
    if request.resume is None:
        RunDir.refuse_existing(run_dir)
    resume_from = _checkpoint_of(run_dir, request.resume[1]) if request.resume else None
    cluster = _cluster(request)
    if "tensorboard" in config.trackers and importlib.util.find_spec("tensorboard") is None:
        raise NotReady(
            "TensorBoard is not installed",
            where=run.where("trackers"),
            hints=["`pip install tensorboard`", "`--set trackers=[]`"],
        )
    source = resolve(config.model, trust_remote_code=config.trust_remote_code, where=run.where("model"))
    model = build(source)
    limits = getattr(model, "config", None)
    max_positions = getattr(limits, "max_position_embeddings", None)
    data.check_positions(config.data, max_positions, run.where)
    plan = _plan(request, run_dir, source, model, cluster)  # before the data: what cannot fit is said before hours of tokenising
    say(planner.plan_text(plan))
    cache = data.cache_folder(config.data)
    tokenizer, tokenizer_dir = data.load_tokenizer(
        config.tokenizer,
        Path(source.folder) if source.folder else None,
        config.data,
        cache,
        config.trust_remote_code,
        where=run.where,
    )
    prepared = data.prepare(
        config.data,
        tokenizer,
        vocab_size=getattr(limits, "vocab_size", len(tokenizer)),
        max_positions=max_positions,
        seed=config.seed,
        where=run.where,
        progress=say,
    )
    layout = plan.chosen.layout
    if resume_from is None:
        _create(run_dir, request, plan, source, model, tokenizer, tokenizer_dir)
    else:
        step = int(resume_from.name.removeprefix("step-"))
        later = RunDir.open(run_dir).go_on_from(step, run.text_with_overrides(), plan.to_json())
        if later:
            say(f"going back to step {step}: later checkpoints ({', '.join(map(str, later))}) move to {run_dir}/superseded")
    order = Order([s.num_rows for s in prepared.train.sets], prepared.train.weights, config.seed, config.global_batch)
    job = Job(
        config=config,
        layout=layout,
        source=source,
        data_folder=prepared.folder,
        run_dir=run_dir,
        device_type=cluster.kind,
        stored_bytes=plan.chosen.rows["params_sharded"],
        resume_from=resume_from,
    )
    previews = [data.preview(prepared, tokenizer, row) for row in range(min(config.data.show, prepared.train.num_rows))]
    return Ready(
        job,
        plan,
        "\n\n".join(previews),
        _data_text(prepared, config, order),
        total_steps(config, order.steps_per_epoch),
        int(resume_from.name.removeprefix("step-")) if resume_from else 0,
    )


def _create(
    run_dir: Path, request: Request, plan: Plan, source: ModelSource, model: Any, tokenizer: Any, tokenizer_dir: Path
) -> None:
    """The run folder with all an export needs, or nothing."""
    try:
        RunDir.create(run_dir, request.run.text_with_overrides(), plan.to_json())
        _keep_model_and_tokenizer(run_dir, source, model, tokenizer, tokenizer_dir)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _cluster(request: Request) -> Cluster:
    """The ranks and devices of this run.

    Raises:
        NotReady: More workers than GPUs, or a device that is not here.
        UsageError: Several nodes without torchrun.
    """
    asked, where = request.run.config.cluster, request.run.where
    world = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world or 0)) or None
    if world is None and asked.nodes > 1:
        raise UsageError(
            f"{asked.nodes} nodes need a launcher on each of them",
            where=where("cluster.nodes"),
            why="shardwise starts the workers of one machine by itself",
            hints=[
                f"`torchrun --nnodes {asked.nodes} -m shardwise train ...` on each",
                "`--set cluster.nodes=1` trains on this machine",
            ],
        )
    if local and request.workers and request.workers != local:
        raise UsageError(
            f"torchrun started {local} ranks on this machine, `--workers {request.workers}` asks for another number",
            hints=["leave `--workers` out under torchrun"],
        )
    per_node = local or request.workers or asked.gpus_per_node
    nodes = (world or 1) // (local or 1)
    visible = torch.cuda.device_count()
    if asked.device not in (None, "cpu") and not visible:
        raise NotReady(
            f"no {asked.device} is visible on this machine",
            where=where("cluster.device"),
            hints=["`--set cluster.device=cpu` rehearses on CPU"],
        )
    if visible and asked.device != "cpu":  # the cards that are here, whatever the run file calls them
        total = min(torch.cuda.get_device_properties(index).total_memory for index in range(visible))
        total = round(asked.memory_gib * 2**30) if asked.memory_gib else total
        name, outside = torch.cuda.get_device_name(0), hardware.OUTSIDE_BYTES["cuda"]
        cluster = Cluster(nodes, per_node or visible, name, "cuda", total, outside, "torch.cuda on this machine")
    else:
        cluster = make_cluster(
            nodes=nodes, gpus_per_node=per_node, device="cpu", memory_gib=asked.memory_gib, where=where("cluster.device")
        )
    check_devices(cluster, visible)
    return cluster


def _plan(request: Request, run_dir: Path, source: ModelSource, model: torch.nn.Module, cluster: Cluster) -> Plan:
    """The plan given, the run's own where it still holds, else a new one."""
    if request.plan_file is not None:
        return _read_plan(request.plan_file, request.run.config, cluster, model)
    if request.resume is not None:
        stored = _parse_plan(RunDir.open(run_dir).path / "plan.json")
        if not _differences(stored, request.run.config, cluster, model):
            return stored
    return planner.make_plan(request.run, model, units(model), name=source.name, cluster=cluster)


def _data_text(prepared: Prepared, config: RunConfig, order: Order) -> str:
    stats = [s.stats for s in prepared.train.sets]
    return (
        f"{sum(s.num_documents for s in stats):,} documents in {prepared.train.num_rows:,} rows of {config.data.seq_len}, "
        f"{order.steps_per_epoch:,} steps an epoch"
    )


def _read_plan(path: Path, config: RunConfig, cluster: Cluster, model: torch.nn.Module) -> Plan:
    """The plan of ``--plan``, refused where it is of another job."""
    plan = _parse_plan(path)
    differences = _differences(plan, config, cluster, model)
    if differences:
        raise UsageError(
            f"the plan is of another job: {len(differences)} difference{'s' * (len(differences) > 1)}",
            lines=[("differs", text) for text in differences],
            where=f"`--plan {path}`",
            hints=[
                "leave `--plan` out to plan for this run",
                f"`--workers {plan.chosen.layout.world_size}` where the ranks differ",
            ],
        )
    return plan


def _parse_plan(path: Path) -> Plan:
    try:
        return Plan.from_json(json.loads(path.read_text("utf-8")))
    except FileNotFoundError as error:
        raise OnDisk(f"plan `{path}` does not exist", where="`--plan`", hints=["leave `--plan` out to plan now"]) from error
    except (ValueError, KeyError, TypeError) as error:
        raise OnDisk(
            f"`{path}` is no plan of this version of shardwise: {error}",
            where="`--plan`",
            hints=["leave `--plan` out to plan now"],
        ) from error


def _differences(plan: Plan, config: RunConfig, cluster: Cluster, model: torch.nn.Module) -> list[str]:
    """In what a plan is of another job than this one, a text each."""
    layout = config.layout
    fixed = {} if isinstance(layout, str) else {k: v for k, v in layout.model_dump().items() if v is not None and v != "auto"}
    num_params = sum(param.numel() for param in model.parameters())
    now = {
        "global_batch": config.global_batch,
        "seq_len": config.data.seq_len,
        "precision": config.precision,
        "reduce_dtype": config.reduce_dtype,
    }
    pairs: list[tuple[str, Any, Any]] = [
        ("ranks", plan.chosen.layout.world_size, cluster.world_size),
        ("parameters", plan.model["num_params"], num_params),
    ]
    pairs += [("device", plan.cluster["kind"], cluster.kind)]
    pairs += [(f"layout.{key}", getattr(plan.chosen.layout, key), value) for key, value in fixed.items()]
    pairs += [(key, plan.workload[key], value) for key, value in now.items()]
    return [
        f"{key}: plan {theirs:,}, run {ours:,}" if isinstance(ours, int) else f"{key}: plan {theirs}, run {ours}"
        for key, theirs, ours in pairs
        if theirs != ours
    ]


def _checkpoint_of(run_dir: Path, step: int | None) -> Path:
    """The checkpoint folder to resume from."""
    return checkpoint.find(RunDir.open(run_dir).checkpoints, step)


def _keep_model_and_tokenizer(run_dir: Path, source: ModelSource, model: Any, tokenizer: Any, tokenizer_dir: Path) -> None:
    """Put beside the run what an export needs: the model's config and the tokenizer."""
    target = run_dir / "model"
    target.mkdir()
    if hasattr(model, "config"):
        plain = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k not in ("use_cache", "dtype")})
        plain.architectures = [type(model).__name__]
        if source.kind == "shape":  # the shape's ids are another tokenizer's: generation would stop at an ordinary token
            plain.bos_token_id, plain.eos_token_id, plain.pad_token_id = (
                tokenizer.bos_token_id,
                tokenizer.eos_token_id,
                tokenizer.pad_token_id,
            )
        plain.save_pretrained(target)
    if source.folder and (Path(source.folder) / "generation_config.json").is_file():
        shutil.copy(Path(source.folder) / "generation_config.json", target)
    shutil.copytree(
        tokenizer_dir,
        run_dir / "tokenizer",
        ignore=lambda folder, names: [
            n
            for n in names
            if not n.endswith((".json", ".model", ".jinja", ".txt", ".tiktoken"))
            or n in ("config.json", "generation_config.json")
            or n.endswith(".index.json")
        ],
    )


def check_devices(cluster: Cluster, visible: int) -> None:
    """Refuse more workers than devices.

    Raises:
        NotReady: ``cluster`` asks for more CUDA devices than are visible.
    """
    if cluster.kind == "cuda" and cluster.gpus_per_node > visible:
        raise NotReady(
            f"{cluster.gpus_per_node} workers were asked for, {visible} GPU{'s are' if visible != 1 else ' is'} visible",
            where="`cluster.gpus_per_node` or `--workers`",
            why="two ranks on one GPU deadlock in NCCL",
            hints=[f"`--workers {max(1, visible)}`", "`echo $CUDA_VISIBLE_DEVICES` shows what hides the others"],
        )
