"""The tokenizer of a run: a folder's or hub id's, the one beside the weights, or a byte-level BPE trained on the training
text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import NotReady, OnDisk, UsageError
from ..hub import hub_answers
from .cache import digest, publish
from .columns import OURS
from .sources import Source, find

END_OF_TEXT = "<|endoftext|>"
_SMALLEST_BPE = 257  # 256 bytes and the end of text


def load_tokenizer(
    ref: Any,
    model_dir: Path | None,
    data: Any,
    cache_dir: Path,
    trust_remote_code: bool = False,
    *,
    where: Callable[[str], str] = lambda key: f"`{key}`",
) -> tuple[Any, Path]:
    """The tokenizer ``tokenizer:`` means, and the folder of its files.

    Args:
        ref: Folder, hub id, ``{"train_bpe": N}``, or None for the one in ``model_dir``.
        data: The ``config.DataConfig``, whose training text a BPE is trained on.
        cache_dir: Where a trained BPE is kept.

    Raises:
        UsageError: None is named and the model brings none; the folder's tokenizer needs code of its own.
        OnDisk: The folder holds no tokenizer.
        NotReady: A hub id cannot be fetched.
    """
    if ref is not None and not isinstance(ref, str):
        size = ref["train_bpe"] if isinstance(ref, Mapping) else ref.train_bpe
        folder = train_bpe(size, data, cache_dir, where)
        return _from_folder(folder, str(folder), False, where), folder
    if ref is None:
        if model_dir is None:
            raise UsageError(
                "no tokenizer: a model of random weights brings none",
                where=where("model"),
                hints=[
                    "`--set tokenizer=FOLDER` or a hub id",
                    "`--set tokenizer.train_bpe=4096` trains one on the training text",
                ],
            )
        return _from_folder(model_dir, str(model_dir), trust_remote_code, where), model_dir
    folder = Path(ref).expanduser()
    if folder.is_dir():
        return _from_folder(folder, ref, trust_remote_code, where), folder
    if ref.count("/") != 1 or ref.startswith(("/", ".", "~")):
        raise OnDisk(f"tokenizer folder `{ref}` does not exist", where=where("tokenizer"), hints=["a hub id is written ORG/NAME"])
    folder = _fetch(ref, where)
    return _from_folder(folder, ref, trust_remote_code, where), folder


def train_bpe(size: int, data: Any, cache_dir: Path, where: Callable[[str], str]) -> Path:
    """Folder of a byte-level BPE of ``size`` tokens, ``<|endoftext|>`` among them, trained on all training text, or the one
    trained before.

    A text too small for that many merges gives fewer tokens: ``len(tokenizer)`` counts.
    """
    if size < _SMALLEST_BPE:
        raise UsageError(
            f"a byte-level BPE of {size:,} tokens cannot be: 256 bytes and the end of text\n       are {_SMALLEST_BPE}",
            where=where("tokenizer"),
            hints=["`--set tokenizer.train_bpe=1024`"],
        )
    given = [data.train] if isinstance(data.train, str) else list(data.train)
    sources = [
        find(
            one if isinstance(one, str) else one.path,
            split="train" if isinstance(one, str) else one.split,
            as_text=data.format == "text",
            where=where("data.train"),
        )
        for one in given
    ]
    wanted = {
        *OURS,
        *data.columns.values(),
        *(name for one in given if not isinstance(one, str) for name in (one.columns or {}).values()),
    }

    def make(aside: Path) -> dict[str, Any]:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        bpe.train_from_iterator(
            _texts(sources, wanted),
            trainers.BpeTrainer(
                vocab_size=size,
                special_tokens=[END_OF_TEXT],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT).save_pretrained(aside)
        return {"train_bpe": size, "tokens": bpe.get_vocab_size()}

    folder = cache_dir / "tokenizers" / f"bpe-{digest([size, sorted(wanted), [source.facts() for source in sources]])}"
    publish(folder, make)
    return folder


def _texts(sources: list[Source], wanted: set[str]) -> Iterator[str]:
    for source in sources:
        for record, _ in source.records(only=wanted):
            for name in wanted & record.keys():
                yield from _strings(record[name])


def _strings(value: Any) -> Iterator[str]:
    """The texts in a column: itself, or the contents of its messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for message in value:
            if isinstance(message, dict):
                yield from (text for key in ("content", "value") if isinstance(text := message.get(key), str))


def _from_folder(folder: Path, name: str, trust_remote_code: bool, where: Callable[[str], str]) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"the tokenizer in `{name}` needs Python code of its own",
                where=where("tokenizer"),
                why="code from a model folder runs only if the run file says so",
                hints=["`--set trust_remote_code=true` once you have read it"],
            ) from error
        raise OnDisk(
            f"`{name}` holds no tokenizer that can be loaded",
            where=where("tokenizer"),
            why=textwrap.fill(reason, 68),
            hints=[
                "a tokenizer folder holds tokenizer.json and tokenizer_config.json",
                "`--set tokenizer=FOLDER` names another one",
            ],
        ) from error


def _fetch(hub_id: str, where: Callable[[str], str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                hub_id,
                local_files_only=not hub_answers(),
                allow_patterns=[
                    "tokenizer*",
                    "*.model",
                    "vocab*",
                    "merges*",
                    "special_tokens*",
                    "added_tokens*",
                    "*.jinja",
                    "config.json",
                    "*.py",
                ],
            )
        )
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotReady(
            f"tokenizer `{hub_id}` cannot be fetched\n       and is not in the local cache",
            where=where("tokenizer"),
            why=textwrap.fill(reason[:200], 68),
            hints=[
                "`--set tokenizer=FOLDER` with tokenizer.json and tokenizer_config.json",
                f"with a network:\n      `hf download {hub_id}` once, then run again",
            ],
        ) from error
