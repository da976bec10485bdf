"""The methods by their names: one line makes a drafter known to every command."""

from __future__ import annotations

from collections.abc import Callable
from sys import stderr
from threading import Timer

import torch

from hdtool.data.errors import StoreError
from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget import Budget, FixedBudget, MeasuredBudget
from hdtool.runtime.config import LARGEST_BUDGET, DecodeConfig, PaperConfig
from hdtool.runtime.drafter import Drafter, NoDraft
from hdtool.runtime.hierarchy import Hierarchy
from hdtool.runtime.paper import PaperDrafter
from hdtool.runtime.shelf import Shelf
from hdtool.runtime.sources.corpus import CorpusDrafter
from hdtool.runtime.sources.prompt_lookup import PromptLookup
from hdtool.runtime.target import Target

PATIENCE = 2.0
"""Seconds after which a user is told what takes so long."""

FEW_TOKENS = 7
"""As many as drafting in vain takes."""

BudgetMaker = Callable[[], Budget]
Maker = Callable[[DecodeConfig, Shelf, BudgetMaker], Drafter]


def drafter_for(config: DecodeConfig, target: Target, shelf: Shelf) -> Drafter:
    """The drafter of a method; it may be kept for as long as the target, and learns over conversations."""

    def budget() -> Budget:
        return MeasuredBudget(target) if config.budget is None else FixedBudget(config.budget)

    return drafter_within(budget, config, shelf, target.config.vocab_size)


def drafter_within(budget: BudgetMaker, config: DecodeConfig, shelf: Shelf, vocabulary: int = FEW_TOKENS) -> Drafter:
    """The drafter of a method with a budget of somebody's own, which is made only if the method takes one.

    ``vocabulary`` matters to drafters that read logits.
    """
    make = MAKERS[config.method]
    _compile(lambda: make(config, shelf, lambda: FixedBudget(LARGEST_BUDGET)), vocabulary)
    return make(config, shelf, budget)


def _compile(make: Callable[[], Drafter], vocabulary: int) -> None:
    """Draft once in vain, so that no answer waits for the compiler; after the first time it is a matter of loading."""
    told = "compiling the drafter for this machine, once; this takes a while"
    note = Timer(PATIENCE, print, [told], {"file": stderr})
    note.start()
    try:
        drafter = make()
        words = [place % min(vocabulary, FEW_TOKENS) for place in range(16)]
        drafter.begin(words)
        for said in words[:2]:
            words.append(said)
            drafter.observe(Accepted([], [said]), torch.zeros(1 + len(drafter.draft(words)), vocabulary))
    finally:
        note.cancel()


def _plain(config: DecodeConfig, shelf: Shelf, budget: BudgetMaker) -> Drafter:
    return NoDraft()


def _prompt_lookup(config: DecodeConfig, shelf: Shelf, budget: BudgetMaker) -> Drafter:
    return PromptLookup()


def _lookahead(config: DecodeConfig, shelf: Shelf, budget: BudgetMaker) -> Drafter:
    return PaperDrafter(PaperConfig(order="C"))


def _corpus(config: DecodeConfig, shelf: Shelf, budget: BudgetMaker) -> Drafter:
    if not shelf.corpus:
        raise StoreError(
            "method rest drafts from a corpus index, and there is none for this model's tokenizer: "
            "build one with hdtool build-corpus-db, or name one with --corpus-db"
        )
    return CorpusDrafter(shelf.corpus, budget())


def _paper(config: DecodeConfig, shelf: Shelf, budget: BudgetMaker) -> Drafter:
    order = "".join(letter for letter in config.order if letter in config.use)
    settings = PaperConfig(order=order, lookahead=config.lookahead)
    return PaperDrafter(settings, model_store=shelf.model, corpus_index=shelf.corpus)


def _hierarchy(config: DecodeConfig, shelf: Shelf, budget: BudgetMaker) -> Drafter:
    return Hierarchy(
        shelf.model if "M" in config.use else None,
        shelf.corpus if "S" in config.use else None,
        context="C" in config.use,
        budget=budget(),
        recycled=config.recycled,
    )


MAKERS: dict[str, Maker] = {
    "ar": _plain,
    "pld": _prompt_lookup,
    "lade": _lookahead,
    "rest": _corpus,
    "hd-paper": _paper,
    "hd": _hierarchy,
}
