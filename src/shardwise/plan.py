"""The plan: what was asked, every layout that can be built with its bytes, and the one chosen. Frozen, JSON in and out, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .layout import Layout
from .spec import digest

SCHEMA = 1


@dataclass(frozen=True)
class Phase:
    """The worst moment of one part of a run.

    Attributes:
        rows: ``spec.ROWS`` that are not zero; they sum to ``device_bytes``.
    """

    device_bytes: int
    host_bytes: int
    rows: dict[str, int]


@dataclass(frozen=True)
class Candidate:
    """One layout that can be built, and what it costs the fullest rank.

    Attributes:
        missing_bytes: By how much it does not fit, 0 where it fits.
        peak_reserved_bytes: ``(low, high)``.
        rows: At the peak; all of ``spec.ROWS``.
        recomputed_flops, moved_bytes: A rank's, in one optimizer step; what candidates are ordered by.
        why: What sets it apart from the next one, in a sentence; only the chosen one has it.
    """

    layout: Layout
    fits: bool
    missing_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: tuple[int, int]
    device_total_bytes: int
    peak_phase: str
    rows: dict[str, int]
    phases: dict[str, Phase]
    disk_bytes: int
    recomputed_flops: float
    moved_bytes: int
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        low, high = self.peak_reserved_bytes
        return {**asdict(self), "layout": self.layout.to_json(), "peak_reserved_bytes": {"low": low, "high": high}}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Candidate:
        reserved = record["peak_reserved_bytes"]
        return Candidate(
            **{
                **record,
                "layout": Layout.from_json(record["layout"]),
                "peak_reserved_bytes": (reserved["low"], reserved["high"]),
                "phases": {name: Phase(**phase) for name, phase in record["phases"].items()},
            }
        )


@dataclass(frozen=True)
class Plan:
    """Schema 1.

    Attributes:
        model: ``name``, ``num_params``.
        cluster: ``spec.Cluster`` with ``world_size``.
        workload: ``global_batch``, ``seq_len``, ``precision``, ``reduce_dtype``, ``margin``.
        candidates: Best first; ``chosen`` is the first that fits.
        refused: Layouts that cannot be built: ``layout`` (the keys that make it so) and ``reason``.
        nearest: The candidate that misses by least where none fits, else None.
        of: Digest of the model's shapes, cluster and workload this was made from.
    """

    model: dict[str, Any]
    cluster: dict[str, Any]
    workload: dict[str, Any]
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    refused: tuple[dict[str, Any], ...]
    nearest: Candidate | None
    of: str

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "of": self.of,
            "model": self.model,
            "cluster": self.cluster,
            "workload": self.workload,
            "chosen": self.chosen.to_json(),
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "refused": list(self.refused),
            "nearest": self.nearest.to_json() if self.nearest else None,
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Plan:
        """Raises ValueError or KeyError where the schema is another or a key is missing."""
        if record.get("schema") != SCHEMA:
            raise ValueError(f"plan schema {record.get('schema')}, this version reads {SCHEMA}")
        return Plan(
            record["model"],
            record["cluster"],
            record["workload"],
            Candidate.from_json(record["chosen"]),
            tuple(map(Candidate.from_json, record["candidates"])),
            tuple(record["refused"]),
            Candidate.from_json(record["nearest"]) if record["nearest"] else None,
            record["of"],
        )
