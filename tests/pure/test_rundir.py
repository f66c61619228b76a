"""A run folder never writes over another and can be read by anyone while it is written."""

import json

import pytest

from shardwise.errors import OnDisk
from shardwise.rundir import RunDir


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_new_run_holds_its_config_and_plan_and_gives_them_back(tmp_path):
    made = RunDir.create(tmp_path / "runs" / "a", "steps: 1\n", {"schema": 1})
    run = RunDir.open(made.path)
    assert run.config_text() == "steps: 1\n" and run.plan() == {"schema": 1}
    assert run.checkpoints.is_dir() and not any(run.checkpoints.iterdir())


def test_every_record_can_be_read_as_soon_as_it_is_written(tmp_path):
    run = RunDir.create(tmp_path / "a", "", {})
    for step in (1, 2, 3):
        run.metrics({"step": step, "loss": 0.1 + 0.2})
        assert lines(run.path / "metrics.jsonl")[-1] == {"step": step, "loss": 0.1 + 0.2}
    run.event("checkpoint", step=3)
    (event,) = lines(run.path / "events.jsonl")
    assert event["event"] == "checkpoint" and event["step"] == 3 and event["time"] > 1.7e9


def test_a_half_line_left_by_a_crash_costs_no_later_record(tmp_path):
    run = RunDir.create(tmp_path / "a", "", {})
    run.metrics({"step": 1})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    run.metrics({"step": 2})
    run.metrics({"step": 3})
    first, torn, *rest = (run.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first) == {"step": 1} and torn == '{"step": 2, "lo'
    assert [json.loads(line) for line in rest] == [{"step": 2}, {"step": 3}]


def test_a_run_is_never_written_over_and_the_way_on_is_named(tmp_path):
    run = RunDir.create(tmp_path / "a", "mine\n", {})
    with pytest.raises(OnDisk) as caught:
        RunDir.create(run.path, "theirs\n", {})
    assert caught.value.hints == (
        f"`shardwise train --resume {run.path}` goes on with it",
        f"`--set run_dir={run.path}-2` starts a new one",
    )
    assert run.config_text() == "mine\n"
    (tmp_path / "a-2").mkdir()
    with pytest.raises(OnDisk) as caught:
        RunDir.create(run.path, "", {})
    assert caught.value.hints[-1] == f"`--set run_dir={run.path}-3` starts a new one"


def test_a_folder_that_is_no_run_is_not_offered_for_resume(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(OnDisk) as caught:
            RunDir.create(path, "", {})
        assert len(caught.value.hints) == 1 and "--resume" not in caught.value.hints[0]


def test_an_empty_folder_is_taken(tmp_path):
    RunDir.create(tmp_path, "x\n", {})
    assert RunDir.open(tmp_path).config_text() == "x\n"


def test_opening_what_is_no_run_or_has_lost_its_plan_is_refused(tmp_path):
    with pytest.raises(OnDisk, match="is no run folder"):
        RunDir.open(tmp_path)
    run = RunDir.create(tmp_path / "a", "", {})
    (run.path / "plan.json").write_text('{"schema": ')
    with pytest.raises(OnDisk, match="missing or torn"):
        run.plan()


def test_a_place_that_cannot_be_made_is_refused_with_its_reason(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OnDisk, match="cannot be made: Not a directory"):
        RunDir.create(tmp_path / "file" / "run", "", {})
