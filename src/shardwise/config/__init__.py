"""The run file as types, with what each key means and costs. Imports no torch."""

from __future__ import annotations

from .keys import (
    COLUMNS,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    DataSetConfig,
    EarlyStop,
    LayoutConfig,
    ModelFactory,
    ModelShape,
    OptimizerConfig,
    RunConfig,
    Section,
    TrainBPE,
)
from .reference import reference_page

__all__ = [
    "COLUMNS",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "DataSetConfig",
    "EarlyStop",
    "LayoutConfig",
    "ModelFactory",
    "ModelShape",
    "OptimizerConfig",
    "RunConfig",
    "Section",
    "TrainBPE",
    "reference_page",
]
