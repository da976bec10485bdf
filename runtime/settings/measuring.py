"""Settings of benchmarks and cost curves, with the peers and model shapes that they know by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hdtool.runtime.settings.decoding import METHODS, NEED_LOGITS, TRAINED
from hdtool.runtime.settings.settings_base import Panel, Settings, rare_setting, require, setting

PEERS = {
    "generate": "transformers' own model.generate",
    "generate-pld": "model.generate with prompt lookup",
    "generate-assisted": "model.generate with a draft model",
    "llama.cpp": "llama.cpp on the model's GGUF file",
    "llama.cpp-pld": "llama.cpp with its prompt lookup",
    "llama.cpp-file": "llama.cpp on another GGUF file of the model",
}
"""Alternatives to hdtool that bench runs on the same model and device."""
OTHER_FILE = "llama.cpp-file"
LLAMA_CPP = ("llama.cpp", "llama.cpp-pld", OTHER_FILE)
WITHOUT_GRAMMARS = ("generate-pld", "generate-assisted", *LLAMA_CPP)
"""Peers that can't follow hdtool's grammars: transformers doesn't constrain drafts, llama.cpp has its own grammars."""
SHAPE_PEERS = {
    "generate": PEERS["generate"],
    "generate-static": "model.generate with a static cache, which it compiles on GPUs",
}
SHAPE_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(zip(SHAPE_SIZES, (64, 172, 2, 4, 2, 1024, 2048), strict=True)),
    "llama-7b": dict(zip(SHAPE_SIZES, (4096, 11008, 32, 32, 32, 32000, 4096), strict=True)),
    "llama-3-8b": dict(zip(SHAPE_SIZES, (4096, 14336, 32, 32, 8, 128256, 8192), strict=True)),
}
"""Model sizes by shape name; Vicuna-7B and Llama-2-7B have the shape llama-7b."""


CONTENDERS = (*METHODS, *PEERS)
COLD, WARM = "cold", "warm"


@dataclass(frozen=True)
class BenchConfig(Settings, panel=Panel.MEASUREMENT):
    """What ``bench`` measures, how often, and where it writes results."""

    methods: tuple[str, ...] | None = setting(
        None,
        f"Methods, with commas. Any of {', '.join(CONTENDERS)}. Default: all that can run.",
        values=CONTENDERS,
        panel=Panel.DRAFTING,
    )
    """None selects all methods that can run: `generate-assisted` needs a draft model, `rest` a corpus index, and
    llama.cpp needs llama-cpp-python and a GGUF file (the model's, or `llama_cpp_file` for `llama.cpp-file`)."""
    peers: bool = setting(False, "Add the peers that can run. They are generate and llama.cpp.", panel=Panel.DRAFTING)
    baseline: str | None = rare_setting(
        None, "Method that speed-ups are relative to. Default: generate, else the first method.", values=CONTENDERS
    )
    assistant: str | None = rare_setting(None, "Draft model of generate-assisted: a folder or a hub name.")
    llama_cpp_file: str | None = rare_setting(
        None, "GGUF file of llama.cpp-file: the same model in a quantization that llama.cpp computes faster, as Q4_0."
    )
    limit: int | None = setting(
        None,
        "Number of questions. Round-robin over the categories. Default: all.",
        option="num_prompts",
        alias="limit",
        min_value=1,
        panel=Panel.INPUT,
    )
    per_task: int | None = rare_setting(
        None,
        "Number of questions of each task: a category, or all of MT-bench. Not with --num-prompts.",
        option="num_prompts_per_task",
        min_value=1,
        panel=Panel.INPUT,
    )
    rounds: int = rare_setting(1, "Runs of each question; the run of median speed counts.", min_value=1)
    warm_up: int = rare_setting(2, "Other questions, answered before the measurement and not counted.", min_value=0)
    drafters: str = rare_setting(
        COLD,
        f"{COLD}: a fresh drafter for each question; {WARM}: a drafter keeps the history and the weights of the "
        "questions before.",
        option="memory",
        alias="drafters",
        values=(COLD, WARM),
    )
    threads: int | None = setting(
        None,
        "CPU threads of every method. Default: as many as suit transformers' generate.",
        min_value=1,
        panel=Panel.MODEL,
    )
    out: str = "bench"
    """Folder for results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = (*PEERS, *METHODS)
        named = self.methods if self.methods is not None else known
        _require_methods(named, known)
        chosen = (*named, *(PEERS if self.peers else ()))
        unused = self.assistant is not None and "generate-assisted" not in chosen
        require(not unused, "assistant", self.assistant, "left out without the method generate-assisted")
        needed = self.methods is not None and "generate-assisted" in self.methods
        require(self.assistant is not None or not needed, "assistant", None, "a draft model for generate-assisted")
        unused = self.llama_cpp_file is not None and OTHER_FILE not in chosen
        require(not unused, "llama-cpp-file", self.llama_cpp_file, f"left out without the method {OTHER_FILE}")
        needed = self.methods is not None and OTHER_FILE in self.methods
        expected = f"another GGUF file of the model for {OTHER_FILE}"
        require(self.llama_cpp_file is not None or not needed, "llama-cpp-file", None, expected)
        require(self.drafters in (COLD, WARM), "memory", self.drafters, f"{COLD} or {WARM}", (COLD, WARM))
        is_one_limit = self.limit is None or self.per_task is None
        require(is_one_limit, "num_prompts_per_task", self.per_task, "left out with --num-prompts")
        fits = self.baseline is None or self.baseline in chosen
        require(fits, "baseline", self.baseline, f"one of {', '.join(dict.fromkeys(chosen))}", chosen)

    def chosen(
        self,
        *,
        has_corpus: bool,
        trained: Collection[str] = (),
        llama_cpp: Collection[str] = (),
        grammars: bool = False,
    ) -> tuple[str, ...]:
        """Return the names of the ``PEERS`` and methods to measure.

        ``trained`` lists methods whose trained drafter is available, ``llama_cpp`` the llama.cpp peers that can run;
        ``grammars`` excludes peers that can't follow a grammar.
        """
        lacking = {"generate-assisted": self.assistant is None, "rest": not has_corpus}
        lacking |= {method: method not in trained for method in TRAINED}
        lacking |= {method: method not in llama_cpp for method in LLAMA_CPP}
        if grammars:
            lacking |= dict.fromkeys(WITHOUT_GRAMMARS, True)
        peers = tuple(peer for peer in PEERS if not lacking.get(peer))
        if self.methods is None:
            return (*peers, *(method for method in METHODS if not lacking.get(method)))
        return (*(peer for peer in peers if self.peers and peer not in self.methods), *self.methods)


SHAPE_METHODS = (*SHAPE_PEERS, "ar", "hd")
SHAPED = (*SHAPE_PEERS, *(method for method in METHODS if method not in NEED_LOGITS))


@dataclass(frozen=True)
class ShapeConfig(Settings, panel=Panel.MEASUREMENT):
    """What ``bench-shape`` times on a model with a given shape and random weights."""

    shape: str
    """Name of a known shape, or path of a config.json."""
    methods: tuple[str, ...] = setting(
        SHAPE_METHODS,
        f"Methods, with commas. Any of {', '.join(SHAPED)}. Default: {', '.join(SHAPE_METHODS)}.",
        values=SHAPED,
    )
    limit: int | None = setting(
        None, "Number of conversations, from the start of the file.", min_value=1, panel=Panel.INPUT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_methods(self.methods, (*SHAPE_PEERS, *METHODS))
        for method in self.methods:
            fits = method not in NEED_LOGITS
            require(fits, "methods", method, "methods that need no logits (those of a shape are random)")


COST_FILE = "cost.json"
"""Name of a cost curve's file in the folders that ``bench-cost`` and ``setup`` write."""


@dataclass(frozen=True)
class CostConfig(Settings, panel=Panel.MEASUREMENT):
    """Context lengths of a cost curve, and the device's speed if pass times are estimated instead of measured."""

    contexts: tuple[int, ...] | None = None
    """Context lengths in tokens; None means the powers of two from ``shortest`` to ``longest`` that fit the model."""
    shortest: int = 64
    longest: int = 8192
    """Upper limit of the default context lengths."""
    bandwidth: float | None = rare_setting(
        None,
        "Estimate passes of --shape instead of timing them: gigabytes of weights, keys and values that a device reads "
        "in a second.",
    )
    teraflops: float | None = rare_setting(
        None, "With --bandwidth: what the device computes in a second. Default: computing takes no time."
    )
    overlap: float = rare_setting(
        0.0,
        "With --bandwidth, for mixtures of experts: the share, from 0 to 1, by which the tokens of a pass activate "
        "fewer experts than independent ones would.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("bandwidth", self.bandwidth), ("teraflops", self.teraflops)):
            require(value is None or 0 < value < float("inf"), name, value, "above 0")
        require(0 <= self.overlap <= 1, "overlap", self.overlap, "from 0 to 1")
        for name, value in (("teraflops", self.teraflops), ("overlap", self.overlap)):
            require(not value or self.bandwidth is not None, name, value, "left out without --bandwidth")
        for length in self.contexts or ():
            require(length >= 2, "contexts", length, "lengths of 2 tokens or more")
        require(self.contexts is None or len(self.contexts) > 0, "contexts", "empty", "lengths, as in 128,1024")


def _require_methods(chosen: Collection[str], known: Collection[str]) -> None:
    for method in chosen:
        require(method in known, "methods", method, f"names from {', '.join(known)}, separated by commas", known)
    once = 0 < len(chosen) == len(set(chosen))
    require(once, "methods", ",".join(chosen) or "empty", "each method at most once")
