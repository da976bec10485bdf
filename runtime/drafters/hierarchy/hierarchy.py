"""The default drafter: estimate the next tokens from all sources together, and draft the most probable paths."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numba import types

from hdtool.runtime.budget.averages import SmoothedSeconds
from hdtool.runtime.budget.node_budget import Budget, FixedBudget, choose_all_nodes
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import Probs
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.exponential_race import ExponentialRace
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.drafters.hierarchy.compiled_source import MAX_HASHED_TOKENS, CompiledSource
from hdtool.runtime.drafters.hierarchy.counting_sources import (
    MODEL_SOURCE,
    PLUGIN_SOURCE,
    TRAINED_SOURCE,
    Plugins,
    corpus_source,
    no_proposal,
    note_proposal,
)
from hdtool.runtime.drafters.hierarchy.matching_sources import (
    ANSWERS_LOG,
    CONTEXT_SOURCE,
    HISTORY_SOURCE,
    MATCH_RECORD,
    PREDICTION_SOURCE,
    STORED_LOG,
)
from hdtool.runtime.drafters.hierarchy.ranking_sources import (
    LAST_SOURCE,
    RECYCLED_SOURCE,
    SINGLE_TOKEN_SOURCE,
    LogitRecords,
)
from hdtool.runtime.drafters.hierarchy.record_table import RecordTable
from hdtool.runtime.drafters.hierarchy.tree_growth import feed_token, grow_all, restart
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.kernels.compiled import HAS_CLOCK, Array, SharedTime, Uncopyable
from hdtool.runtime.settings.draft_sources import Evidence, SourceId
from hdtool.runtime.stores.context_table import CHAIN_LENGTHS, LONG_CHAIN, ContextTable
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.history_store import History, address_of
from hdtool.runtime.stores.model_store import ModelStore, model_record
from hdtool.runtime.stores.suffix_ranges import no_shards, range_record
from hdtool.runtime.stores.token_log import LANE, LOG_BLOCK, MAX_MATCH_TOKENS, TokenLog

TIMED_EVERY = 32
"""One in this many drafts is timed: reading the clock in every draft would make drafting a fifth slower."""
UNLIMITED_VOCABULARY = 2**31 - 1


class Hierarchy(Drafter, Uncopyable):
    """Drafts from the given sources: context, prediction, history, stores, a trained drafter and plug-ins.

    It can also draft from the target's logits: with ``last``, from the ranking that the root was chosen from; with
    ``recycled``, from the rankings at nodes of earlier trees, accepted or not. Learned weights and recycled rankings
    are kept between answers.
    """

    predicts = True

    def __init__(
        self,
        model: ModelStore | None = None,
        corpus: CorpusIndex | None = None,
        *,
        context: bool = True,
        budget: Budget | None = None,
        last: bool = False,
        recycled: bool = False,
        trained: TrainedProposer | None = None,
        plugins: Mapping[SourceId, Evidence] | None = None,
        history: History | None = None,
        vocabulary: int = UNLIMITED_VOCABULARY,
        remembers: bool = True,
        sources: Mapping[CompiledSource, Array] | None = None,
    ) -> None:
        """Only the first ``vocabulary`` token ids are drafted. Several drafters may share a ``history``.

        Unless the drafter ``remembers`` them, recycled rankings are dropped when another conversation begins.
        ``sources`` maps further compiled sources to the records that they read.
        """
        self.budget = budget or FixedBudget()
        self._history, self._forgets = history, recycled and not remembers
        self._trained, self._plugins = trained, Plugins(plugins or {})
        self.context_table = ContextTable()
        self._prediction: TokenLog
        self._rankings = LogitRecords(last=last, recycled=recycled, known=model.rankings if model else None)
        self._records = self._new_records(model, corpus, context, sources or {})
        self.address = self._records.address
        """Address of the drafter's array of addresses, for compiled code that grows several trees."""
        self._fill_in(context, vocabulary)
        self._nodes = 0
        """Number of nodes in the last tree; 0 if the verified rows may not belong to these nodes."""
        self._pending: list[int] = []
        self._drafts, self._learning_seconds = 0, 0.0
        self._cost, self._time = SmoothedSeconds(), SharedTime(len(SourceId))
        # Compile the code, or load it from the cache, before the first step.
        self.predict((0,))
        self.begin(())
        grow_all(np.array([self.address]), np.array([1]), np.zeros(1, np.int64))
        cast(Any, feed_token).compile((types.int64, types.int64))

    def _new_records(
        self,
        model: ModelStore | None,
        corpus: CorpusIndex | None,
        context: bool,
        further: Mapping[CompiledSource, Array],
    ) -> RecordTable:
        self._stores = model, corpus  # their arrays must outlive their addresses
        self._shards = corpus.shards if corpus else no_shards()
        ranges, self._range_bounds = range_record(self._shards)
        self._proposed, self._lane = no_proposal(), np.zeros(1, LANE)
        self._matches: dict[int, Array] = {
            row.name: np.zeros(1, MATCH_RECORD) for row in (CONTEXT_SOURCE, PREDICTION_SOURCE, HISTORY_SOURCE)
        }
        rankings = self._rankings
        offered: dict[CompiledSource, tuple[Any, Array]] = {
            TRAINED_SOURCE: (self._trained, self._proposed),
            PLUGIN_SOURCE: (self._plugins.seconds, self._plugins.records),
            CONTEXT_SOURCE: (context, self._matches[SourceId.CONTEXT]),
            PREDICTION_SOURCE: (True, self._matches[SourceId.PREDICTION]),
            HISTORY_SOURCE: (self._history, self._matches[SourceId.HISTORY]),
            RECYCLED_SOURCE: (rankings.is_kept, rankings.recycled.record),
            MODEL_SOURCE: (model, model_record(model)),
            corpus_source(self._shards.tokens.dtype.name): (corpus, ranges),
            SINGLE_TOKEN_SOURCE: (rankings.is_kept, rankings.recycled.record),
            LAST_SOURCE: (rankings.uses_last, rankings.last),
        }
        return RecordTable({**{source: (True, record) for source, record in further.items()}, **offered}, rankings.near)

    def _fill_in(self, context: bool, vocabulary: int) -> None:
        self.work = work = self._records.work
        """The workspace of the last draft; ``WORKSPACE`` in ``compiled_source.py`` lists its fields."""
        sizes = [store.manifest.tokenizer.vocab_size for store in self._stores if store]
        work["vocabulary"] = min([vocabulary, *sizes])
        self._matches[SourceId.CONTEXT]["log"][0, ANSWERS_LOG] = self.context_table.memory.ctypes.data
        if self._history:
            history_matches = self._matches[SourceId.HISTORY]
            history_matches["log"][0, ANSWERS_LOG] = address_of(self._history.answers.memory)
            history_matches["log"][0, STORED_LOG] = address_of(self._history.stored_log)
            history_matches["lane"] = self._lane.ctypes.data
        work["has_context"] = context
        work["hashed"] = MAX_HASHED_TOKENS if self._rankings.is_kept or self._stores[0] else CHAIN_LENGTHS[LONG_CHAIN]
        work["instant_at"] = work["instant"].ctypes.data
        # These views are kept, because each access to a field of a record takes a tenth of a microsecond.
        self._tokens, self._sources, self._probs = (work[field][0, 1:] for field in ("tokens", "sources", "probs"))
        self._parents, self._depths, self._calibrated, self._root_and_probs = (
            work[field][0] for field in ("tree_parents", "depths", "calibrated", "probs")
        )
        self._tails, self._timed, self._laps = work["tails"][0], work["timed"], work["laps"][0]

    @property
    def shards(self) -> int:
        """Number of shards of the corpus index."""
        return len(self._shards.extents)

    @property
    def probs(self) -> Probs:
        """For each node in the last tree, the probability that the whole path to it is accepted."""
        return self._probs[: self._nodes].copy()

    def weights(self, source: SourceId) -> Any:
        """Return the learned weights of a source, by n-gram order and bucket of evidence; see ``new_weights``."""
        return self._records.weights["weight"][0, self._records.rows_of[source]]

    @property
    def seconds(self) -> dict[SourceId, float]:
        """Seconds spent drafting, split by source as measured in every 32nd draft; empty without ``HAS_CLOCK``."""
        parts = self._time.seconds()
        if any(parts):
            if self._trained:
                parts[self._trained.source] += self._trained.seconds
            for number, seconds in self._plugins.seconds.items():
                parts[number] += seconds
        return {SourceId(source): part for source, part in enumerate(parts) if part}

    def begin(self, prompt: Sequence[int]) -> None:
        self.end()
        self._nodes = 0
        if self._trained:
            self._trained.begin(list(prompt))
        new = self.context_table.read(prompt)
        if self._forgets and new == len(prompt):
            self._rankings.forget()
        if self._history:
            self._history.start(self._lane, prompt, new)
            self._matches[SourceId.HISTORY]["owner"] = self._lane["owner"]
        self._records.use(prediction=False)
        restart(self.address, np.array(prompt[-MAX_MATCH_TOKENS:], np.int64))

    def predict(self, prediction: Sequence[int]) -> None:
        self._prediction = log = TokenLog(size=1 << (len(prediction) + 2 * LOG_BLOCK).bit_length())
        lane, tail = log.lane(), self._tails[0]
        log.start(lane, tail[tail >= 0])
        log.append(lane, prediction)
        self._matches[SourceId.PREDICTION]["log"][0, ANSWERS_LOG] = address_of(log.memory)
        self._records.use(prediction=True)

    def end(self) -> None:
        self._catch_up()
        if self._history:
            self._history.finish(self._lane)

    def expect(self, tokens: Sequence[int]) -> None:
        size = min(len(tokens), LARGEST_TREE)
        self.work["chain"][0, :size] = tokens[:size]
        self.work["expected"] = size

    def set_seed(self, seed: int | None) -> None:
        self.work["is_sampled"] = seed is not None
        self.work["seed"] = ExponentialRace(seed or 0).seed

    def forget_tree(self) -> None:
        """Record that the last tree was changed before verification: the rows of logits do not match its nodes."""
        self._nodes = 0

    def draft(self, context: Sequence[int]) -> DraftTree:
        return self.draft_many((self,), (context,))[0]

    @property
    def joint(self) -> Hashable:
        return Hierarchy

    def draft_many(self, drafters: Sequence[Hierarchy], contexts: Sequence[Sequence[int]]) -> list[DraftTree]:
        """Return the trees of several drafters, grown in one compiled call and cut to sizes that the budgets choose."""
        began = time.perf_counter()
        max_nodes = [drafter.prepare(context) for drafter, context in zip(drafters, contexts, strict=True)]
        for drafter, wanted in zip(drafters, max_nodes, strict=True):
            drafter.await_proposal(wanted)
        if not any(max_nodes):
            return [DraftTree.bare(context[-1]) for context in contexts]
        grown, started = np.zeros(len(max_nodes), np.int64), time.perf_counter()
        grow_all(np.array([drafter.address for drafter in drafters]), np.array(max_nodes), grown)
        drafting = [index for index, wanted in enumerate(max_nodes) if wanted]
        ended, sizes = time.perf_counter(), [0] * len(drafters)
        # In a batch, all else takes as long as growing small trees, so it counts as the cost of drafting, too.
        cost = ended - (started if len(drafters) == 1 else began)
        for index in drafting:
            drafters[index]._note_growing((ended - started) / len(drafting), cost / len(drafting))
        budgets = [drafters[index].budget for index in drafting]
        probs = [drafters[index]._calibrated[: grown[index]] for index in drafting]
        for index, size in zip(drafting, choose_all_nodes(budgets, probs), strict=True):
            sizes[index] = size
        parts = zip(drafters, contexts, sizes, strict=True)
        return [drafter._verified_part(context, size) for drafter, context, size in parts]

    def prepare(self, context: Sequence[int]) -> int:
        """Prepare the inputs for growing a tree; return how many nodes to grow, or 0 if this step should not draft.

        A trained drafter may draft on the device meanwhile, until ``await_proposal``.
        """
        max_nodes = min(self.budget.max_nodes, LARGEST_TREE)
        if not max_nodes:
            self.work["expected"] = self._nodes = 0
            return 0
        self._is_proposing = self._trained is not None and self._trained.begin_draft()
        began = time.perf_counter()
        self._catch_up()
        self._learning_seconds += time.perf_counter() - began
        self.work["position"] = len(context)
        self._plugins.predict(context)
        if self._drafts % TIMED_EVERY == 0:
            self._timed[0] = HAS_CLOCK
        self._drafts += 1
        return max_nodes

    def await_proposal(self, max_nodes: int) -> None:
        """Wait for the trained drafter's proposal that ``prepare`` began, if any, and store it for growing the tree."""
        if max_nodes and self._is_proposing and self._trained:
            note_proposal(self._proposed[0], self._trained.source, self._trained.propose(max_nodes))

    def _note_growing(self, seconds: float, cost: float) -> None:
        """Record the seconds spent on growing the tree and, for the budget, what drafting it cost."""
        self._time.spend(seconds)
        if self._timed[0]:
            self._time.add_laps(self._laps)
            self._timed[0] = False
        # Include the time to learn from the last step, which only drafting needs.
        self._cost.observe(cost + self._learning_seconds)
        self.budget.set_draft_seconds(self._cost.mean)

    def _verified_part(self, context: Sequence[int], size: int) -> DraftTree:
        """Return the part of the grown tree that will be verified: its first ``size`` nodes."""
        self._nodes = size
        if not size:
            return DraftTree.bare(context[-1])
        parts = self._tokens, self._parents, self._sources
        return DraftTree(context[-1], *[part[:size].copy() for part in parts])

    @property
    def reads_logits(self) -> bool:
        return self._rankings.uses_logits

    @property
    def max_ranked(self) -> int:
        return self._rankings.max_ranked

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        self.budget.end_step()
        if self._trained:
            self._trained.observe(accepted, verified)
        is_current = not self._pending  # otherwise, the workspace belongs to an earlier context than the logits
        nodes = self._nodes
        self._pending += accepted.tokens
        is_drafting = self.budget.max_nodes > 0
        if not is_drafting and not nodes:
            return
        started = time.perf_counter()
        uses_logits = is_drafting and self._rankings.uses_logits
        ranked = None
        if uses_logits and is_current and (rows := len(verified)) == nodes + 1:  # copy the tails, as the root moves on
            ranked = self._tails[:rows].copy(), self._depths[:rows], self._root_and_probs[:rows]
        if uses_logits or not (self._trained and self._trained.starts_before_learning):
            self._catch_up()
        if uses_logits:
            # Only after the weights have learned, as they must not learn from these logits.
            self._rankings.observe(accepted, verified, ranked)
        self._learning_seconds = time.perf_counter() - started

    def _catch_up(self) -> None:
        """Learn from the tokens emitted since the last call; this is postponed while the budget allows no drafts."""
        for token in self._pending:
            feed_token(self.address, token)
        self._pending.clear()
