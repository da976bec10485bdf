"""Settings classes with the defaults and help texts that the command line and the docs show.

Imports only `data`, and no heavy packages.
"""

from hdtool.runtime.config.building import MAX_HEADS, BuildConfig, HeadsConfig, TrainConfig
from hdtool.runtime.config.decoding import (
    FIXED_BUDGET,
    HOME,
    LARGEST_BUDGET,
    MEMORY,
    METHODS,
    NEED_LOGITS,
    NEED_MODEL,
    SOURCE_LETTERS,
    SOURCE_NAMES,
    TAKE_HEADS,
    TAKE_TREE,
    TRAINED,
    DecodeConfig,
    GrammarConfig,
    PaperConfig,
    RecordingConfig,
    ReplayConfig,
    StoresConfig,
    VerifyConfig,
)
from hdtool.runtime.config.measuring import (
    COLD,
    LLAMA_CPP,
    OTHER_FILE,
    PEERS,
    SHAPE_PEERS,
    SHAPES,
    WARM,
    WITHOUT_GRAMMARS,
    BenchConfig,
    CostConfig,
    ServerConfig,
    ShapeConfig,
    VllmConfig,
)
from hdtool.runtime.config.model import LOWEST_TEMPERATURE, ModelConfig, SamplingConfig
