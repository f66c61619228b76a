"""`shardwise train` from the outside: what a user types, sees, interrupts and resumes."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwise.world import run_ranks


def tensors_of(folder):
    """Every tensor of a checkpoint."""
    reader = dcp.FileSystemReader(folder)
    wanted = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return wanted


def assert_same(mine, other):
    assert mine.keys() == other.keys()
    assert [key for key in mine if not torch.equal(mine[key], other[key])] == []


def metrics(folder, key="loss"):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def test_train_ends_with_one_json_object_that_holds_the_promised_keys(cli, project):
    out = cli.json("train", "run.yaml")
    assert out["steps"] == 6 and out["run_dir"] == "run" and out["status"] == "done"
    assert out["final_loss"] == metrics(project / "run")[-1] < metrics(project / "run")[0]
    assert out["validation_loss"] < out["untrained_validation_loss"]
    assert out["tokens_per_s"] > 0 and out["predicted_peak_allocated_bytes"] > 0
    assert len(out["measured_peak_allocated_bytes"]) == 2 and min(out["measured_peak_allocated_bytes"]) > 0
    assert set(out["measured_peaks"][0]) == {"evaluation", "first", "steady", "save"}


def test_three_steps_and_three_resumed_are_six_bit_for_bit(cli, project):
    cli.json("train", "run.yaml", "--set", "checkpoint.every=3", "--set", "layout.grad_accum=2", "--set", "eval_every=2")
    whole = tensors_of(project / "run/checkpoints/step-6")
    losses = metrics(project / "run")
    out = cli.json("train", "--resume", "run@3")
    assert out["steps"] == 6
    assert (project / "run/superseded/before-2/step-6/manifest.json").is_file(), "the first step-6 moved: the one compared is new"
    assert_same(tensors_of(project / "run/checkpoints/step-6"), whole)
    assert metrics(project / "run")[-3:] == losses[3:]


def test_the_global_batches_are_the_same_at_1_2_and_4_ranks(cli, project):
    losses = {}
    for ranks in (1, 2, 4):
        cli.json(
            "train",
            "run.yaml",
            "--workers",
            str(ranks),
            "--set",
            f"run_dir=run{ranks}",
            "--set",
            "model.shape.attention_dropout=0.0",
        )
        losses[ranks] = metrics(project / f"run{ranks}")
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
    assert losses[4] == pytest.approx(losses[1], rel=1e-5)


def test_going_back_to_an_older_step_saves_its_own_work_and_loses_nothing(cli, project):
    cli.json("train", "run.yaml", "--set", "checkpoint.every=2")
    first = tensors_of(project / "run/checkpoints/step-6")
    out = cli("train", "--resume", "run@4", "--set", "optimizer.lr=1e-5", "--json")
    assert out.returncode == 0, out.stderr
    assert "going back to step 4: later checkpoints (6) move to run/superseded" in out.stderr
    again = tensors_of(project / "run/checkpoints/step-6")
    assert any(not torch.equal(again[key], first[key]) for key in first)
    assert_same(tensors_of(project / "run/superseded/before-2/step-6"), first)
    assert metrics(project / "run", "lr")[-1] < 1e-5 < metrics(project / "run", "lr")[3], (
        "the losses of steps 5 and 6 are the new ones"
    )
    assert len(metrics(project / "run")) == 6 and "lr: 1.0e-5" in (project / "run/config.yaml").read_text()
    longer = cli.json("train", "--resume", "run", "--set", "steps=7")
    assert longer["steps"] == 7 and cli.json("train", "--resume", "run")["steps"] == 7, "what was set once stays set"


def test_another_global_batch_on_resume_is_refused(cli, project):
    cli.json("train", "run.yaml", "--set", "steps=2")
    out = cli("train", "--resume", "run", "--set", "global_batch=4", "--set", "steps=6")
    assert out.returncode == 2
    assert "error: the checkpoint was made with global_batch 8, this run has 4\n" in out.stderr


def test_a_validation_loss_that_is_not_finite_ends_the_run_before_its_save(cli, project):
    spoil = "optimizer={lr: 1e38, clip: null, schedule: constant}"
    out = cli("train", "run.yaml", "--set", spoil, "--set", "steps=1")
    assert out.returncode == 5, out.stderr
    assert "error: validation loss is not finite after step 1: validation nan" in out.stderr
    assert not list((project / "run/checkpoints").glob("step-*"))


def test_a_run_saved_by_two_ranks_goes_on_with_one(cli, project):
    sets = ["--set", "checkpoint.every=3", "--set", "model.shape.attention_dropout=0.0"]
    cli.json("train", "run.yaml", *sets)
    losses = metrics(project / "run")
    out = cli("train", "--resume", "run@3", "--workers", "1", "--json")
    assert out.returncode == 0, out.stderr
    assert "resumed on 1 ranks from 2: the same batches, another dropout" in out.stderr
    assert metrics(project / "run")[-3:] == pytest.approx(losses[3:], rel=1e-5)


def test_a_plan_that_is_given_is_obeyed_and_one_of_another_job_refused(cli, project):
    first = cli.json(
        "train", "run.yaml", "--set", "layout.strategy=no_shard", "--set", "layout.micro_batch=2", "--set", "steps=2"
    )
    cli.json("train", "run.yaml", "--plan", "run/plan.json", "--set", "run_dir=again", "--set", "steps=2")
    assert (project / "again/plan.json").read_text() == (project / "run/plan.json").read_text()
    plan = json.loads((project / "again/plan.json").read_text())
    assert plan["chosen"]["layout"]["strategy"] == "no_shard" and plan["schema"] == 1
    assert {"model", "cluster", "workload", "chosen", "candidates", "refused", "nearest"} <= plan.keys()
    assert metrics(project / "again") == metrics(project / "run") and first["steps"] == 2
    other = cli(
        "train", "run.yaml", "--plan", "run/plan.json", "--set", "run_dir=third", "--workers", "1", "--set", "data.seq_len=32"
    )
    assert other.returncode == 2
    assert (
        other.stderr
        == """\
error: the plan is of another job: 2 differences
  differs: ranks: plan 2, run 1
  differs: seq_len: plan 64, run 32
  where: `--plan run/plan.json`

hint: leave `--plan` out to plan for this run
hint: `--workers 2` where the ranks differ
exit code 2 (usage)
"""
    )


def started(project, *words):
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise", "train", "run.yaml", "--set", "steps=100000", "--set", "epochs=100000", *words],
        cwd=project,
        env=env,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def after_step(process, step):
    for line in process.stderr:
        if line.startswith(f"step {step}/"):
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError("the run ended early")


def gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not alive


def test_sigterm_saves_and_ends_and_the_run_can_be_resumed(cli, project):
    process = started(project)
    children = after_step(process, 4)
    process.terminate()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 143, words
    assert "stopped by SIGTERM after step" in words and gone(children)
    step = max(int(p.name[5:]) for p in (project / "run/checkpoints").glob("step-*"))
    assert step >= 4
    out = cli.json("train", "--resume", "run", "--set", f"steps={step + 2}")
    assert out["steps"] == step + 2


def test_ctrl_c_ends_in_seconds_and_leaves_no_process(project):
    process = started(project)
    children = after_step(process, 2)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - began < 10
    assert words.endswith("error: interrupted; nothing was saved yet\nexit code 130 (Ctrl-C)\n") and gone(children)


def test_a_killed_worker_ends_the_run_with_its_name_and_leaves_no_process(project):
    process = started(project)
    children = after_step(process, 2)
    ranks = [child for child in children if child.memory_info().rss > 100 * 2**20 and child.ppid() != process.pid]
    ranks[-1].kill()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 7, words
    assert "ended without a word: SIGKILL" in words and gone(children)


def test_non_finite_stops_before_the_update_names_it_and_saves_nothing_bad(cli, project):
    out = cli(
        "train",
        "run.yaml",
        "--set",
        "optimizer.lr=1e30",
        "--set",
        "optimizer.clip=null",
        "--set",
        "optimizer.warmup=0",
        "--set",
        "checkpoint.every=1",
    )
    assert out.returncode == 5, out.stderr
    assert out.stderr.endswith("""\
error: gradient norm is nan in step 2, every loss is finite
  began: rank 0, gradient at the output of `model.layers.1`
         rank 1, gradient at the output of `model.layers.1`
  why: the update was not made: the weights are those before this step, and
       nothing of it was saved

hint: `shardwise train --resume run@1
      --set optimizer.lr=... with a lower rate`
exit code 5 (not finite)
""")
    saved = [int(p.name[5:]) for p in (project / "run/checkpoints").glob("step-*")]
    assert saved == [1]


def one_rank_with_a_nan(context):
    from shardwise import step
    from shardwise.errors import NotFinite

    loss = torch.tensor(float("nan") if context.rank == 1 else 3.0, dtype=torch.float64)
    try:
        step.reduce_and_check([], loss, 10, False, step=7, rows=[[context.rank * 2], [context.rank * 2 + 1]], find_rank=str)
    except NotFinite as error:
        return error.text().splitlines()[:2], error.common
    return None


def test_a_loss_that_is_not_finite_on_one_rank_is_named_on_all_with_its_rows():
    expected = (["error: loss is nan in step 7 on rank 1", "  batch: rows 2, 3 of the training data"], True)
    assert run_ranks(one_rank_with_a_nan, 2) == [expected, expected]


def test_early_stop_and_the_best_checkpoint_follow_the_validation_loss(cli, project):
    out = cli.json(
        "train",
        "run.yaml",
        "--set",
        "steps=40",
        "--set",
        "epochs=9",
        "--set",
        "eval_every=1",
        "--set",
        "early_stop.patience=2",
        "--set",
        "checkpoint.keep_best=1",
        "--set",
        "checkpoint.keep_last=1",
        "--set",
        "optimizer.lr=0.5",
        "--set",
        "optimizer.schedule=constant",
    )
    validation = [v["validation"] for v in metrics(project / "run", "validation")][1:]
    best = validation.index(min(validation)) + 1
    assert out["status"] == "stopped early" and out["steps"] == best + 2 and out["best_step"] == best
    assert sorted(int(p.name[5:]) for p in (project / "run/checkpoints").glob("step-*")) == [best, best + 2]


def test_tensorboard_holds_the_losses(cli, project):
    pytest.importorskip("tensorboard")
    cli.json("train", "run.yaml", "--set", "trackers=[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(project / "run/tensorboard"))
    events.Reload()
    assert [s.value for s in events.Scalars("train/loss")] == pytest.approx(metrics(project / "run"), rel=1e-6)


def test_the_same_run_without_a_compiler_is_measured_by_the_profiler(cli, project):
    larger = [
        "--set",
        "model.shape.hidden_size=256",
        "--set",
        "model.shape.intermediate_size=1024",
    ]  # tensors, not Python's own blocks, make the peak
    exact = cli.json("train", "run.yaml", "--set", "run_dir=exact", *larger)
    path = os.pathsep.join([os.path.dirname(sys.executable)])
    other = cli.json("train", "run.yaml", *larger, env={"PATH": path, "XDG_CACHE_HOME": str(project / "nothing")})
    assert "profiler" in other["measured_how"] and "livebytes" in exact["measured_how"]
    assert other["measured_peak_allocated_bytes"] == pytest.approx(exact["measured_peak_allocated_bytes"], rel=0.1)


def test_under_torchrun_it_is_a_worker(project):
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "shardwise",
            "train",
            "run.yaml",
            "--json",
        ],
        cwd=project,
        env=env,
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["steps"] == 6 and len(out["measured_peak_allocated_bytes"]) == 2 and "livebytes" in out["measured_how"]
