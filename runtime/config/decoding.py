"""Settings of decoding, of the stores, of verification and of replay."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.data.errors import OptionError
from hdtool.runtime.config.checks import require
from hdtool.runtime.config.methods import (
    ALL_LETTERS,
    HIERARCHIES,
    HISTORY_LETTER,
    LARGEST_BUDGET,
    METHODS,
    NEED_LOGITS,
    SOURCE_LETTERS,
    SOURCE_NAMES,
    STORE_LETTERS,
    source_letters,
)

TREES = ("dynamic", "static")


@dataclass(frozen=True)
class DecodeConfig:
    """How answers are decoded and drafted."""

    method: str = "hd"
    max_new_tokens: int = 256
    draft_tokens: int | None = None
    """Most draft tokens per step. None chooses their number by the measured time of forward passes."""
    use: str = ALL_LETTERS
    """Sources of ``hd``, ``hd-paper``, ``hd+logitspec`` and ``hd+amphista``: letters, or names with commas,
    kept as letters."""
    order: str = SOURCE_LETTERS
    """Order in which ``hd-paper`` queries the stores: letters or names."""
    lookahead: bool = True
    """Whether ``hd-paper`` fills its context table by lookahead decoding."""
    batch_size: int = 1
    """Prompts answered in one batch."""
    heads: tuple[str, ...] = ()
    """Folders of trained heads; empty means those shipped with the demo model."""
    history_prompts: bool = False
    """Whether the history holds prompts as well as answers."""
    tree: str = "dynamic"
    """Draft tree of heads: the most probable paths of each step, or the fixed tree chosen at training."""

    def __post_init__(self) -> None:
        require(self.method in METHODS, "method", self.method, f"one of {', '.join(METHODS)}")
        require(self.max_new_tokens >= 1, "max-new-tokens", self.max_new_tokens, "1 or more")
        _require_draft_tokens(self.draft_tokens)
        require(self.batch_size >= 1, "batch-size", self.batch_size, "1 or more")
        require(self.tree in TREES, "tree", self.tree, f"one of {', '.join(TREES)}")
        object.__setattr__(self, "use", source_letters("sources", self.use, ALL_LETTERS))
        method = METHODS[self.method]
        known = method.databases + HISTORY_LETTER * method.history + method.logits
        names = ", ".join(SOURCE_NAMES[letter] for letter in known)
        require(bool(self.sources) or not known, "sources", self.use, f"sources of method {self.method}: {names}")
        object.__setattr__(self, "order", source_letters("order", self.order, SOURCE_LETTERS))
        require(len(self.order) == len(SOURCE_LETTERS), "order", self.order, f"all of {SOURCE_LETTERS}, in any order")

    @property
    def databases(self) -> str:
        """Letters of the stores and the context that are drafted from; a method with one source always uses it."""
        all_of_them = METHODS[self.method].databases
        return "".join(letter for letter in all_of_them if letter in self.use or len(all_of_them) == 1)

    @property
    def sources(self) -> str:
        """Letters of all sources that are drafted from, logits and plug-ins included."""
        method = METHODS[self.method]
        history = HISTORY_LETTER if method.history and HISTORY_LETTER in self.use else ""
        logits = "".join(letter for letter in method.logits if letter in self.use)
        plugins = [letter for letter in self.use if letter not in SOURCE_NAMES and self.method in HIERARCHIES]
        return self.databases + history + logits + "".join(plugins)


@dataclass(frozen=True)
class StoresConfig:
    """Stores to draft from: a folder, ``none``, or None for those in hdtool's home that fit the tokenizer."""

    model_db: str | None = None
    corpus_db: str | None = None
    namespace: str | None = None
    """Tenant: its model store or none is used, and its corpus index before the common one."""


@dataclass(frozen=True)
class VerifyConfig:
    """How much is decoded to check losslessness."""

    limit: int = 20
    """Most prompts."""
    max_new_tokens: int = 128
    """Most tokens of each answer."""

    def __post_init__(self) -> None:
        require(self.limit >= 1, "num-prompts", self.limit, "1 or more")
        require(self.max_new_tokens >= 1, "max-new-tokens", self.max_new_tokens, "1 or more")


@dataclass(frozen=True)
class ReplayConfig:
    """Drafting on recorded conversations, without the model."""

    methods: tuple[str, ...] = ()
    """Empty means all that need no logits and find their stores."""
    draft_tokens: int | None = None
    """Most draft tokens per step of ``hd`` and ``rest``; None means 32, or by cost where that of passes is given."""
    use: str = STORE_LETTERS
    order: str = DecodeConfig.order
    limit: int | None = None
    """Number of conversations, from the start of the recordings."""
    workers: int | None = None
    """Worker processes; None means one per core for large recordings."""

    def __post_init__(self) -> None:
        for method in self.methods:
            if method in NEED_LOGITS:
                raise OptionError(
                    f"method {method} cannot be replayed: it drafts from the model's logits, which recordings lack; "
                    f"run the model, as in hdtool generate --method {method} --stats"
                )
            if self.methods.count(method) > 1:
                raise OptionError(f"method {method} is given twice: name each method once")
            self.decoding(method)
        _require_draft_tokens(self.draft_tokens)
        object.__setattr__(self, "use", source_letters("sources", self.use, STORE_LETTERS))
        object.__setattr__(self, "order", source_letters("order", self.order, SOURCE_LETTERS))
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more")
        require(self.workers is None or self.workers >= 1, "workers", self.workers, "1 or more")

    def methods_with(self, *, corpus: bool) -> tuple[str, ...]:
        """The chosen methods, or all that can be replayed."""
        left_out = ("ar", *NEED_LOGITS, *(() if corpus else ("rest",)))
        return self.methods or tuple(method for method in METHODS if method not in left_out)

    def decoding(self, method: str) -> DecodeConfig:
        """Settings of a method, as far as they have an effect without the model."""
        return DecodeConfig(
            method=method, draft_tokens=self.draft_tokens, use=self.use, order=self.order, lookahead=False
        )


@dataclass(frozen=True)
class PaperConfig:
    """Hierarchy Drafting as in its paper."""

    order: str = SOURCE_LETTERS
    """The databases in use, each asked when those before it have brought too little: the (C)ontext table,
    the (M)odel store, the corpus index (S)."""
    sequences: int = 7
    """Drafted in each step, and kept for each token by the context table."""
    lookahead: bool = True
    """Whether the model guesses ahead of itself in the same forward pass."""
    window: int = 7
    """Columns of the lookahead branch: the sequences that it closes in each step."""

    def __post_init__(self) -> None:
        source_letters("order", self.order, SOURCE_LETTERS)
        require(1 <= self.sequences <= 9, "sequences", self.sequences, "between 1 and 9")
        require(1 <= self.window <= 9, "window", self.window, "between 1 and 9")


def _require_draft_tokens(given: int | None) -> None:
    require(given is None or 0 <= given <= LARGEST_BUDGET, "draft-tokens", given, f"between 0 and {LARGEST_BUDGET}")
