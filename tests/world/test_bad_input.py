"""Each kind of bad input ends with its own message and exit code, before any rank is started, and leaves no run folder behind."""

import json
import os
import resource
import socket
import subprocess
import sys

import pytest

SAFE = ["train", "run.yaml"]


def refused(cli, *words, code, **options):
    """The first line of the error, and the whole text."""
    done = cli(*SAFE, *words, **options)
    assert done.returncode == code, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    text = done.stderr[done.stderr.index("error: "):]
    assert max(map(len, text.splitlines())) <= 80, text
    assert "hint: " in text and text.splitlines()[-1].startswith(f"exit code {code}")
    assert not (cli.folder / "run").exists()
    return text.splitlines()[0], text


def chat(folder, *records):
    (folder / "chat.jsonl").write_text("".join(json.dumps(r) + "\n" if not isinstance(r, str) else r + "\n" for r in records))


def test_a_missing_data_file(cli):
    first, text = refused(cli, "--set", "data.train=texts/act0.txt", code=4)
    assert first == "error: `texts/act0.txt` does not exist"
    assert "`--set data.train=texts/act0.txt`" in text


def test_a_missing_run_file(cli):
    done = cli("train", "runn.yaml")
    assert done.returncode == 4
    assert done.stderr.startswith("error: run file `runn.yaml` does not exist\n") and "run.yaml" in done.stderr


def test_an_empty_data_set(cli, project):
    (project / "empty.jsonl").write_text("")
    first, _ = refused(cli, "--set", "data.train=empty.jsonl", code=4)
    assert "empty.jsonl" in first


def test_a_line_that_is_not_json_is_named_by_file_and_line(cli, project):
    chat(project, {"text": "To be"}, {"text": "or not"}, '{"text": "to be')
    first, _ = refused(cli, "--set", "data.train=chat.jsonl", code=4)
    assert "chat.jsonl:3" in first


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture
def chat_tokenizer(cli, project):
    """A tokenizer folder with a chat template."""
    from tests.one.data_kit import ROOT  # noqa: F401 - the kit's module must import
    cli.json("train", "run.yaml", "--set", "run_dir=once", "--set", "steps=1", "--set", "data.validation=null")
    folder = project / "once/tokenizer"
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_conversations_without_an_assistant_turn(cli, project, chat_tokenizer):
    chat(project, {"messages": [{"role": "user", "content": "Who's there?"}]})
    first, _ = refused(cli, "--set", "data.train=chat.jsonl", "--set", f"tokenizer={chat_tokenizer}", "--set", "data.validation=null", code=4)
    assert "assistant" in first


def test_token_ids_beyond_the_vocabulary(cli):
    first, text = refused(cli, "--set", "model.shape.vocab_size=299", code=2)
    assert "299" in first + text and "300" in first + text


def test_seq_len_beyond_the_models_positions(cli):
    first, text = refused(cli, "--set", "data.seq_len=129", code=2)
    assert first == "error: seq_len 129 is beyond the model's 128 positions"
    assert "hint: `--set data.seq_len=128`" in text


def test_a_global_batch_that_no_layout_can_give(cli):
    first, text = refused(cli, "--set", "global_batch=7", code=2)
    assert "global_batch" in first and "7" in first
    assert "global_batch=6" in text or "global_batch=8" in text


def test_more_workers_than_gpus(cli):
    first, _ = refused(cli, "--set", "cluster.device=h100-80gb", code=3)
    assert first == "error: no h100-80gb is visible on this machine"


def test_a_run_folder_that_exists(cli, project):
    (project / "taken").mkdir()
    (project / "taken/file").write_text("x")
    done = cli(*SAFE, "--set", "run_dir=taken")
    assert done.returncode == 4
    assert done.stderr.endswith("""\
error: run folder `taken` exists
  where: `run_dir`
  why: a run never writes over another

hint: `--set run_dir=taken-2` starts a new one
exit code 4
""")


def test_a_hub_id_without_network(cli):
    first, text = refused(cli, "--set", "model=meta-llama/Llama-3.1-8B", code=3)
    assert first == "error: hub id `meta-llama/Llama-3.1-8B` cannot be fetched"
    assert "`--set model=FOLDER`" in text


def test_a_bare_shape_name_as_model(cli):
    first, text = refused(cli, "--set", "model=llama-3.1-8b", code=2)
    assert "run.yaml: 1 problem" in first
    assert "{shape: Llama-3.1-8B}" in text or "{shape: llama-3.1-8b}" in text


def test_a_port_in_use_under_torchrun(cli):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        first, text = refused(cli, code=3, env={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert first == f"error: port {port} on 127.0.0.1 is in use, and rank 0 must listen on it"
    assert "torchrun --standalone" in text


def test_a_disk_that_is_full_while_a_checkpoint_is_written(project):
    """RLIMIT_FSIZE stands for the full disk: the plan and the records fit, a checkpoint does not."""
    code = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (%d, resource.RLIM_INFINITY)); " \
           "from shardwise.cli import main; sys.exit(main(sys.argv[1:]))"
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run([sys.executable, "-c", code % 200_000, "train", "run.yaml", "--set", "model.shape.hidden_size=128", "--set", "checkpoint.every=2"], cwd=project, env=env,
                          text=True, capture_output=True, timeout=120)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert done.returncode == 3, done.stderr
    assert "error: checkpoint of step 2 does not fit on the disk" in done.stderr and "--set run_dir=..." in done.stderr
    assert list((project / "run/checkpoints").iterdir()) == []


def test_several_faults_of_a_run_file_come_at_once_with_their_lines(cli, project):
    (project / "bad.yaml").write_text("model: {shape: llama-3.1-8b}\ndata: {train: x.txt, seq_len: lots}\nper_device_train_batch_size: 4\nbf16: true\n"
                                      "layout: {strategy: HYBRID_SHARD}\nglobal_batch: 8\noptimizer: {lr: 1e-5}\nrun_dir: r\nepoch: 2\n")
    done = cli("train", "bad.yaml")
    assert done.returncode == 2
    for line in (2, 3, 4, 5, 9):
        assert f"bad.yaml:{line}" in done.stderr, done.stderr
    assert "5 problems" in done.stderr and "micro_batch" in done.stderr and "bf16-mixed" in done.stderr and "epochs" in done.stderr
