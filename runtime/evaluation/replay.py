"""Replay: the drafts of a method compared with recorded answers, without the model.

A recorded answer decides for every draft whether the model would have accepted it, as long as the method drafts
from tokens alone. Methods that read logits get those of accepted positions, if the recording has rankings; after
rejected nodes it has none, so their figures are lower bounds. As in the loop, the pass over the prompt is a step with
one token, and the token that ends an answer counts. The drafter starts each turn with its whole prompt. Where the
method has a history, it grows with the answers, as it does for a user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.node_budget import CostBudget, FixedBudget
from hdtool.runtime.config import FIXED_BUDGET, METHODS, DecodeConfig
from hdtool.runtime.config.methods import HISTORY_LETTER
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.drafters.methods import drafter_within
from hdtool.runtime.evaluation.recorded_logits import RecordedLogits
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.evaluation.replay_results import ReplayedTurn, ReplayResult
from hdtool.runtime.model.attention_masks import FULL, AttentionMasks, AttentionWindow
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.history.history import History
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.tree import ROOT, DraftTree
from hdtool.runtime.verified import Verified

WARM_UP = 1000
"""Tokens replayed once before measuring, so that compiling and loading at first use are in no measured time."""
NO_LOGITS = torch.empty(0)
REACHES, CPU = [AttentionWindow(FULL)], torch.device("cpu")


@dataclass(frozen=True)
class Contender:
    """A method with its settings."""

    name: str
    config: DecodeConfig
    """With ``curve`` and no number of draft nodes, the curve decides how many pay."""
    curve: CostCurve | None = None

    @property
    def has_history(self) -> bool:
        return has_history(self.config)

    @property
    def needs_logits(self) -> bool:
        return bool(METHODS[self.config.method].logits)

    def budget(self) -> FixedBudget | CostBudget:
        if self.config.draft_tokens is None and self.curve:
            return CostBudget(self.curve)
        return FixedBudget(FIXED_BUDGET if self.config.draft_tokens is None else self.config.draft_tokens)


def has_history(config: DecodeConfig) -> bool:
    return HISTORY_LETTER in config.drafts_from


def with_own_history(store_set: StoreSet, config: DecodeConfig) -> StoreSet:
    """The stores with an empty history in memory, if the settings have one, whatever history they had."""
    return replace(store_set, history=History(prompts=config.history_prompts) if has_history(config) else None)


def play(
    contender: Contender,
    turns: Sequence[RecordedTurn],
    store_set: StoreSet,
    on_turn: Callable[[], None] = lambda: None,
    warm: Sequence[RecordedTurn] = (),
) -> ReplayResult:
    """Replay recorded answers one after another with a fresh drafter and a history of its own.

    Those of ``warm`` come first and are not counted; ``on_turn`` is called after each of both.
    """
    before = accumulate((len(turn.answer) for turn in turns), initial=0)
    start = [turn for turn, tokens in zip(turns, before, strict=False) if tokens < WARM_UP]
    _replayed(contender, start, store_set, lambda: None)  # its drafter and its history are discarded
    return _replayed(contender, turns, store_set, on_turn, warm)


def _replayed(
    contender: Contender,
    turns: Sequence[RecordedTurn],
    store_set: StoreSet,
    on_turn: Callable[[], None],
    warm: Sequence[RecordedTurn] = (),
) -> ReplayResult:
    budget = contender.budget()
    drafter = drafter_within(lambda: budget, contender.config, with_own_history(store_set, contender.config))
    logits = RecordedLogits((*warm, *turns)) if contender.needs_logits else None
    observe = budget.start_step if isinstance(budget, CostBudget) else lambda context: None

    def played(some: Sequence[RecordedTurn]) -> Iterator[ReplayedTurn]:
        for turn in some:
            yield _play_turn(drafter, turn, observe, logits)
            on_turn()

    warmed = sum(len(turn.tokens) for turn in played(warm))
    before = dict(drafter.seconds)
    done = tuple(played(turns))
    seconds = {source: taken - before.get(source, 0.0) for source, taken in drafter.seconds.items()}
    return ReplayResult(contender.name, done, seconds, contender.has_history, warmed)


def _play_turn(
    drafter: Drafter, turn: RecordedTurn, observe_context: Callable[[int], None], recorded: RecordedLogits | None
) -> ReplayedTurn:
    def verified(path: Sequence[int], nodes: int) -> Verified:
        return Verified(recorded.after(turn.rankings, done, path, nodes) if recorded and turn.rankings else NO_LOGITS)

    done = 0
    clock, truth, masks = time.perf_counter, turn.answer, AttentionMasks(REACHES, torch.float32, CPU)
    drafter.begin(turn.prompt)
    context = [*turn.prompt, truth[0]]
    drafter.observe(Accepted([], truth[:1]), verified([], 0))
    trees = [DraftTree.bare(turn.prompt[-1])]
    paths: list[list[int]] = [[]]
    seconds = [(0.0, 0.0)]
    done = 1
    while done < len(truth):
        observe_context(len(context) - 1)
        started = clock()
        tree = drafter.draft(context)
        if turn.most is not None:
            tree = tree.clipped(turn.most - done - 1)
        masks.of_tree(tree, len(context) - 1, reused=True)
        (len(context) - 1 + tree.depths).tolist()
        drafted = clock()
        accepted = follow(tree, truth[done:])
        known = verified(accepted.path, len(tree))
        followed = clock()
        drafter.observe(accepted, known)
        seconds.append((drafted - started, clock() - followed))
        trees.append(tree)
        paths.append(accepted.path)
        context += accepted.tokens
        done += len(accepted.tokens)
    return _replayed_turn(turn, trees, paths, seconds)


def follow(tree: DraftTree, truth: Sequence[int]) -> Accepted:
    """The accepted path of a tree: the recorded tokens as far as the tree holds them, and the bonus token."""
    path: list[int] = []
    node = ROOT
    for token in truth[:-1]:  # the last token can only be the bonus token
        child = tree.child(node, token)
        if child is None:
            break
        path.append(child)
        node = child
    return Accepted(path, list(truth[: len(path) + 1]))


def _replayed_turn(
    turn: RecordedTurn, trees: Sequence[DraftTree], paths: Sequence[list[int]], seconds: Sequence[tuple[float, float]]
) -> ReplayedTurn:
    drafted = np.array([np.bincount(tree.sources, minlength=len(SourceName)) for tree in trees])
    origins = [[*tree.sources[path].tolist(), int(SourceName.NONE)] for tree, path in zip(trees, paths, strict=True)]
    times = np.array(seconds)
    return ReplayedTurn(
        conversation=turn.conversation,
        category=turn.category,
        number=turn.number,
        prompt_tokens=len(turn.prompt),
        tokens=np.array(turn.answer, np.int32),
        sources=np.array([source for step in origins for source in step], np.uint8),
        accept_lengths=np.array([len(step) for step in origins], np.int32),
        nodes=np.array([len(tree) for tree in trees], np.int32),
        draft_seconds=times[:, 0],
        observe_seconds=times[:, 1],
        drafted=drafted.sum(axis=0),
        hits=(drafted > 0).sum(axis=0),
    )
