"""What the tests of the data room share: a byte-level BPE trained on a real play, chat templates, run-file objects, files."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardwise.config import DataConfig
from shardwise.data import Prepared, prepare

PLAY = Path(__file__).parent / "data" / "as_you_like_it.txt"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Removes the thoughts of every answer but the last, as several reasoning models' templates do.
FORGETS_THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No special token and no line break at the borders: an answer's first letters may grow together with what precedes them.
NO_BORDERS = (
    "{% for m in messages %}{{ '\n' + m['role'] + ': ' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}"
)


@functools.cache
def tokenizer_folder() -> Path:
    """A saved byte-level BPE of 700 tokens, trained on the play, without a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train(
        [str(PLAY)],
        trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    folder = Path(tempfile.mkdtemp(prefix="shardwise-test-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", extra_special_tokens=["<|im_start|>", "<|im_end|>"]
    ).save_pretrained(folder)
    return folder


def tokenizer(template: str | None = None) -> Any:
    """The BPE above with a chat template."""
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder())
    loaded.chat_template = template
    return loaded


def where(key: str) -> str:
    return f"`{key}` (run.yaml)"


def config(train: Any, tmp_path: Path, **rest: Any) -> DataConfig:
    return DataConfig.model_validate({"train": train, "seq_len": 64, "cache_dir": str(tmp_path / "cache"), **rest})


def make(train: Any, tmp_path: Path, template: str | None = CHATML, **rest: Any) -> Prepared:
    """``prepare`` with the tokenizer above."""
    extra = {key: rest.pop(key) for key in ("vocab_size", "max_positions", "seed", "progress", "tokenizer") if key in rest}
    said: Callable[[str], None] = extra.pop("progress", lambda line: None)
    return prepare(
        config(train, tmp_path, **rest),
        extra.pop("tokenizer", tokenizer(template)),
        **{"vocab_size": 700, "max_positions": None, "seed": 0, **extra},
        where=where,
        progress=said,
    )


def jsonl(path: Path, records: Iterable[Any]) -> str:
    """``path`` written with one record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return str(path)


def chat(*texts: str) -> dict[str, Any]:
    """A record whose turns alternate, user first."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}
