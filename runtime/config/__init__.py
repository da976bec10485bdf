"""Settings and their defaults, which the command line and the docs read from here.

Imports `data` and nothing heavy.
"""

from hdtool.runtime.config.building import BuildConfig
from hdtool.runtime.config.decoding import (
    HOME,
    MEMORY,
    DecodeConfig,
    PaperConfig,
    RecordingConfig,
    ReplayConfig,
    StoresConfig,
    VerifyConfig,
)
from hdtool.runtime.config.grammar import GrammarConfig
from hdtool.runtime.config.heads import MOST_HEADS, HeadsConfig, TrainConfig
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
    ShapeConfig,
)
from hdtool.runtime.config.methods import (
    FIXED_BUDGET,
    LARGEST_BUDGET,
    METHODS,
    NEED_LOGITS,
    NEED_MODEL,
    OPTION_METHODS,
    SOURCE_LETTERS,
    SOURCE_NAMES,
    TAKE_HEADS,
    TRAINED,
)
from hdtool.runtime.config.model import LOWEST_TEMPERATURE, ModelConfig, SamplingConfig
from hdtool.runtime.config.serving import ServerConfig, VllmConfig
