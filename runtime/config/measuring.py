"""Settings of the benchmarks: answers, shapes of models, and the cost of forward passes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hdtool.runtime.config.checks import require
from hdtool.runtime.config.methods import METHODS, NEED_HEADS, NEED_LOGITS

PEERS = {
    "generate": "transformers' own model.generate",
    "generate-pld": "model.generate with prompt lookup",
    "generate-assisted": "model.generate with a draft model",
}
"""Baselines of transformers, on the same model and device."""
SHAPE_PEERS = {
    "generate": PEERS["generate"],
    "generate-static": "model.generate with a static cache, which it compiles on GPUs",
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 2048,
    },
    "llama-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
}
"""Model shapes by name; Vicuna-7B and Llama-2-7B have the shape llama-7b."""


@dataclass(frozen=True)
class BenchConfig:
    """What is measured, how often, and where the results go."""

    methods: tuple[str, ...] | None = None
    """None means all that can run: `generate-assisted` needs a draft model, `rest` a corpus index."""
    baseline: str | None = None
    """Method that speed-ups are relative to; None means `generate`, else the first method."""
    assistant: str | None = None
    """The draft model of `generate-assisted`: a folder or a hub name."""
    limit: int | None = None
    """Number of questions, round-robin over the categories; None means all."""
    rounds: int = 1
    """Runs of each question; the run of median speed counts."""
    warm_up: int = 2
    """Questions answered before the measurement, not counted."""
    threads: int | None = None
    """CPU threads of torch; None keeps torch's own setting."""
    out: str = "bench"
    """The folder of the results."""

    def __post_init__(self) -> None:
        self._check_methods()
        require(self.limit is None or self.limit >= 1, "num-prompts", self.limit, "1 or more")
        require(self.rounds >= 1, "rounds", self.rounds, "1 or more")
        require(self.warm_up >= 0, "warm-up", self.warm_up, "0 or more")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "1 or more")

    def _check_methods(self) -> None:
        known = (*PEERS, *METHODS)
        chosen = self.methods if self.methods is not None else known
        for method in chosen:
            require(method in known, "methods", method, f"names from {', '.join(known)}, separated by commas")
        shown = ",".join(chosen) or "empty"
        require(0 < len(chosen) == len(set(chosen)), "methods", shown, "each method at most once")
        assisted = "generate-assisted" in chosen
        require(
            self.assistant is None or assisted,
            "assistant",
            self.assistant,
            "left out without the method generate-assisted",
        )
        needed = assisted and self.methods is not None
        require(self.assistant is not None or not needed, "assistant", None, "a draft model for generate-assisted")
        fits = self.baseline is None or self.baseline in chosen
        require(fits, "baseline", self.baseline, f"one of {', '.join(chosen)}")

    def chosen(self, *, has_corpus: bool, heads: Collection[str] = ()) -> tuple[str, ...]:
        """The methods to measure; ``heads`` are those that there are trained heads for."""
        if self.methods is not None:
            return self.methods
        lacking = {"generate-assisted": self.assistant is None, "rest": not has_corpus}
        lacking |= {method: method not in heads for method in NEED_HEADS}
        return tuple(method for method in (*PEERS, *METHODS) if not lacking.get(method))


@dataclass(frozen=True)
class ShapeConfig:
    """What is timed on a model of a shape with random weights."""

    shape: str
    """A known shape, or the path of a config.json."""
    methods: tuple[str, ...] = (*SHAPE_PEERS, "ar", "hd")
    limit: int | None = None
    """Number of conversations, from the start of the file."""

    def __post_init__(self) -> None:
        known = (*SHAPE_PEERS, *METHODS)
        for method in self.methods:
            require(method in known, "methods", method, f"names from {', '.join(known)}, separated by commas")
            drafts_from_logits = method in NEED_LOGITS
            require(
                not drafts_from_logits, "methods", method, "methods that need no logits (those of a shape are random)"
            )
        shown = ",".join(self.methods) or "empty"
        require(0 < len(self.methods) == len(set(self.methods)), "methods", shown, "each method at most once")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more")


@dataclass(frozen=True)
class CostConfig:
    """Context lengths at which forward passes are timed."""

    contexts: tuple[int, ...] | None = None
    """Context lengths in tokens; None means the powers of two that fit the model."""
    shortest: int = 64
    longest: int = 8192
    """Longest of the powers of two."""

    def __post_init__(self) -> None:
        for length in self.contexts or ():
            require(length >= 2, "contexts", length, "lengths of 2 tokens or more")
        require(self.contexts is None or len(self.contexts) > 0, "contexts", "empty", "lengths, as in 128,1024")
