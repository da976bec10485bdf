"""Create drafters by method name; each method in ``METHODS`` has an entry in ``DRAFTER_FACTORIES``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache, partial

from hdtool.data.errors import StoreError
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.measure_passes import cost_curve_for
from hdtool.runtime.budget.node_budget import (
    Budget,
    CostBudget,
    FixedBudget,
    MeasuredBudget,
    SharedBudget,
    SharedCosts,
)
from hdtool.runtime.caches.accepted_path_moves import compile_moves
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.tree import compile_trees
from hdtool.runtime.core.tree_walks import compile_walks
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.published.hd_paper import PaperDrafter, lookahead_decoding
from hdtool.runtime.drafters.published.logitspec import LogitSpec
from hdtool.runtime.drafters.published.lookup_methods import CorpusDrafter, PromptLookup
from hdtool.runtime.drafters.published.racer import Racer
from hdtool.runtime.drafters.published.suffix_automaton import SamDecoding
from hdtool.runtime.drafters.published.suffix_decoding import SuffixDecoding
from hdtool.runtime.drafters.published.token_recycling import TokenRecycling
from hdtool.runtime.drafters.trained_drafter_factory import trained_alone, trained_drafter
from hdtool.runtime.kernels.code_folder import mark_compiled
from hdtool.runtime.kernels.compile_process import DRAFTER, PARTS, PASSES, start_compiling, wait_until_compiled
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.settings.decoding import HIERARCHIES, TRAINED, DecodeConfig, PaperConfig
from hdtool.runtime.settings.draft_sources import plugins
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import pick_device
from hdtool.runtime.target.target import Target

BudgetFactory = Callable[[], Budget]
DrafterFactory = Callable[[DecodeConfig, StoreSet, BudgetFactory, Target | None], Drafter]


def compile_ahead(model: ModelConfig, *methods: str) -> None:
    """Start to compile, in another process, what a model and drafting methods need, unless it has been compiled."""
    on_cpu = model.fused_layers and pick_device(model.device).type == "cpu"
    drafts = not {*HIERARCHIES}.isdisjoint(methods)
    start_compiling(*[PASSES] * on_cpu, *[DRAFTER] * drafts)


def compile_hierarchy() -> None:
    """Compile the code of method ``hd``, or load it; numba keeps the code for later processes."""
    curve = CostCurve.parse("0:1,1:2")
    drafter_with_budget(lambda: CostBudget(curve), DecodeConfig("hd"), StoreSet(history=History()))


def finish_compiling() -> None:
    """Wait for everything that ``compile_ahead`` started compiling, so that passes are timed on an idle machine."""
    for part in PARTS:
        wait_until_compiled(part)


def drafter_for(config: DecodeConfig, target: Target, store_set: StoreSet) -> Drafter:
    """Return a drafter for ``config.method``.

    The drafter learns across conversations and can be kept as long as the target.
    """
    return drafters_for(replace(config, batch_size=1), target, store_set)[0]


def drafters_for(config: DecodeConfig, target: Target, store_set: StoreSet) -> list[Drafter]:
    """Return a drafter for each conversation of a batch; passes are timed once for all drafters."""
    drafters = DrafterMaker(target, {config.batch_size})
    stores = store_set if store_set.history else store_set.with_history(config, lambda: fingerprint(target.model))
    return [drafters.make(config, stores) for _ in range(config.batch_size)]


class DrafterMaker:
    """Makes drafters for a target, which share the measured costs of the target's passes."""

    def __init__(self, target: Target, sizes: Collection[int]) -> None:
        """``sizes`` are the batch sizes for which passes are timed as soon as a drafter needs their costs."""
        self._target, self._costs = target, cache(partial(shared_costs_for, target, sizes))

    def make(self, config: DecodeConfig, stores: StoreSet) -> Drafter:
        return drafter_with_budget(partial(budget_for, config, self._costs), config, stores, self._target)


def shared_costs_for(target: Target, sizes: Collection[int]) -> SharedCosts:
    """Time forward passes over batches of these sizes, and return costs that the budgets of a batch share."""
    # Without padding, costs depend on the number of rows, so the largest batch's curve holds for smaller ones, too. A
    # lone tree has a curve of its own: it reads a single long context, whereas each tree of a batch reads its own.
    timed = set(sizes) if target.pads else {1, max(sizes)}
    curves = {size: cost_curve_for(target, size) for size in sorted(timed)}
    return SharedCosts(target.log, curves, only_timed_sizes=target.captures, pads=target.pads)


def budget_for(config: DecodeConfig, shared_costs: Callable[[], SharedCosts]) -> Budget:
    """Return the budget of a drafter; ``shared_costs`` is called only if the budget depends on measured passes."""
    if config.draft_tokens is not None:
        return FixedBudget(config.draft_tokens)
    shared = shared_costs()
    return MeasuredBudget(shared.log, shared.costs(1)) if config.batch_size == 1 else SharedBudget(shared)


def drafter_with_budget(
    budget: BudgetFactory, config: DecodeConfig, store_set: StoreSet, target: Target | None = None
) -> Drafter:
    """Return a drafter for ``config.method``; ``budget`` is called only if the method takes a budget.

    Only a method with a trained drafter needs a ``target``. Raise StoreError if method ``rest`` has no corpus index.
    Drafters compile their code when they are created, so that no answer waits for it.
    """
    compile_trees()
    compile_walks()
    compile_moves()
    drafter = DRAFTER_FACTORIES[config.method](config, store_set, budget, target)
    if config.method in HIERARCHIES:
        mark_compiled(DRAFTER)
    return drafter


def _corpus(config: DecodeConfig, store_set: StoreSet, budget: BudgetFactory, target: Target | None) -> Drafter:
    if not store_set.corpus:
        raise StoreError(
            "method rest drafts from a corpus index, and there is none for this model's tokenizer: "
            "build one with hdtool build-corpus-db, or name one with --corpus-db"
        )
    return CorpusDrafter(store_set.corpus, budget())


def _paper(config: DecodeConfig, store_set: StoreSet, budget: BudgetFactory, target: Target | None) -> Drafter:
    order = "".join(letter for letter in config.order if letter in config.sources)
    settings = PaperConfig(order=order, lookahead=config.lookahead)
    return PaperDrafter(settings, model_store=store_set.model, corpus_index=store_set.corpus)


def _hierarchy(config: DecodeConfig, store_set: StoreSet, budget: BudgetFactory, target: Target | None) -> Drafter:
    trained = None
    if config.trained:
        assert target is not None
        trained = trained_drafter(config, target, store_set.tokenizer)
    return Hierarchy(
        store_set.model if "M" in config.drafts_from else None,
        store_set.corpus if "S" in config.drafts_from else None,
        context="C" in config.drafts_from,
        budget=budget(),
        last="L" in config.drafts_from,
        recycled="R" in config.drafts_from,
        trained=trained,
        history=store_set.history if config.has_history else None,
        remembers=config.has_history,
        plugins={
            number: source.evidence
            for number, source in plugins().items()
            if source.evidence and source.letter in config.drafts_from
        },
    )


def _trained(config: DecodeConfig, store_set: StoreSet, budget: BudgetFactory, target: Target | None) -> Drafter:
    assert target is not None
    return trained_alone(config, target, budget(), store_set.tokenizer)


DRAFTER_FACTORIES: dict[str, DrafterFactory] = {
    "ar": lambda config, stores, budget, target: NoDraft(),
    "pld": lambda config, stores, budget, target: PromptLookup(budget=budget()),
    "lade": lambda config, stores, budget, target: lookahead_decoding(),
    "sam": lambda config, stores, budget, target: SamDecoding(budget()),
    "suffix": lambda config, stores, budget, target: SuffixDecoding(budget(), remembers=config.has_history),
    "rest": _corpus,
    "hd-paper": _paper,
    "logitspec": lambda config, stores, budget, target: LogitSpec(budget()),
    "tr": lambda config, stores, budget, target: TokenRecycling(budget(), remembers=config.has_history),
    "racer": lambda config, stores, budget, target: Racer(budget(), remembers=config.has_history),
    **dict.fromkeys(HIERARCHIES, _hierarchy),
    **dict.fromkeys((name for name in TRAINED if name not in HIERARCHIES), _trained),
}
