"""What is decoded, from which stores; decoded to verify, or drafted again from recorded conversations."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.data.errors import OptionError
from hdtool.runtime.config.checks import require, require_letters
from hdtool.runtime.config.methods import LARGEST_BUDGET, LOGIT_LETTERS, METHODS, NEED_LOGITS, SOURCE_LETTERS

TREES = ("dynamic", "static")


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
    heads: tuple[str, ...] = ()
    """Folders of trained heads; none means those that are shipped with the model."""
    tree: str = "dynamic"
    """Of heads: the likeliest paths of each step, or the fixed tree that was chosen when they were trained."""

    def __post_init__(self) -> None:
        require(self.method in METHODS, "method", self.method, f"one of {', '.join(METHODS)}")
        require(self.max_new_tokens >= 1, "max-new-tokens", self.max_new_tokens, "1 or more")
        largest = LARGEST_BUDGET
        require(self.budget is None or 0 <= self.budget <= largest, "budget", self.budget, f"from 0 to {largest}")
        require(self.batch_size >= 1, "batch-size", self.batch_size, "1 or more")
        require_letters("use", self.use, SOURCE_LETTERS + LOGIT_LETTERS)
        known = METHODS[self.method].databases + METHODS[self.method].logits
        given = f"{self.use} with method {self.method}"
        require(bool(self.sources) or not known, "use", given, f"letters of which some are in {known}")
        require(self.tree in TREES, "tree", self.tree, f"one of {', '.join(TREES)}")
        require(sorted(self.order) == sorted(SOURCE_LETTERS), "order", self.order, f"{SOURCE_LETTERS} in any order")

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
class StoresConfig:
    """Which stores are drafted from: a folder, ``none``, or, if None, whatever fits the model's tokenizer."""

    model_db: str | None = None
    corpus_db: str | None = None
    namespace: str | None = None
    """Whose stores: with one, the model store is the tenant's own or none, and its own corpus index comes first."""


@dataclass(frozen=True)
class VerifyConfig:
    """How much is decoded to see that nothing is lost."""

    limit: int = 20
    """Prompts at most."""
    max_new_tokens: int = 128
    """Of each answer."""

    def __post_init__(self) -> None:
        require(self.limit >= 1, "limit", self.limit, "1 or more")
        require(self.max_new_tokens >= 1, "max-new-tokens", self.max_new_tokens, "1 or more")


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
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more")
        require(self.workers is None or self.workers >= 1, "workers", self.workers, "1 or more")

    def methods_with(self, *, corpus: bool) -> tuple[str, ...]:
        """The methods, or those that can be replayed with or without a corpus index."""
        left_out = ("ar", *NEED_LOGITS, *(() if corpus else ("rest",)))
        return self.methods or tuple(method for method in METHODS if method not in left_out)

    def decoding(self, method: str) -> DecodeConfig:
        """The settings of a method, as far as they mean something without the model."""
        return DecodeConfig(method, budget=self.budget, use=self.use, order=self.order, lookahead=False)


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
        require_letters("order", self.order, SOURCE_LETTERS)
        require(1 <= self.sequences <= 9, "sequences", self.sequences, "from 1 to 9")
        require(1 <= self.window <= 9, "window", self.window, "from 1 to 9")
