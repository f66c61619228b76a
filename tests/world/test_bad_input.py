"""Each kind of bad input ends with its own message and exit code, before any rank is started, and leaves no run folder behind."""

import json
import os
import resource
import socket
import subprocess
import sys

import pytest

SAFE = ["train", "run.yaml"]
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def refused(cli, *words, code, **options):
    """The error as printed."""
    done = cli(*SAFE, *words, **options)
    assert done.returncode == code, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    text = done.stderr[done.stderr.index("error: ") :]
    assert max(map(len, text.splitlines())) <= 80, text
    assert not (cli.folder / "run").exists()
    return text


def chat(folder, *records):
    (folder / "chat.jsonl").write_text("".join(json.dumps(r) + "\n" if not isinstance(r, str) else r + "\n" for r in records))


def test_a_missing_data_file(cli):
    assert (
        refused(cli, "--set", "data.train=text/act9.txt", code=4)
        == """\
error: `text/act9.txt` does not exist
  where: `--set data.train=text/act9.txt`

hint: `text/act2.txt` exists
exit code 4 (on disk)
"""
    )


def test_a_missing_run_file(cli):
    done = cli("train", "runn.yaml")
    assert done.returncode == 4
    assert done.stderr == "error: run file `runn.yaml` does not exist\n\nhint: `run.yaml` is there\nexit code 4 (on disk)\n"


def test_an_empty_data_set(cli, project):
    (project / "empty.jsonl").write_text("")
    assert (
        refused(cli, "--set", "data.train=empty.jsonl", code=4)
        == """\
error: data set `empty.jsonl` is empty
  where: `--set data.train=empty.jsonl`
  why: 1 file read, no record found
exit code 4 (on disk)
"""
    )


def test_a_line_that_is_not_json_is_named_by_file_and_line(cli, project):
    chat(project, {"text": "To be"}, {"text": "or not"}, '{"text": "to be')
    assert (
        refused(cli, "--set", "data.train=chat.jsonl", code=4)
        == """\
error: line 3 of `chat.jsonl` is not JSON
  here: {"text": "to be
                 ^
  where: chat.jsonl:3, column 10
  why: Unterminated string starting at

hint: one JSON object a line, or one list of objects in the whole file
exit code 4 (on disk)
"""
    )


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def test_conversations_without_an_assistant_turn(cli, project):
    cli.json(
        "train",
        "run.yaml",
        "--set",
        "run_dir=once",
        "--set",
        "steps=1",
        "--set",
        "data.validation=null",
        "--set",
        "optimizer.warmup=0",
    )
    (project / "once/tokenizer/chat_template.jinja").write_text(TEMPLATE)
    chat(project, {"messages": [{"role": "user", "content": "Who's there?"}]})
    text = refused(
        cli, "--set", "data.train=chat.jsonl", "--set", "tokenizer=once/tokenizer", "--set", "data.validation=null", code=4
    )
    assert text.splitlines()[0] == "error: no conversation of `chat.jsonl` has an assistant turn with text"


def test_token_ids_beyond_the_vocabulary(cli):
    text = refused(cli, "--set", "model.shape.vocab_size=299", code=2)
    assert text.startswith("""\
error: tokenizer and model disagree: the data hold token id 299,
       the model knows ids below 299
""")
    assert "hint: `model: {shape: ...}` with `vocab_size: 300` fits this one" in text


def test_seq_len_beyond_the_models_positions(cli):
    assert (
        refused(cli, "--set", "data.seq_len=129", code=2)
        == """\
error: seq_len 129 is beyond the model's 128 positions
  where: `--set data.seq_len=129`

hint: `--set data.seq_len=128`
exit code 2 (usage)
"""
    )


def test_a_global_batch_that_no_layout_can_give(cli):
    assert (
        refused(cli, "--set", "global_batch=7", code=2)
        == """\
error: global_batch 7 cannot be split evenly over 2 ranks
  where: `--set global_batch=7`
  why: every rank handles as many sequences:
       micro_batch x grad_accum x ranks = global_batch

hint: `--set global_batch=6`
hint: `--set global_batch=8`
hint: or 1 or 7 ranks for 7 sequences
exit code 2 (usage)
"""
    )


def test_a_device_that_is_not_here(cli):
    assert refused(cli, "--set", "cluster.device=h100-80gb", code=3).startswith(
        "error: no h100-80gb is visible on this machine\n"
    )


def test_more_workers_than_gpus():
    from shardwise.errors import NotReady
    from shardwise.prepare import check_devices
    from shardwise.spec import Cluster

    with pytest.raises(NotReady) as caught:  # the machine is made up: there is no GPU here
        check_devices(Cluster(1, 4, "h100-80gb", "cuda", 1, 1, ""), visible=2)
    assert (
        caught.value.exit_code == 3
        and caught.value.text()
        == """\
error: 4 workers were asked for, 2 GPUs are visible
  where: `cluster.gpus_per_node` or `--workers`
  why: two ranks on one GPU deadlock in NCCL

hint: `--workers 2`
hint: `echo $CUDA_VISIBLE_DEVICES` shows what hides the others"""
    )


@pytest.mark.parametrize("workers", ["0", "-1", "two"])
def test_a_number_of_workers_that_is_none(cli, workers):
    done = cli(*SAFE, f"--workers={workers}")
    assert done.returncode == 2 and f"`{workers}` is no number of 1 or more" in done.stderr


def test_a_run_folder_that_exists(cli, project):
    (project / "taken").mkdir()
    (project / "taken/file").write_text("x")
    assert (
        refused(cli, "--set", "run_dir=taken", code=4)
        == """\
error: run folder `taken` exists
  where: `run_dir`
  why: a run never writes over another

hint: `--set run_dir=taken-2` starts a new one
exit code 4 (on disk)
"""
    )


def test_a_hub_id_without_network(cli):
    text = refused(cli, "--set", "model=meta-llama/Llama-3.1-8B", "--set", "tokenizer=null", code=3)
    assert text.startswith("""\
error: hub id `meta-llama/Llama-3.1-8B` cannot be fetched
       and is not in the local cache
  where: `--set model=meta-llama/Llama-3.1-8B`
""")
    assert text.endswith("""
hint: `--set model=FOLDER` with config.json and *.safetensors in it
hint: with a network: `hf download meta-llama/Llama-3.1-8B`
hint: `--set model.shape=NAME` takes random weights of a known shape
exit code 3 (machine not ready)
""")


def test_a_bare_shape_name_as_model(cli):
    assert (
        refused(cli, "--set", "model=llama-3.1-8b", "--set", "tokenizer=null", code=2)
        == """\
error: run.yaml: 1 problem
  1: `--set model=llama-3.1-8b`
     names a shape, `{shape: llama-3.1-8b}`, not trained weights, and no folder
     that is here
     write `--set model.shape=llama-3.1-8b` (random weights), or give a folder
     or a hub id, ORG/NAME, for trained ones

hint: docs/run-file.md has every key: what it takes, its default and its price
exit code 2 (usage)
"""
    )


def test_a_port_in_use_under_torchrun(cli):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        text = refused(cli, code=3, env={**TORCHRUN, "MASTER_PORT": port})
    assert (
        text.startswith(f"error: port {port} on 127.0.0.1 is in use, and rank 0 must listen on it\n")
        and "torchrun --standalone" in text
    )


def test_a_disk_that_is_full_while_a_checkpoint_is_written(project):
    """RLIMIT_FSIZE stands for the full disk: the plan and the records fit, a checkpoint does not."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (%d, resource.RLIM_INFINITY)); from shardwise.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    words = ["train", "run.yaml", "--set", "model.shape.hidden_size=128", "--set", "checkpoint.every=2"]
    done = subprocess.run(
        [sys.executable, "-c", code % 200_000, *words], cwd=project, env=env, text=True, capture_output=True, timeout=120
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert done.returncode == 3, done.stderr
    assert "error: checkpoint of step 2 does not fit on the disk" in done.stderr and "--set run_dir=..." in done.stderr
    assert list((project / "run/checkpoints").iterdir()) == []


def test_several_faults_of_a_run_file_come_at_once_with_their_lines(cli, project):
    (project / "bad.yaml").write_text(
        "model: {shape: llama-3.1-8b}\ndata: {train: x.txt, seq_len: lots}\nper_device_train_batch_size: 4\nbf16: true\n"
        "layout: {strategy: HYBRID_SHARD}\nglobal_batch: 8\noptimizer: {lr: 1e-5}\nrun_dir: r\nepoch: 2\n"
    )
    done = cli("train", "bad.yaml")
    assert done.returncode == 2
    for line in (2, 3, 4, 5, 9):
        assert f"bad.yaml:{line}" in done.stderr, done.stderr
    assert (
        "5 problems" in done.stderr and "micro_batch" in done.stderr and "bf16-mixed" in done.stderr and "epochs" in done.stderr
    )
