"""Ranks fail, die and hang as processes do: the first error is the one shown, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch.distributed as dist

from shardwise import faults
from shardwise.errors import LostWorker, NotReady, ShardwiseError, UsageError
from shardwise.world import Ranks, init_group, leave_group, run_ranks, threads_per_rank


def rank_and_sum(context):
    import torch

    value = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(value)
    return context.rank, value.item(), os.getpid(), torch.get_num_threads()


def test_ranks_return_their_results_in_order_and_know_each_other():
    out = run_ranks(rank_and_sum, 3)
    assert [entry[:2] for entry in out] == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_a_rank_costs_a_fraction_of_a_second_once_the_forkserver_runs():
    run_ranks(rank_and_sum, 2)
    began = time.monotonic()
    run_ranks(rank_and_sum, 2)
    assert time.monotonic() - began < 3.0  # a fresh interpreter would import for about ten


def test_threads_a_rank_are_cores_divided_by_ranks():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cores and threads_per_rank(cores * 3) == 1


def one_raises(context):
    if context.rank == 1:
        raise ValueError("the reader met a torn line")
    dist.barrier()


def test_the_first_failing_rank_is_shown_and_the_others_are_only_counted():
    with pytest.raises(ShardwiseError) as caught:
        Ranks(one_raises, 3, describe=faults.describe, timeout_s=20, threads=1).join(limit_s=60)
    assert caught.value.what == "rank 1: ValueError: the reader met a torn line"
    assert caught.value.lines == (("others", "2 ranks stopped because of rank 1; no process is left behind"),)
    assert "torn line" in str(caught.value.__cause__) and "one_raises" in str(caught.value.__cause__)


def one_is_killed(context):
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named_with_its_signal():
    with pytest.raises(LostWorker, match="rank 0 ended without a word: SIGKILL"):
        Ranks(one_is_killed, 2, describe=faults.describe, timeout_s=20, threads=1).join(limit_s=60)


def waits_for_ever(context, seen):
    context.send(os.getpid())
    signal.pause()


def test_a_rank_that_does_not_end_is_stopped_at_the_limit_and_is_gone():
    pids = []
    with pytest.raises(LostWorker, match=r"ranks \[0, 1\] gave no result within 1 s"):
        Ranks(waits_for_ever, 2, (None,), timeout_s=20, threads=1).join(lambda rank, pid: pids.append(pid), limit_s=1.0)
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)


PARENT = """
import sys
from shardwise.world import Ranks
from tests.world.test_ranks import waits_for_ever
if __name__ == "__main__":
    Ranks(waits_for_ever, 2, (None,), threads=1).join(lambda rank, pid: print(pid, flush=True))
"""


def test_ranks_die_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=env) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(psutil.pid_exists(pid) for pid in pids)
        parent.kill()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=0.1)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def takes_a_port_that_is_taken(context):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        leave_group()
        try:
            init_group("cpu", rank=0, world_size=1, meeting=None, timeout_s=5)
        except NotReady as error:
            return error.text().replace(str(port), "PORT"), error.exit_code
    return None


def test_a_port_in_use_is_named_with_a_way_out():
    text, code = run_ranks(takes_a_port_that_is_taken, 1)[0]
    assert code == 3
    assert (
        text
        == """\
error: port PORT on 127.0.0.1 is in use, and rank 0 must listen on it
  where: `MASTER_PORT` in the environment of torchrun
  why: another job, perhaps an earlier one of this run, holds it

hint: `torchrun --standalone ...` takes a free port by itself
hint: `torchrun --master-port 29501 ...` takes another one"""
    )


def uses_a_weight_outside(context):
    import torch
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fully_shard(model)
    torch.nn.functional.linear(torch.ones(1, 4), model[0].weight)


def has_two_dtypes(context):
    import torch
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16())
    fully_shard(model)
    model(torch.ones(1, 4))


def has_a_scalar(context):
    import torch
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    model.gain = torch.nn.Parameter(torch.tensor(1.0))
    fully_shard(model)


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (uses_a_weight_outside, "a weight is used outside the forward of the module that FSDP gathers it for"),
        (has_two_dtypes, "parameters of one FSDP unit are stored in more than one dtype: "),
        (has_a_scalar, "parameter `gain` has no dimension to cut"),
    ],
)
def test_what_torch_says_is_said_in_plain_words(fn, what):
    with pytest.raises(UsageError) as caught:
        Ranks(fn, 1, describe=faults.describe, timeout_s=20, threads=1).join(limit_s=60)
    assert caught.value.what.startswith(what)
