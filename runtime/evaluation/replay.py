"""Replay: the drafts of a method compared with recorded answers, without the model.

A recorded answer decides for every draft whether the model would have accepted it, as long as the method drafts
from tokens alone. As in the loop, the pass over the prompt is a step with one token, and the token that ends an
answer counts. The drafter starts each turn with its whole prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.node_budget import CostBudget, FixedBudget
from hdtool.runtime.config import FIXED_BUDGET, DecodeConfig
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.drafters.methods import drafter_within
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.evaluation.replay_results import ReplayedTurn, ReplayResult
from hdtool.runtime.model.attention_masks import FULL, AttentionWindow, MaskBuffer, tree_mask
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.tree import ROOT, DraftTree

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

    def budget(self) -> FixedBudget | CostBudget:
        if self.config.draft_tokens is None and self.curve:
            return CostBudget(self.curve)
        return FixedBudget(FIXED_BUDGET if self.config.draft_tokens is None else self.config.draft_tokens)


def play(
    contender: Contender, turns: Sequence[RecordedTurn], store_set: StoreSet, on_turn: Callable[[], None] = lambda: None
) -> ReplayResult:
    """Replay recorded answers one after another with a fresh drafter; ``on_turn`` is called after each."""
    before = accumulate((len(turn.answer) for turn in turns), initial=0)
    start = [turn for turn, tokens in zip(turns, before, strict=False) if tokens < WARM_UP]
    _replayed(contender, start, store_set, lambda: None)
    return _replayed(contender, turns, store_set, on_turn)


def _replayed(
    contender: Contender, turns: Sequence[RecordedTurn], store_set: StoreSet, on_turn: Callable[[], None]
) -> ReplayResult:
    budget = contender.budget()
    drafter = drafter_within(lambda: budget, contender.config, store_set)
    observe = budget.start_step if isinstance(budget, CostBudget) else lambda context: None
    done = []
    for turn in turns:
        done.append(_play_turn(drafter, turn, observe))
        on_turn()
    return ReplayResult(contender.name, tuple(done), dict(drafter.seconds))


def _play_turn(drafter: Drafter, turn: RecordedTurn, observe_context: Callable[[int], None]) -> ReplayedTurn:
    clock, truth, masks = time.perf_counter, turn.answer, MaskBuffer()
    drafter.begin(turn.prompt)
    context = [*turn.prompt, truth[0]]
    drafter.observe(Accepted([], truth[:1]), NO_LOGITS)
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
        tree_mask(tree, len(context) - 1, REACHES, torch.float32, CPU, masks)
        (len(context) - 1 + tree.depths).tolist()
        drafted = clock()
        accepted = follow(tree, truth[done:])
        followed = clock()
        drafter.observe(accepted, NO_LOGITS)
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
