"""An engine without a model: it answers what was recorded, so that drafts are judged by it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.evaluation.recorded_logits import RecordedLogits
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.model.attention_masks import FULL, AttentionMasks, AttentionWindow
from hdtool.runtime.model.cache.slots import Cache
from hdtool.runtime.model.pass_log import PassLog
from hdtool.runtime.tree import ROOT, DraftTree
from hdtool.runtime.verified import Verified, Want

NO_LOGITS = torch.empty(0)
NOTHING = -1
"""The arg-max where nothing is recorded; no tree drafts it."""


class RecordingEngine:
    """Computes the arg-max of a recorded answer, and its logits as far as they are recorded.

    What a pass takes here is what an engine spends on the host: the mask and the positions of a tree.
    """

    captures, changes, vocabulary = False, 0, 2**31 - 1

    def __init__(self, logits: RecordedLogits | None = None) -> None:
        self.device, self.log, self.busy = torch.device("cpu"), PassLog(), Lock()
        self.cache = self.allocate()
        self._masks = AttentionMasks([AttentionWindow(FULL)], torch.float32, self.device)
        self._logits = logits
        self._turn: RecordedTurn

    def answer(self, turn: RecordedTurn) -> None:
        """Answer as this turn did from now on."""
        self._turn = turn

    def context_limit(self, prompt_length: int) -> int | None:
        return None

    def reads_in_pieces(self, length: int) -> bool:
        return False

    def is_unchanged(self, *, goes_on: bool) -> bool:
        return True

    def notice_changes(self) -> None:
        pass

    def allocate(self, slots: int = 1, capacity: int = 0) -> Cache:
        return Cache((), slots, capacity)

    def prefill(self, cache: Cache, slot: int, tokens: Sequence[int], start: int = 0, *, room: int = 0) -> Verified:
        cache.slots[slot].cut(start)
        cache.slots[slot].extend(tokens, None)
        return self._verified([], self._turn.answer[:1], 0, 0)

    def verify(self, cache: Cache, trees: Sequence[DraftTree], wants: Sequence[Want] = ()) -> list[Verified]:
        (tree,), slot = trees, cache.slots[0]
        started, length = time.perf_counter(), slot.length
        self._masks.of_tree(tree, length, reused=True)
        (length + tree.depths).tolist()
        self.log.add(time.perf_counter() - started, len(tree))
        slot.tree = tree
        done = length + 1 - len(self._turn.prompt)
        path, tokens, _ = follow(tree, self._turn.answer[done:])
        return [self._verified(path, tokens, done, len(tree))]

    def _verified(self, path: list[int], tokens: Sequence[int], done: int, nodes: int) -> Verified:
        argmax = np.full(1 + nodes, NOTHING, np.int64)
        argmax[[0, *(node + 1 for node in path)]] = tokens
        logits, rankings = NO_LOGITS, self._turn.rankings
        if self._logits and rankings:
            logits = self._logits.after(rankings, done, path, nodes)
        return Verified(logits, argmax=argmax, finite=np.ones_like(argmax))

    @property
    def takes_trees(self) -> bool:
        return True

    def fitted(self, cache: Cache, slot: int, tree: DraftTree) -> DraftTree:
        return tree

    def recompute(self, cache: Cache, slot: int, root: int) -> Verified:
        raise AssertionError("recorded logits are finite")

    def wait(self) -> None:
        pass

    def commit(self, cache: Cache, slot: int, path: Sequence[int]) -> None:
        cache.slots[slot].commit(path)

    def note_overflow(self) -> None:
        pass


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
