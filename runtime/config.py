"""Settings of the runtime; each default lives here and nowhere else.

The command line and the docs read them from these classes, so nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hdtool.data.errors import OptionError

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
PEERS = {
    "generate": "transformers' own model.generate",
    "generate-pld": "the same with its prompt lookup",
    "generate-assisted": "the same with a draft model",
}
"""What the methods are measured against, on the same model and device."""
SOURCE_LETTERS = "CMS"
"""Of the three databases, as ``order`` and ``use`` name them: context table, model store, corpus index."""
LOGIT_LETTERS = "LKR"
"""Of the sources that listen to the model's logits: the last logit, copied logits, recycled logits."""


class Method(NamedTuple):
    """A way of drafting."""

    description: str
    databases: str
    """The letters of those that it draws on; C is the conversation, however it is looked through."""
    logits: str = ""
    """The letters of what it takes from the model's logits."""


METHODS = {
    "ar": Method("plain decoding, nothing is drafted", ""),
    "pld": Method("prompt lookup: what followed the last words where they stood before", "C"),
    "lade": Method("lookahead decoding: guesses refined beside the answer", "C"),
    "rest": Method("the corpus index alone", "S"),
    "hd-paper": Method("Hierarchy Drafting as its paper has it", SOURCE_LETTERS),
    "hd": Method("context table, model store and corpus index, the likeliest paths of all three", SOURCE_LETTERS),
    "logitspec": Method(
        "LogitSpec: the likeliest of the last logit, and what followed each in the conversation", "C", "L"
    ),
    "hd+logitspec": Method(
        "hd and what the model's own logits say, in one tree: the last ones, copied and recycled ones",
        SOURCE_LETTERS,
        LOGIT_LETTERS,
    ),
}
SHAPE_PEERS = {
    "generate": PEERS["generate"],
    "generate-static": "the same with a static cache, which it compiles on GPUs",
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
"""Sizes of models by their names: Vicuna-7B and Llama-2-7B are llama-7b."""
LARGEST_BUDGET = 64
"""Nodes that go into one forward pass at most, the root aside."""
FIXED_BUDGET = 32
"""Nodes a step where there is nothing to choose their number by."""
LOWEST_TEMPERATURE = 1e-5
NEED_LOGITS = ("lade", *(name for name, method in METHODS.items() if method.logits))
"""Methods that draft from what the model computes, not from what it says alone."""


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

    def __post_init__(self) -> None:
        _require(self.threads is None or self.threads >= 1, "threads", self.threads, "1 or more")
        _require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")


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
        _require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 (greedy) or more")
        _require(self.top_k is None or self.top_k >= 0, "top-k", self.top_k, "0 (all tokens) or more")
        _require(self.top_p is None or 0 < self.top_p <= 1, "top-p", self.top_p, "above 0 and at most 1")
        _require(
            self.repetition_penalty is None or self.repetition_penalty > 0,
            "repetition-penalty",
            self.repetition_penalty,
            "above 0 (1 changes nothing)",
        )
        _require(0 <= self.seed < 2**64, "seed", self.seed, "from 0 to 2**64 - 1")


@dataclass(frozen=True)
class DecodeConfig:
    """What is decoded, how far and by which method."""

    method: str = "hd"
    max_new_tokens: int = 256
    budget: int | None = None
    """Draft nodes a step at most; none means as many as pay, by what forward passes of each size take here."""
    use: str = SOURCE_LETTERS + "LR"
    """Of the sources that ``hd``, ``hd-paper`` and ``hd+logitspec`` know, those that they draft from. Copied logits
    are left out: beside recycled ones they bring nothing."""
    order: str = SOURCE_LETTERS
    """In which ``hd-paper`` asks them."""
    lookahead: bool = True
    """Whether ``hd-paper`` feeds its context table by lookahead."""
    batch_size: int = 1
    """Prompts that are answered at once, where there are several."""

    def __post_init__(self) -> None:
        _require(self.method in METHODS, "method", self.method, f"one of {', '.join(METHODS)}")
        _require(self.max_new_tokens >= 1, "max-new-tokens", self.max_new_tokens, "1 or more")
        largest = LARGEST_BUDGET
        _require(self.budget is None or 0 <= self.budget <= largest, "budget", self.budget, f"from 0 to {largest}")
        _require(self.batch_size >= 1, "batch-size", self.batch_size, "1 or more")
        _require_letters("use", self.use, SOURCE_LETTERS + LOGIT_LETTERS)
        known = METHODS[self.method].databases + METHODS[self.method].logits
        given = f"{self.use} with method {self.method}"
        _require(bool(self.sources) or not known, "use", given, f"letters of which some are in {known}")
        _require(sorted(self.order) == sorted(SOURCE_LETTERS), "order", self.order, f"{SOURCE_LETTERS} in any order")

    @property
    def databases(self) -> str:
        """The letters of those that are drafted from; where there is one alone, there is nothing to choose."""
        all_of_them = METHODS[self.method].databases
        return "".join(letter for letter in all_of_them if letter in self.use or len(all_of_them) == 1)

    @property
    def sources(self) -> str:
        """The letters of all that is drafted from, logits included."""
        return self.databases + "".join(letter for letter in METHODS[self.method].logits if letter in self.use)


@dataclass(frozen=True)
class VerifyConfig:
    """How much is decoded to see that nothing is lost."""

    limit: int = 20
    """Prompts at most."""
    max_new_tokens: int = 128
    """Of each answer."""

    def __post_init__(self) -> None:
        _require(self.limit >= 1, "limit", self.limit, "1 or more")
        _require(self.max_new_tokens >= 1, "max-new-tokens", self.max_new_tokens, "1 or more")


@dataclass(frozen=True)
class ReplayConfig:
    """What is drafted again from recorded conversations, without the model."""

    methods: tuple[str, ...] = ()
    """None means all that need no logits and find their stores."""
    budget: int | None = None
    """Draft nodes a step of ``hd`` and ``rest``; None means 32, or as many as pay where the cost of passes is known."""
    use: str = SOURCE_LETTERS
    order: str = DecodeConfig.order
    limit: int | None = None
    """Conversations at most, the first ones."""
    workers: int | None = None
    """Processes; None means one for each core, if there is enough to do for them."""

    def __post_init__(self) -> None:
        for method in self.methods:
            if method in NEED_LOGITS:
                raise OptionError(
                    f"method {method} cannot be replayed: it drafts from the model's logits, and recorded text has "
                    f"none; run the model itself, as in hdtool generate --method {method} --stats"
                )
            if self.methods.count(method) > 1:
                raise OptionError(f"method {method} is given twice: name each method once")
            self.decoding(method)
        self.decoding(DecodeConfig.method)
        _require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more")
        _require(self.workers is None or self.workers >= 1, "workers", self.workers, "1 or more")

    def methods_with(self, *, corpus: bool) -> tuple[str, ...]:
        """The methods, or those that can be replayed with or without a corpus index."""
        left_out = ("ar", *NEED_LOGITS, *(() if corpus else ("rest",)))
        return self.methods or tuple(method for method in METHODS if method not in left_out)

    def decoding(self, method: str) -> DecodeConfig:
        """The settings of a method, as far as they mean something without the model."""
        return DecodeConfig(method, budget=self.budget, use=self.use, order=self.order, lookahead=False)


@dataclass(frozen=True)
class BenchConfig:
    """What is measured, how often, and where the results go."""

    methods: tuple[str, ...] | None = None
    """None means all that can run: `generate-assisted` needs an assistant, `rest` a corpus index."""
    baseline: str | None = None
    """What the others are compared with; None means `generate`, or the first method without it."""
    assistant: str | None = None
    """The draft model of `generate-assisted`: a folder or a hub name."""
    limit: int | None = None
    """Questions at most, of all categories in turn; None means all of them."""
    rounds: int = 1
    """How often each question is asked; of several rounds the one of median speed counts."""
    warm_up: int = 2
    """Questions of different categories that are asked before, and not counted."""
    threads: int | None = None
    """That torch computes with; None leaves it to torch."""
    out: str = "bench"
    """The folder of the results."""

    def __post_init__(self) -> None:
        self._check_methods()
        _require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more")
        _require(self.rounds >= 1, "rounds", self.rounds, "1 or more")
        _require(self.warm_up >= 0, "warm-up", self.warm_up, "0 or more")
        _require(self.threads is None or self.threads >= 1, "threads", self.threads, "1 or more")

    def _check_methods(self) -> None:
        known = (*PEERS, *METHODS)
        chosen = self.methods if self.methods is not None else known
        for method in chosen:
            _require(method in known, "methods", method, f"names out of {', '.join(known)}, with commas between them")
        told = ",".join(chosen) or "empty"
        _require(0 < len(chosen) == len(set(chosen)), "methods", told, "each method at most once")
        assisted = "generate-assisted" in chosen
        _require(self.assistant is None or assisted, "assistant", self.assistant, "left out without generate-assisted")
        needed = assisted and self.methods is not None
        _require(self.assistant is not None or not needed, "assistant", None, "a draft model for generate-assisted")
        fits = self.baseline is None or self.baseline in chosen
        _require(fits, "baseline", self.baseline, f"one of {', '.join(chosen)}")

    def chosen(self, *, has_corpus: bool) -> tuple[str, ...]:
        """The methods to measure."""
        if self.methods is not None:
            return self.methods
        lacking = {"generate-assisted": self.assistant is None, "rest": not has_corpus}
        return tuple(method for method in (*PEERS, *METHODS) if not lacking.get(method))


@dataclass(frozen=True)
class ShapeConfig:
    """What is timed on a model of some shape, whose weights are random."""

    shape: str
    """One of the known ones, or the path of a config.json."""
    methods: tuple[str, ...] = (*SHAPE_PEERS, "ar", "hd")
    limit: int | None = None
    """Conversations at most, the first ones."""

    def __post_init__(self) -> None:
        known = (*SHAPE_PEERS, *METHODS)
        for method in self.methods:
            _require(method in known, "methods", method, f"names out of {', '.join(known)}, with commas between them")
            drafts_from_logits = method in NEED_LOGITS
            _require(not drafts_from_logits, "methods", method, "one that needs no logits: those of a shape are random")
        told = ",".join(self.methods) or "empty"
        _require(0 < len(self.methods) == len(set(self.methods)), "methods", told, "each method at most once")
        _require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more")


@dataclass(frozen=True)
class CostConfig:
    """Behind which contexts forward passes are timed."""

    contexts: tuple[int, ...] | None = None
    """Their lengths, the last token included; None means the powers of two that the model takes."""
    shortest: int = 64
    longest: int = 8192
    """Of the powers of two."""

    def __post_init__(self) -> None:
        for length in self.contexts or ():
            _require(length >= 2, "contexts", length, "lengths of 2 tokens or more")
        _require(self.contexts is None or len(self.contexts) > 0, "contexts", "empty", "lengths, as in 128,1024")


@dataclass(frozen=True)
class ShelfConfig:
    """Which stores are drafted from: a folder, ``none``, or, if None, whatever fits the model's tokenizer."""

    model_db: str | None = None
    corpus_db: str | None = None
    namespace: str | None = None
    """Whose stores: with one, the model store is the tenant's own or none, and its own corpus index comes first."""


@dataclass(frozen=True)
class ServeConfig:
    """How requests are drafted for inside a serving engine."""

    draft_tokens: int = 8
    """Of each request in a step, at most."""
    worth: float | None = None
    """From which odds on a draft is sent; None means those that pay, by what the engine's passes take."""
    context_mib: int = 256
    """For the context tables of requests; those that find no place are not drafted for."""

    def __post_init__(self) -> None:
        largest = LARGEST_BUDGET
        _require(1 <= self.draft_tokens <= largest, "draft-tokens", self.draft_tokens, f"from 1 to {largest}")
        fits = self.worth is None or 0 < self.worth <= 1
        _require(fits, "worth", self.worth, "above 0 and at most 1")
        _require(self.context_mib >= 1, "context-mib", self.context_mib, "1 or more")


@dataclass(frozen=True)
class PaperConfig:
    """Hierarchy Drafting as its paper has it."""

    order: str = SOURCE_LETTERS
    """The databases in use, each asked when those before it have brought too little: the (C)ontext table,
    the (M)odel store, the corpus index (S)."""
    sequences: int = 7
    """Drafted in each step, and kept for each token by the context table."""
    lookahead: bool = True
    """Whether the model guesses ahead of itself in the same forward pass."""
    window: int = 7
    """Columns of the lookahead branch: the sequences that it closes in each step."""
    discarded: bool = False
    """Whether the context table also learns what the model says after drafts that it turned down. These push
    out sequences that were really said: on the demo's prompts fewer drafts are accepted with them."""

    def __post_init__(self) -> None:
        _require_letters("order", self.order, SOURCE_LETTERS)
        _require(1 <= self.sequences <= 9, "sequences", self.sequences, "from 1 to 9")
        _require(1 <= self.window <= 9, "window", self.window, "from 1 to 9")


@dataclass(frozen=True)
class BuildConfig:
    """How stores are built."""

    tolerate: float = 0.05
    """The share of records that may be unusable before a build gives up."""
    shard_bytes: int = 1 << 29
    """Of tokens in a shard of the corpus index. Sorting takes about seven times as much memory, for each
    shard that is sorted at once; a look-up takes the longer the more shards there are."""
    workers: int | None = None
    """Shards sorted at once; none means one for each core."""
    top_k: int = 100_000
    """Sequences that the model store keeps of each length."""
    per_key: int = 12
    """Continuations that it keeps for each prefix."""

    def __post_init__(self) -> None:
        _require(0 <= self.tolerate <= 1, "tolerate", self.tolerate, "from 0 to 1")
        _require(16 <= self.shard_bytes <= 1 << 30, "shard bytes", self.shard_bytes, "from 16 to 2**30")
        _require(self.workers is None or self.workers >= 1, "workers", self.workers, "1 or more")
        _require(self.top_k >= 1, "top-k", self.top_k, "1 or more")
        _require(self.per_key >= 1, "per-key", self.per_key, "1 or more")


def _require_letters(name: str, found: str, known: str) -> None:
    letters = set(found)
    fits = bool(letters) and letters <= set(known) and len(letters) == len(found)
    _require(fits, name, found or "empty", f"letters of {known}, each at most once")


def _require(holds: bool, name: str, found: object, expected: str) -> None:
    if not holds:
        raise OptionError(f"{name} is {found}: it must be {expected}")
