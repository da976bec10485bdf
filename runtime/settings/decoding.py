"""Drafting methods, and the settings for decoding, stores, structured output, verification and replay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hdtool.data.errors import OptionError
from hdtool.data.prompts import Grammar, GrammarKind, read_grammar
from hdtool.runtime.settings.draft_sources import (
    ALL_LETTERS,
    HISTORY_LETTER,
    LOGIT_LETTERS,
    SOURCE_LETTERS,
    SOURCE_NAMES,
    STORE_LETTERS,
    plugins,
)
from hdtool.runtime.settings.draft_token_limits import FIXED_BUDGET, LARGEST_BUDGET
from hdtool.runtime.settings.settings_base import Panel, Settings, Use, rare_setting, require, setting


class Method(NamedTuple):
    """A drafting method and what it drafts from."""

    description: str
    sources: str = ""
    """Letters of the sources that the method drafts from; C is the conversation, however matches are found in it."""
    trained: str = ""
    """Kind of trained drafter that the method needs; empty if none."""


HEADS_DRAFTER, MTP_DRAFTER, DRAFT_MODEL = "heads", "mtp", "drafter"
"""Kinds of trained drafters: heads from ``train-heads``, multi-token-prediction layers from ``train-heads`` or the
checkpoint, and a separate draft model."""

METHODS = {
    "ar": Method("plain decoding"),
    "pld": Method("prompt lookup decoding", "C"),
    "lade": Method("lookahead decoding", "C"),
    "sam": Method("SAM-Decoding: the longest match in the conversation", "C"),
    "suffix": Method("SuffixDecoding: frequent continuations in the conversation and earlier answers", "CH"),
    "rest": Method("the corpus index alone (REST)", "S"),
    "hd-paper": Method("Hierarchy Drafting as in its paper", "CMS"),
    "medusa": Method("trained Medusa heads", trained=HEADS_DRAFTER),
    "amphista": Method("trained Amphista heads", trained=HEADS_DRAFTER),
    "hydra": Method("trained Hydra or Hydra++ heads", trained=HEADS_DRAFTER),
    "mtp": Method("multi-token-prediction layers of the checkpoint, or a trained one", trained=MTP_DRAFTER),
    "drafter": Method("a draft model: speculative decoding with --drafter", trained=DRAFT_MODEL),
    "hd": Method("context table, history, model store and corpus index in one tree", "CMSH"),
    "logitspec": Method("LogitSpec: last-token logits extended by prompt lookup", "CL"),
    "tr": Method("Token Recycling: a static tree over the rankings of all verified tokens", "HR"),
    "racer": Method("RACER: retrieved n-grams and rankings of all verified tokens", "CHR"),
    "hd+logitspec": Method("hd with last-token logits and recycled rankings", "CMSHLR"),
    "hd+amphista": Method("hd with trained Amphista heads", "CMSH", HEADS_DRAFTER),
    "hd+hydra": Method("hd with trained Hydra or Hydra++ heads", "CMSH", HEADS_DRAFTER),
    "hd+mtp": Method("hd with multi-token-prediction layers", "CMSH", MTP_DRAFTER),
    "hd+drafter": Method("hd with a draft model", "CMSH", DRAFT_MODEL),
}


def methods_with(letters: str) -> tuple[str, ...]:
    """Return the methods that draft from at least one of the sources with these letters."""
    return tuple(name for name, method in METHODS.items() if {*letters} & {*method.sources})


HIERARCHIES = ("hd", *(name for name in METHODS if name.startswith("hd+")))
"""Method ``hd`` and its extensions, which also draft from plug-ins."""
TRAINED = tuple(name for name, method in METHODS.items() if method.trained)
TAKE_HEADS = tuple(name for name in TRAINED if METHODS[name].trained in (HEADS_DRAFTER, MTP_DRAFTER))
"""Methods that draft with what ``train-heads`` produces."""
NEED_MODEL = ("lade", *TRAINED)
"""Methods that run the model or a trained drafter to draft."""
READ_LOGITS = methods_with(LOGIT_LETTERS)
NEED_LOGITS = (*NEED_MODEL, *READ_LOGITS)
"""Methods that need the model's logits or run the model; all other methods need only tokens."""
TAKE_BUDGET = tuple(name for name in METHODS if name not in ("ar", "lade", "hd-paper"))
TAKE_SOURCES = ("hd-paper", *HIERARCHIES)
TAKE_TREE = ("medusa", "amphista")
TAKE_HISTORY = methods_with(HISTORY_LETTER)


def source_letters(option: str, given: str, known: str) -> str:
    """Return the source letters of an option's value, which is a string of letters or a comma-separated list of names.

    Raise OptionError if it names no source, an unknown one or one twice. The option ``sources`` also accepts plug-ins.
    """
    by_name = {SOURCE_NAMES[letter]: letter for letter in known}
    letters = _letters(given, by_name)
    if option == "sources" and not set(letters) <= set(known):
        by_name |= {source.name: source.letter for source in plugins().values()}
        letters, known = _letters(given, by_name), "".join(by_name.values())
    fits = bool(letters) and set(letters) <= set(known) and len(set(letters)) == len(letters)
    expected = f"names from {', '.join(by_name)}, or letters of {known}, each once at most"
    require(fits, option, given or "nothing", expected, by_name)
    return letters


def _letters(given: str, by_name: dict[str, str]) -> str:
    return "".join(by_name.get(part.strip(), part.strip()) for part in given.split(","))


@dataclass(frozen=True)
class GrammarConfig(Settings, panel=Panel.STRUCTURE):
    """Constraint on all answers (structured output); at most one of the fields is set."""

    json_schema: Path | None = rare_setting(None, "File with a JSON schema that answers must follow.")
    regex: str | None = rare_setting(None, "Regular expression that answers must match as a whole.")
    grammar: Path | None = rare_setting(None, "File with a grammar for answers, in Lark's notation or in GBNF.")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [kind for kind in GrammarKind if getattr(self, kind.value) is not None]
        if len(given) > 1:
            names = " and ".join(f"--{kind.value.replace('_', '-')}" for kind in given)
            raise OptionError(f"{names} exclude each other: give one of them")

    def read(self) -> Grammar | None:
        """Return the grammar, or None for free text; raise PromptError if it cannot be read or is invalid."""
        if self.regex is not None:
            return Grammar.regex(self.regex)
        for kind in (GrammarKind.JSON_SCHEMA, GrammarKind.GRAMMAR):
            if path := getattr(self, kind.value):
                return read_grammar(kind, path)
        return None


TREES = ("dynamic", "static")
MEMORY, HOME, NO_HISTORY = "memory", "home", "none"
HISTORIES = (MEMORY, HOME, NO_HISTORY)
HISTORY_HELP = (
    f"Earlier answers to draft from. {MEMORY}: those of this process; a folder: those of a history store, which "
    f"lasts; {HOME}: those of such a store in hdtool's home; or {NO_HISTORY}."
)
STORE_SOURCES = tuple(SOURCE_NAMES[letter] for letter in SOURCE_LETTERS)
REPLAYED_SOURCES = tuple(SOURCE_NAMES[letter] for letter in STORE_LETTERS)
MAX_RECORDED_RANKINGS = 64
ORDER = "Order in which hd-paper queries its sources: names or letters."


@dataclass(frozen=True)
class DecodeConfig(Settings, panel=Panel.DRAFTING):
    """How answers are drafted and decoded."""

    method: str = setting("hd", "Drafting method; --help-all lists all.", choices=METHODS)
    max_new_tokens: int = setting(256, "Maximum tokens in an answer.", min_value=1, panel=Panel.SAMPLING)
    draft_tokens: int | None = rare_setting(
        None,
        f"Maximum number of draft tokens per step, 0 to {LARGEST_BUDGET}. Default: by the measured time of passes.",
        min_value=0,
        max_value=LARGEST_BUDGET,
        use=Use(methods=TAKE_BUDGET),
    )
    sources: str = rare_setting(
        ALL_LETTERS,
        f"Sources to draft from, with commas: {', '.join(SOURCE_NAMES.values())}; or their letters "
        f"{''.join(SOURCE_NAMES)}. A method ignores those that it does not have.",
        values=SOURCE_NAMES.values(),
        use=Use(methods=TAKE_SOURCES),
    )
    """Stored as letters; names are converted."""
    order: str = rare_setting(SOURCE_LETTERS, ORDER, values=STORE_SOURCES, use=Use(methods=("hd-paper",)))
    lookahead: bool = rare_setting(
        True, "Fill the context table of hd-paper by lookahead decoding.", use=Use(methods=("hd-paper",))
    )
    batch_size: int = setting(
        1,
        "Prompts answered in one batch. Continuous batching; above 1 without streaming.",
        min_value=1,
        panel=Panel.SAMPLING,
    )
    prefix_caching: bool = rare_setting(
        True,
        "Keep the KV cache of the last answer: a prompt is read from where it differs from that conversation.",
        panel=Panel.SAMPLING,
    )
    heads: tuple[str, ...] = rare_setting(
        (),
        "Folder of trained heads, repeatable for several kinds. Default: those of the demo model.",
        use=Use(methods=TAKE_HEADS),
    )
    drafter: str | None = rare_setting(
        None,
        "Folder or name of the draft model of methods drafter and hd+drafter: EAGLE-3, DFlash or DSpark for this "
        "model, or a small model with this tokenizer.",
        use=Use(methods=tuple(name for name in TRAINED if METHODS[name].trained == DRAFT_MODEL)),
    )
    history: str = setting(MEMORY, HISTORY_HELP, values=HISTORIES, use=Use(methods=TAKE_HISTORY))
    history_prompts: bool = rare_setting(
        False,
        "Keep prompts in the history as well as answers.",
        use=Use(
            methods=HIERARCHIES,
            no_effect=lambda given: given["history"] == NO_HISTORY and f"with --history {NO_HISTORY}",
        ),
    )
    tree: str = rare_setting(
        "dynamic",
        "Draft tree of medusa and amphista: dynamic, the most probable paths of each step, or static, as trained.",
        choices=TREES,
        use=Use(methods=TAKE_TREE),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sources", source_letters("sources", self.sources, ALL_LETTERS))
        method = METHODS[self.method]
        require(
            bool(self.drafter) or (self.drafter is None and method.trained != DRAFT_MODEL),
            "drafter",
            self.drafter or "nothing",
            f"the folder or name of a draft model with method {self.method}",
        )
        in_memory = (
            self.method in HIERARCHIES or self.method not in TAKE_HISTORY or self.history in (MEMORY, NO_HISTORY)
        )
        require(in_memory, "history", self.history, f"{MEMORY} or {NO_HISTORY} with method {self.method}")
        names = ", ".join(SOURCE_NAMES[letter] for letter in method.sources)
        require(
            bool(self.drafts_from or not names), "sources", self.sources, f"sources of method {self.method}: {names}"
        )
        object.__setattr__(self, "order", source_letters("order", self.order, SOURCE_LETTERS))
        require(len(self.order) == len(SOURCE_LETTERS), "order", self.order, f"all of {SOURCE_LETTERS}, in any order")

    @property
    def trained(self) -> str:
        """Kind of trained drafter that the method needs; empty if none."""
        return METHODS[self.method].trained

    @property
    def identifies_tokenizer(self) -> bool:
        """True if a history on disk or a draft model requires the tokenizer to be identified, even without stores."""
        return self.keeps_history or self.drafter is not None

    @property
    def has_history(self) -> bool:
        """True if earlier answers are drafted from."""
        return HISTORY_LETTER in self.drafts_from

    @property
    def keeps_history(self) -> bool:
        """True if the history is kept on disk."""
        return self.has_history and self.history != MEMORY

    @property
    def databases(self) -> str:
        """Letters of the method's databases that ``sources`` selects; if the method has only one, it is always used."""
        all_of_them = [letter for letter in METHODS[self.method].sources if letter in SOURCE_LETTERS]
        return "".join(letter for letter in all_of_them if letter in self.sources or len(all_of_them) == 1)

    @property
    def drafts_from(self) -> str:
        """Letters of all sources to draft from: databases, history, sources that read logits, and plug-ins."""
        plugins = "".join(letter for letter in self.sources if letter not in SOURCE_NAMES)
        known = METHODS[self.method].sources + (plugins if self.method in HIERARCHIES else "")
        without = HISTORY_LETTER if self.history == NO_HISTORY else ""
        return "".join(each for each in known if each in self.databases or (each in self.sources and each != without))


@dataclass(frozen=True)
class RecordingConfig(Settings, panel=Panel.OUTPUT):
    """What ``collect`` records in addition to the answers."""

    rankings: int = rare_setting(
        0,
        "Record so many of the model's best tokens at each position, for replays of methods that read logits; "
        "logitspec reads 61.",
        min_value=0,
        max_value=MAX_RECORDED_RANKINGS,
    )


@dataclass(frozen=True)
class StoresConfig(Settings, panel=Panel.DRAFTING):
    """Stores to draft from, by folder or name; ``none`` for no store, None for the matching one in hdtool's home."""

    model_db: str | None = setting(
        None,
        "Folder or name of a model store, or none. Default: that of this model in hdtool's home.",
        use=Use(methods=methods_with("M")),
    )
    corpus_db: str | None = setting(
        None,
        "Folder or name of a corpus index, or none. Default: that of this tokenizer in hdtool's home.",
        use=Use(methods=methods_with("S")),
    )
    namespace: str | None = rare_setting(
        None,
        "Namespace of the stores. Default: the tenant of the API key, or in vLLM the served model name, if it has "
        "stores.",
    )
    """Only this namespace's model store is used, if any; its corpus index takes precedence over the common index."""


@dataclass(frozen=True)
class VerifyConfig(Settings, panel=Panel.INPUT):
    """How many prompts and tokens are decoded to check losslessness."""

    limit: int = setting(
        20, "Number of prompts, from the start of the file.", option="num_prompts", alias="limit", min_value=1
    )
    max_new_tokens: int = setting(128, "Maximum tokens in each answer.", min_value=1)


REPLAYED = tuple(method for method in METHODS if method not in NEED_MODEL)


@dataclass(frozen=True)
class ReplayConfig(Settings, panel=Panel.DRAFTING):
    """How drafting is replayed on recorded conversations, without the model."""

    methods: tuple[str, ...] = setting(
        (), f"Methods, with commas. Any of {', '.join(REPLAYED)}. Default: all that find their stores.", values=REPLAYED
    )
    draft_tokens: int | None = setting(
        None,
        f"Maximum number of draft tokens per step, 0 to {LARGEST_BUDGET}. Default: {FIXED_BUDGET}, or chosen by "
        "--cost.",
        min_value=0,
        max_value=LARGEST_BUDGET,
        use=Use(methods=TAKE_BUDGET),
    )
    sources: str = rare_setting(
        STORE_LETTERS,
        f"Sources of hd and hd-paper, with commas: {', '.join(REPLAYED_SOURCES)}; or letters.",
        values=REPLAYED_SOURCES,
        use=Use(methods=TAKE_SOURCES),
    )
    order: str = rare_setting(SOURCE_LETTERS, ORDER, values=STORE_SOURCES, use=Use(methods=("hd-paper",)))
    history: bool = rare_setting(
        True,
        "Draft from the answers of earlier conversations, in the order of the recordings, or forget them.",
        use=Use(methods=TAKE_HISTORY),
    )
    limit: int | None = setting(None, "Number of conversations, from the start.", min_value=1, panel=Panel.INPUT)
    workers: int | None = rare_setting(
        None, "Worker processes. Default: one per core for large recordings.", min_value=1, panel=Panel.MEASUREMENT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sources", source_letters("sources", self.sources, STORE_LETTERS))
        for method in self.methods:
            if method in NEED_MODEL:
                raise OptionError(
                    f"method {method} cannot be replayed: it computes with the model; "
                    f"run the model, as in hdtool generate --method {method} --stats"
                )
            if self.methods.count(method) > 1:
                raise OptionError(f"method {method} is given twice: name each method once")
            self.decoding(method)
        object.__setattr__(self, "order", source_letters("order", self.order, SOURCE_LETTERS))

    def methods_with(self, *, corpus: bool, rankings: bool = False) -> tuple[str, ...]:
        """Return the chosen methods; if none are chosen, all that can be replayed, except ``ar``.

        ``corpus`` is True if there is a corpus index, ``rankings`` if the recordings contain rankings.
        """
        left_out = ("ar", *(NEED_MODEL if rankings else NEED_LOGITS), *(() if corpus else ("rest",)))
        return self.methods or tuple(method for method in METHODS if method not in left_out)

    def decoding(self, method: str) -> DecodeConfig:
        """Return the decoding settings with which a method is replayed."""
        return DecodeConfig(
            method=method,
            draft_tokens=self.draft_tokens,
            sources=self.sources + LOGIT_LETTERS,
            order=self.order,
            lookahead=False,
            history=MEMORY if self.history else NO_HISTORY,
        )


@dataclass(frozen=True)
class PaperConfig:
    """Settings of Hierarchy Drafting as in its paper (arXiv:2502.05609)."""

    order: str = SOURCE_LETTERS
    """Databases to query, in order: the (C)ontext table, the (M)odel store, the corpus index (S). Each is queried only
    if the previous ones found too few sequences."""
    sequences: int = 7
    """Maximum number of sequences drafted per step, and kept per token in the context table."""
    lookahead: bool = True
    """True if each forward pass also runs a lookahead branch, which generates n-grams for the context table."""
    window: int = 7
    """Number of columns of the lookahead branch, each of which completes one sequence per step."""

    def __post_init__(self) -> None:
        source_letters("order", self.order, SOURCE_LETTERS)
        require(1 <= self.sequences <= 9, "sequences", self.sequences, "between 1 and 9")
        require(1 <= self.window <= 9, "window", self.window, "between 1 and 9")
