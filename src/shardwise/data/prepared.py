"""All data of one run behind one folder: made once by one process, opened by every rank.

    <cache>/documents/<key>/    one tokenised set (documents.py)
    <cache>/tokenizers/<key>/   the tokenizer's files
    <cache>/prepared/<key>/     which document lies in which row, for training and each validation set

The keys are digests of what decides the content, so a second run with the same data, tokenizer, ``seq_len`` and seed opens what
is there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import DataConfig
from ..errors import UsageError
from .cache import cache_folder, digest, file_digest, open_meta, publish
from .chat import Encoder
from .documents import Documents, Recipe, open_documents, tokenise
from .holdout import Span, everything, hold_out
from .order import split
from .pack import join
from .packed import Mixture, PackedSet, PackStats, pack
from .sources import find, short_name

_VERSION = 1
_NOTES = {"is_local", "local_files_only", "name_or_path", "transformers_version"}


@dataclass(frozen=True)
class Prepared:
    """The data of a run, opened.

    Attributes:
        train: All training sets.
        validation: Name -> set; ``validation`` where the run file gives a share or one path.
        folder: Give it to ``open_prepared``; its name identifies content, packing and seed.
        tokenizer_dir: The tokenizer's files.
    """

    train: Mixture
    validation: dict[str, PackedSet]
    folder: Path
    tokenizer_dir: Path


def prepare(
    config: DataConfig,
    tokenizer: Any,
    *,
    vocab_size: int,
    max_positions: int | None,
    seed: int,
    where: Callable[[str], str],
    progress: Callable[[str], None],
) -> Prepared:
    """Read, tokenise and pack what ``data:`` names, or open it from the cache.

    Args:
        vocab_size: Rows of the model's embedding.
        max_positions: Positions the model knows; None for any number.
        where: Key of the run file -> where it was written, for messages.
        progress: Called with one line at a time.

    Raises:
        UsageError: The run file and the data, the tokenizer or the model disagree.
        OnDisk: Data are missing, empty or cannot be read.
        NotReady: A hub id cannot be fetched, the cache cannot be written.
    """
    check_positions(config, max_positions, where)
    root = cache_folder(config)
    encoder = Encoder(tokenizer)
    tokenizer_dir = _keep_tokenizer(tokenizer, root)
    sets, weights = _train_sets(config, where)

    def read(one: _Set, key: str) -> Documents:
        source = find(one.path, split=one.split, as_text=one.format == "text", where=where(key))
        recipe = Recipe(one.format, one.columns, config.system, tokenizer_dir.name)
        return tokenise(source, recipe, encoder, root, vocab_size=vocab_size, where=where, progress=progress)

    stores = [read(one, "data.train") for one in sets]
    held = {
        name: read(_Set(path, "validation", config.format, dict(config.columns)), "data.validation")
        for name, path in _validation_paths(config).items()
    }
    job = _Job(config, seed, sets, weights, stores, held, tokenizer_dir.name, _pad_id(tokenizer, vocab_size), where)
    folder = root / "prepared" / job.key()
    publish(folder, job.pack)
    prepared = open_prepared(folder)
    for packed in (*prepared.train.sets, *prepared.validation.values()):
        rows = f"{packed.num_rows:,} row{'s' * (packed.num_rows != 1)} of {packed.seq_len:,}"
        progress(f"{short_name(packed.name)}: {rows}\n        {packed.stats.text()}")
    return prepared


def check_positions(config: Any, max_positions: int | None, where: Callable[[str], str]) -> None:
    """Refuse rows longer than the model knows positions.

    Raises:
        UsageError: ``data.seq_len`` is beyond ``max_positions``.
    """
    if max_positions is not None and config.seq_len > max_positions:
        raise UsageError(
            f"seq_len {config.seq_len:,} is beyond the model's {max_positions:,} positions",
            where=where("data.seq_len"),
            hints=[f"`--set data.seq_len={max_positions}`"],
        )


def open_prepared(folder: Path) -> Prepared:
    """What ``prepare`` left in ``folder``, memory-mapped.

    Raises:
        OnDisk: Something of it is missing or torn.
    """
    facts, root = open_meta(folder), folder.parent.parent
    stores: dict[str, Documents] = {}

    def load(side: str, index: int, record: dict[str, Any]) -> PackedSet:
        for key in record["stores"]:
            if key not in stores:
                stores[key] = open_documents(root / "documents" / key)
        return PackedSet.load(
            folder,
            f"{side}-{index}",
            name=record["name"],
            seq_len=facts["seq_len"],
            pad_id=facts["pad_id"],
            stores=[stores[key] for key in record["stores"]],
            stats=PackStats(**record["stats"]),
        )

    train = [load("train", i, record) for i, record in enumerate(facts["train"])]
    validation = [load("validation", i, record) for i, record in enumerate(facts["validation"])]
    return Prepared(
        Mixture(train, facts["weights"]), {one.name: one for one in validation}, folder, root / "tokenizers" / facts["tokenizer"]
    )


@dataclass(frozen=True)
class _Set:
    path: str
    split: str
    format: str
    columns: dict[str, str]


@dataclass(frozen=True)
class _Job:
    """What decides the rows of a run, once everything is tokenised."""

    config: DataConfig
    seed: int
    sets: list[_Set]
    weights: list[float] | None
    stores: list[Documents]
    held: dict[str, Documents]
    tokenizer: str
    pad_id: int
    where: Callable[[str], str]

    @property
    def share(self) -> float:
        return self.config.validation if isinstance(self.config.validation, float) else 0.0

    def key(self) -> str:
        train = [[one.path, store.folder.name] for one, store in zip(self.sets, self.stores, strict=True)]
        held = [[name, store.folder.name] for name, store in self.held.items()]
        return digest(
            [
                _VERSION,
                train,
                held,
                self.weights,
                self.share,
                self.seed,
                self.config.seq_len,
                self.config.long,
                self.pad_id,
                self.tokenizer,
            ]
        )

    def pack(self, folder: Path) -> dict[str, Any]:
        """Write the rows of every set into ``folder``."""
        names = [one.path for one in self.sets]
        sides = [
            hold_out(store, self.share, self.seed, i, name, self.where)
            for i, (name, store) in enumerate(zip(names, self.stores, strict=True))
        ]
        train = [self._packed(name, [side[0]]) for name, side in zip(names, sides, strict=True)]
        _check_weights(train, self.weights, self.where)
        validation = [self._packed(name, [everything(store)]) for name, store in self.held.items()]
        if self.share:
            validation.append(self._packed("validation", [side[1] for side in sides]))
        facts: dict[str, Any] = {
            "seq_len": self.config.seq_len,
            "pad_id": self.pad_id,
            "weights": self.weights,
            "tokenizer": self.tokenizer,
        }
        for group, packed_sets in (("train", train), ("validation", validation)):
            facts[group] = []
            for i, one in enumerate(packed_sets):
                one.save(folder, f"{group}-{i}")
                facts[group].append(
                    {"name": one.name, "stores": [store.folder.name for store in one.stores], "stats": one.stats.to_json()}
                )
        return facts

    def _packed(self, name: str, spans: Sequence[Span]) -> PackedSet:
        seq_len, long = self.config.seq_len, self.config.long
        pieces = join([span.cut(seq_len, long, i) for i, span in enumerate(spans)])
        packed = pack(name, seq_len, self.pad_id, [span.store for span in spans], pieces)
        if not packed.stats.num_targets:
            shortest = min(int(span.lengths.min()) for span in spans if len(span.lengths))
            raise UsageError(
                f"no token to train on is left in `{name}` at seq_len {seq_len:,}",
                where=self.where("data.seq_len"),
                why=f"of its conversations, all too long, the shortest has {shortest:,} tokens",
                hints=[
                    "raise `data.seq_len`",
                    *(["`--set data.long=truncate` keeps their beginnings"] if long == "drop" else []),
                ],
            )
        return packed


def _validation_paths(config: DataConfig) -> dict[str, str]:
    if isinstance(config.validation, str):
        return {"validation": config.validation}
    return config.validation if isinstance(config.validation, dict) else {}


def _train_sets(config: DataConfig, where: Callable[[str], str]) -> tuple[list[_Set], list[float] | None]:
    """The training sets with what they inherit, and their weights if any has one."""
    given = [config.train] if isinstance(config.train, str) else list(config.train)
    sets: list[_Set] = []
    weights: list[float | None] = []
    for one in given:
        if isinstance(one, str):
            sets.append(_Set(one, "train", config.format, dict(config.columns)))
            weights.append(None)
        else:
            columns = config.columns if one.columns is None else one.columns
            sets.append(_Set(one.path, one.split, one.format or config.format, dict(columns)))
            weights.append(one.weight)
    without = [s.path for s, w in zip(sets, weights, strict=True) if w is None]
    if len(without) == len(sets):
        return sets, None
    if without:
        raise UsageError(
            f"{len(sets) - len(without)} of {len(sets)} training sets have a weight",
            where=where("data.train"),
            why=f"`{without[0]}` has none",
            hints=["give every set a `weight`, or none: then every row comes once an epoch"],
        )
    return sets, [float(w) for w in weights if w is not None]


def _check_weights(train: list[PackedSet], weights: list[float] | None, where: Callable[[str], str]) -> None:
    if weights is None:
        return
    total = sum(s.num_rows for s in train)
    for one, count, weight in zip(train, split(total, weights), weights, strict=True):
        if not count:
            raise UsageError(
                f"weight {weight:g} of `{one.name}` is less than one row in an epoch of {total:,}",
                where=where("data.train"),
                hints=["raise its weight, or leave the set out"],
            )


def _keep_tokenizer(tokenizer: Any, root: Path) -> Path:
    """The tokenizer's files in the cache, in a folder named by their digest."""
    with tempfile.TemporaryDirectory() as name:
        saved = Path(name)
        tokenizer.save_pretrained(saved)

        def copy(aside: Path) -> dict[str, Any]:
            shutil.copytree(saved, aside, dirs_exist_ok=True)
            return {}

        final = root / "tokenizers" / _identity(saved)
        publish(final, copy)
    return final


def _identity(saved: Path) -> str:
    """Digest of a saved tokenizer, without the notes on where it was loaded from."""
    config = json.loads((saved / "tokenizer_config.json").read_text("utf-8"))
    rest = [[p.name, file_digest(p)] for p in sorted(saved.iterdir()) if p.is_file() and p.name != "tokenizer_config.json"]
    return digest([{key: value for key, value in config.items() if key not in _NOTES}, rest])


def _pad_id(tokenizer: Any, vocab_size: int) -> int:
    """An id the model knows; what it is does not matter, since no document sees padding and no target lies there."""
    known = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None and i < vocab_size]
    return known[0] if known else 0
