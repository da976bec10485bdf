"""Settings and their defaults, which the command line and the docs read from here.

Imports `data` and nothing heavy.
"""

from hdtool.runtime.config.building import ENGINES, BuildConfig
from hdtool.runtime.config.decoding import TREES, DecodeConfig, PaperConfig, ReplayConfig, StoresConfig, VerifyConfig
from hdtool.runtime.config.heads import MOST_HEADS, HeadsConfig, TrainConfig
from hdtool.runtime.config.measuring import PEERS, SHAPE_PEERS, SHAPES, BenchConfig, CostConfig, ShapeConfig
from hdtool.runtime.config.methods import (
    FIXED_BUDGET,
    LARGEST_BUDGET,
    LOGIT_LETTERS,
    METHODS,
    NEED_HEADS,
    NEED_LOGITS,
    OPTION_METHODS,
    SOURCE_LETTERS,
    SOURCE_NAMES,
    Method,
)
from hdtool.runtime.config.model import (
    DEVICE_MAPS,
    DEVICES,
    DTYPES,
    LOWEST_TEMPERATURE,
    QUANTIZATIONS,
    ModelConfig,
    SamplingConfig,
)
from hdtool.runtime.config.serving import ServeConfig

__all__ = [
    "DEVICES",
    "DEVICE_MAPS",
    "DTYPES",
    "ENGINES",
    "FIXED_BUDGET",
    "LARGEST_BUDGET",
    "LOGIT_LETTERS",
    "LOWEST_TEMPERATURE",
    "METHODS",
    "MOST_HEADS",
    "NEED_HEADS",
    "NEED_LOGITS",
    "OPTION_METHODS",
    "PEERS",
    "QUANTIZATIONS",
    "SHAPES",
    "SHAPE_PEERS",
    "SOURCE_LETTERS",
    "SOURCE_NAMES",
    "TREES",
    "BenchConfig",
    "BuildConfig",
    "CostConfig",
    "DecodeConfig",
    "HeadsConfig",
    "Method",
    "ModelConfig",
    "PaperConfig",
    "ReplayConfig",
    "SamplingConfig",
    "ServeConfig",
    "ShapeConfig",
    "StoresConfig",
    "TrainConfig",
    "VerifyConfig",
]
