"""Which model answers, and how its next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.config.checks import require

DEVICES = ("auto", "cpu", "cuda", "mps")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""How transformers spreads a model over the GPUs of a machine."""
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
QUANTISATIONS = ("int8", "nf4")
"""How weights can be quantised on loading. Activations are left alone, so that nothing more is rounded."""
LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class ModelConfig:
    """Which model answers, and where."""

    model: str | None = None
    """A folder or a hub name; none means the embedded demo model."""
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    threads: int | None = None
    """That torch computes with on a CPU; None means as many as are fastest, by a short measurement."""
    device_map: str | None = None
    """How the model is spread over all GPUs; none means that it lies on one device."""
    quantise: str | None = None
    """How the weights are quantised on loading; none means that they stay as the checkpoint has them."""

    generation_config: str | None = None
    """A file of generation settings in place of the model's own, or "none" for the library's defaults."""

    def __post_init__(self) -> None:
        maps = self.device_map is None or self.device_map in DEVICE_MAPS
        require(maps, "device-map", self.device_map, f"one of {', '.join(DEVICE_MAPS)}")
        known = self.quantise is None or self.quantise in QUANTISATIONS
        require(known, "quantise", self.quantise, f"one of {', '.join(QUANTISATIONS)}")
        alone = self.device_map is None or self.device == "auto"
        require(alone, "device", self.device, "left out with device-map, which chooses the devices")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "1 or more")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. What is None follows the model's own generation settings."""

    temperature: float = 0.0
    """0 takes the likeliest token; the higher, the wilder."""
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """A temperature next to nothing leaves only the likeliest token, but overflows on the way."""
        return self.temperature < LOWEST_TEMPERATURE

    def __post_init__(self) -> None:
        require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 (greedy) or more")
        require(self.top_k is None or self.top_k >= 0, "top-k", self.top_k, "0 (all tokens) or more")
        require(self.top_p is None or 0 < self.top_p <= 1, "top-p", self.top_p, "above 0 and at most 1")
        require(
            self.repetition_penalty is None or self.repetition_penalty > 0,
            "repetition-penalty",
            self.repetition_penalty,
            "above 0 (1 changes nothing)",
        )
        require(0 <= self.seed < 2**64, "seed", self.seed, "from 0 to 2**64 - 1")
