"""From the run file's ``data:`` to rows of tokens, the same on every rank.

sources     which files, globs or hub ids are meant, and their records
columns     which columns of a record hold text, prompt or conversation
chat        conversation -> tokens, with those of the assistant marked
documents   a whole set tokenised once, on disk, memory-mapped
pack        documents -> rows of seq_len, pure arithmetic
packed      rows as arrays: Batch, PackedSet, Mixture
order       which rows make which step: a pure function
prepared    all of the above for one run, behind one cache folder
tokenizer   the tokenizer loaded, or a byte-level BPE trained
sample      one packed row as text
cache       names, digests and publishing of cached folders
"""

from __future__ import annotations

from .cache import cache_folder
from .order import Order
from .packed import Batch, Mixture, PackedSet, PackStats
from .prepared import Prepared, check_positions, open_prepared, prepare
from .sample import preview
from .tokenizer import load_tokenizer

__all__ = [
    "Batch",
    "Mixture",
    "Order",
    "PackStats",
    "PackedSet",
    "Prepared",
    "cache_folder",
    "check_positions",
    "load_tokenizer",
    "open_prepared",
    "prepare",
    "preview",
]
