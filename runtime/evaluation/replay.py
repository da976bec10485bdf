"""Replay: what a method would have had accepted of recorded answers, without the model.

An answer is a complete oracle for whatever drafts from tokens alone. Its last token counts; the prompt's
own pass is a step and brings one token, as in the loop; a drafter is told of each turn with its whole prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.node_budget import CostBudget, FixedBudget
from hdtool.runtime.config import FIXED_BUDGET, DecodeConfig
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.drafters.methods import drafter_within
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.evaluation.replay_results import Played, PlayedTurn
from hdtool.runtime.model.attention_masks import FULL, AttentionWindow, MaskBuffer, tree_mask
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.tree import ROOT, DraftTree

WARM_UP = 1000
"""Tokens, about, that are played once in vain, so that what is compiled or loaded at first use is in no time."""
NO_LOGITS = torch.empty(0)
REACHES, CPU = [AttentionWindow(FULL)], torch.device("cpu")


@dataclass(frozen=True)
class Contender:
    """A method with its settings, under a name of its own."""

    name: str
    config: DecodeConfig
    """A budget of None means as many nodes as pay by ``curve``."""
    curve: CostCurve | None = None

    def budget(self) -> FixedBudget | CostBudget:
        if self.config.budget is None and self.curve:
            return CostBudget(self.curve)
        return FixedBudget(FIXED_BUDGET if self.config.budget is None else self.config.budget)


def play(
    contender: Contender, turns: Sequence[RecordedTurn], store_set: StoreSet, told: Callable[[], None] | None = None
) -> Played:
    """Let a fresh drafter guess at recorded answers, one after another; ``told`` is called after each."""
    for _ in _played(contender, _start(turns), store_set)[0]:
        pass
    playing, drafter = _played(contender, turns, store_set)
    done = []
    for turn in playing:
        done.append(turn)
        if told:
            told()
    return Played(contender.name, tuple(done), dict(drafter.seconds))


def _start(turns: Sequence[RecordedTurn]) -> Iterator[RecordedTurn]:
    """As many of the first turns as make a warm-up."""
    tokens = 0
    for turn in turns:
        if tokens >= WARM_UP:
            return
        yield turn
        tokens += len(turn.answer)


def _played(
    contender: Contender, turns: Iterable[RecordedTurn], store_set: StoreSet
) -> tuple[Iterator[PlayedTurn], Drafter]:
    budget = contender.budget()
    drafter = drafter_within(lambda: budget, contender.config, store_set)
    hear = budget.hear if isinstance(budget, CostBudget) else lambda context: None
    return (_play_turn(drafter, turn, hear) for turn in turns), drafter


def _play_turn(drafter: Drafter, turn: RecordedTurn, hear: Callable[[int], None]) -> PlayedTurn:
    clock, truth, sheet = time.perf_counter, turn.answer, MaskBuffer()
    drafter.begin(turn.prompt)
    context = [*turn.prompt, truth[0]]
    drafter.observe(Accepted([], truth[:1]), NO_LOGITS)
    trees = [DraftTree.bare(turn.prompt[-1])]
    paths: list[list[int]] = [[]]
    seconds = [(0.0, 0.0)]
    done = 1
    while done < len(truth):
        hear(len(context) - 1)
        started = clock()
        tree = drafter.draft(context)
        if turn.most is not None:
            tree = tree.clipped(turn.most - done - 1)
        tree_mask(tree, len(context) - 1, REACHES, torch.float32, CPU, sheet)
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
    return _told(turn, trees, paths, seconds)


def follow(tree: DraftTree, truth: Sequence[int]) -> Accepted:
    """What the target would have taken of a tree: the truth, as far as the tree holds it, and one token more."""
    path: list[int] = []
    node = ROOT
    for token in truth[:-1]:  # nothing is followed past the last one
        child = tree.child(node, token)
        if child is None:
            break
        path.append(child)
        node = child
    return Accepted(path, list(truth[: len(path) + 1]))


def _told(
    turn: RecordedTurn, trees: Sequence[DraftTree], paths: Sequence[list[int]], seconds: Sequence[tuple[float, float]]
) -> PlayedTurn:
    drafted = np.array([np.bincount(tree.sources, minlength=len(SourceName)) for tree in trees])
    origins = [[*tree.sources[path].tolist(), int(SourceName.NONE)] for tree, path in zip(trees, paths, strict=True)]
    times = np.array(seconds)
    return PlayedTurn(
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
