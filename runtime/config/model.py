"""Which model answers, and how its next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.config.checks import require

DEVICES = ("auto", "cpu", "cuda", "mps")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""How transformers spreads a model over the GPUs of a machine."""
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
QUANTIZATIONS = ("int8", "nf4")
"""Weight-only quantizations on loading; activations are not quantized."""
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
    """CPU threads of torch; None means the fastest number, by a short measurement."""
    device_map: str | None = None
    """How the model is spread over all GPUs; None places it on one device."""
    quantization: str | None = None
    """Weight quantization on loading; None keeps the weights of the checkpoint."""
    generation_config: str | None = None
    """A file of generation settings in place of the model's own, or "none" for the library's defaults."""

    def __post_init__(self) -> None:
        maps = self.device_map is None or self.device_map in DEVICE_MAPS
        require(maps, "device-map", self.device_map, f"one of {', '.join(DEVICE_MAPS)}")
        known = self.quantization is None or self.quantization in QUANTIZATIONS
        require(known, "quantization", self.quantization, f"one of {', '.join(QUANTIZATIONS)}")
        alone = self.device_map is None or self.device == "auto"
        require(alone, "device", self.device, "left out with --device-map, which chooses the devices")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "1 or more")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. None follows the model's own generation settings."""

    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Temperatures this close to 0 would overflow; they are greedy."""
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
        require(0 <= self.seed < 2**64, "seed", self.seed, "between 0 and 2**64 - 1")
