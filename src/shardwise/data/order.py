"""Which rows make which step: a pure function of seed, epoch and position, the same for every world size.

Without weights an epoch is every row exactly once, shuffled anew each epoch. With weights an epoch has as many rows as all sets
together; set i gives its share of them, taken from an endless stream of seeded passes over its rows, so that over the epochs
none of its rows is favoured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
_PASS, _EPOCH = 1, 2  # keep the two kinds of shuffles apart


class Order:
    """The order of rows over a whole run.

    Args:
        sizes: Rows of each set; row ids number all sets one after the other.
        weights: Shares of an epoch, any positive scale; None for every row once.
        global_batch: Rows a step.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None, seed: int, global_batch: int) -> None:
        assert sizes and all(size > 0 for size in sizes) and global_batch > 0, "every set has rows"
        assert weights is None or (len(weights) == len(sizes) and all(w > 0 for w in weights)), "one positive weight a set"
        self.sizes, self.seed, self.global_batch = list(sizes), seed, global_batch
        self.num_rows = sum(sizes)
        self.counts = list(sizes) if weights is None else split(self.num_rows, weights)
        self.steps_per_epoch = -(-self.num_rows // global_batch)
        self._epoch, self._ids = -1, np.empty(0, np.int64)

    def step_ids(self, step: int) -> IntArray:
        """Row ids of the 0-based global step, ``[global_batch]``; -1 fills up the last step of an epoch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._ids = epoch, self.epoch_ids(epoch)
        ids = self._ids[position * self.global_batch : (position + 1) * self.global_batch]
        return np.pad(ids, (0, self.global_batch - len(ids)), constant_values=-1)

    def epoch_ids(self, epoch: int) -> IntArray:
        """All row ids of one epoch in order, ``[num_rows]``."""
        starts = np.cumsum([0, *self.sizes])
        drawn = [
            start + self._stream(i, epoch * count, count)
            for i, (start, count) in enumerate(zip(starts, self.counts, strict=False))
        ]
        return _shuffler(self.seed, _EPOCH, epoch).permutation(np.concatenate(drawn))

    def _stream(self, index: int, begin: int, count: int) -> IntArray:
        """``count`` rows of set ``index`` from place ``begin`` of its endless stream of shuffled passes."""
        size = self.sizes[index]
        first, last = begin // size, -(-(begin + count) // size)
        passes = [_shuffler(self.seed, _PASS, index, number).permutation(size) for number in range(first, last)]
        return np.concatenate([np.empty(0, np.int64), *passes])[begin - first * size :][:count]


def split(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` cut in whole numbers by weight, each at most 1 off its share, the largest remainders rounded up."""
    shares = [total * w / sum(weights) for w in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _shuffler(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
