"""The base class of drafters, a drafter for plain decoding, and the calibration of acceptance probabilities.

A node without an estimated probability gets the measured acceptance rate of its kind and depth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.data.conversation import Rankings
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine import Verified
from hdtool.runtime.core.tree import LARGEST_TREE, ROOT, DraftTree
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.kernels.topk import topk


class Drafter:
    """Proposes a draft tree for each step and learns which of its nodes were accepted.

    Callers call every method of every drafter; by default, a drafter drafts nothing and learns nothing.
    """

    def __init__(self, *sources: SourceId) -> None:
        self._seconds = dict.fromkeys(sources, 0.0)

    @property
    def seconds(self) -> dict[SourceId, float]:
        """Seconds spent in each draft source since the drafter was created."""
        return self._seconds

    @property
    def predicts(self) -> bool:
        """Whether the drafter drafts from the prediction that ``predict`` receives."""
        return False

    @property
    def reads_logits(self) -> bool:
        """Whether the drafter reads the logits passed to ``observe``."""
        return True

    @property
    def max_ranked(self) -> int:
        """Number of ranked tokens that the drafter reads per row of logits."""
        return 0

    @property
    def joint(self) -> Hashable:
        """Key by which drafters are grouped: drafters of one class with equal keys draft in one call."""
        return self

    def set_seed(self, seed: int | None) -> None:
        """Set the sampling seed of the answer that the next ``begin`` starts; None for greedy decoding."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start the answer to a prompt and discard the state of the previous answer."""

    def predict(self, prediction: Sequence[int]) -> None:
        """Also draft from ``prediction``: tokens that the answer started by ``begin`` will probably contain."""

    def expect(self, tokens: Sequence[int]) -> None:
        """Begin the next tree with ``tokens``, a chain nearly certain to be accepted; grow the rest after it."""

    def draft(self, context: Sequence[int]) -> DraftTree:
        """Return a tree rooted at the last token of ``context``, which is the prompt and all tokens emitted since."""
        return DraftTree.bare(context[-1])

    def draft_many(self, drafters: Sequence[Any], contexts: Sequence[Sequence[int]]) -> list[DraftTree]:
        """Return one tree per drafter; all ``drafters`` share one ``joint`` key, and ``drafters[0]`` is ``self``."""
        return [drafter.draft(context) for drafter, context in zip(drafters, contexts, strict=True)]

    def forget_tree(self) -> None:
        """Learn nothing from the nodes of the last tree, because a modified tree is verified instead."""

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        """Learn from the verification of the last tree; ``verified`` holds one row for the root and one per node."""

    def end(self) -> None:
        """End the answer and remember it."""


def draft_many(drafters: Sequence[Drafter], contexts: Sequence[Sequence[int]]) -> list[DraftTree]:
    """Return each drafter's tree for its context; drafters with equal ``joint`` keys draft in one call."""
    if len(drafters) == 1:
        return [drafters[0].draft(contexts[0])]
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, drafter in enumerate(drafters):
        groups[type(drafter), drafter.joint].append(index)
    trees: dict[int, DraftTree] = {}
    for indices in groups.values():
        first = drafters[indices[0]]
        if len(indices) == 1:
            trees[indices[0]] = first.draft(contexts[indices[0]])
        else:
            drafted = first.draft_many([drafters[index] for index in indices], [contexts[index] for index in indices])
            trees.update(zip(indices, drafted, strict=True))
    return [trees[index] for index in range(len(drafters))]


class NoDraft(Drafter):
    """A drafter for plain decoding: every tree is empty."""

    reads_logits = False


class WrappedDrafter(Drafter):
    """Delegates to another drafter; subclasses override what they change."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def predicts(self) -> bool:
        return self._drafter.predicts

    @property
    def seconds(self) -> dict[SourceId, float]:
        return self._drafter.seconds

    @property
    def reads_logits(self) -> bool:
        return self._drafter.reads_logits

    @property
    def max_ranked(self) -> int:
        return self._drafter.max_ranked

    def set_seed(self, seed: int | None) -> None:
        self._drafter.set_seed(seed)

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def predict(self, prediction: Sequence[int]) -> None:
        self._drafter.predict(prediction)

    def draft(self, context: Sequence[int]) -> DraftTree:
        return self._drafter.draft(context)

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        self._drafter.observe(accepted, verified)

    def end(self) -> None:
        self._drafter.end()


CALIBRATION_PRIOR_WEIGHT = 10.0
"""Weight of the prior acceptance rate, in observations."""
CALIBRATION_WINDOW = 200.0
"""Span of the moving averages in observations; limited, because acceptance rates change with the topic."""

Probs = npt.NDArray[np.float64]

NO_KINDS = np.empty(0, np.int64)
"""Node kinds of an empty tree."""


class NodeCalibration:
    """Tracks acceptance rates by kind and depth of nodes: how often a node is accepted if its parent is."""

    def __init__(self, prior: Sequence[float]) -> None:
        """``prior[kind]`` is the initial acceptance rate of nodes of this kind, the same at every depth."""
        self._verified = np.full((len(prior), LARGEST_TREE), CALIBRATION_PRIOR_WEIGHT)
        self._accepted = self._verified * np.array(prior)[:, None]
        # Compile both functions now, or load them from the cache, so that no step waits for this.
        none, bare = np.empty(0, np.int64), DraftTree.bare(0)
        self.by_probability(none, bare)
        self.update(none, bare, ())

    def by_probability(self, kinds: Ints, tree: DraftTree) -> tuple[Ints, Probs]:
        """Return ``(nodes, probs)`` in descending order of the probability that a node's whole path is accepted."""
        return _by_probability(kinds, tree.parents, tree.depths, self._accepted, self._verified)

    def update(self, kinds: Ints, tree: DraftTree, path: Sequence[int]) -> None:
        """Update the rates with a verified tree and its accepted ``path``."""
        accepted = np.zeros(len(kinds), np.bool_)
        accepted[list(path)] = True
        _update(kinds, tree.parents, tree.depths, accepted, self._accepted, self._verified)


@compiled
def _by_probability(kinds: Ints, parents: Ints, depths: Ints, accepted: Probs, verified: Probs) -> tuple[Ints, Probs]:
    probs = np.ones(len(kinds))
    for node in range(len(kinds)):
        kind, depth = kinds[node], depths[node + 1] - 1
        parent = parents[node]
        probs[node] = accepted[kind, depth] / verified[kind, depth]
        if parent != ROOT:
            probs[node] *= probs[parent]
    # Stable, so that a parent stays before a child of equal probability.
    order = np.argsort(-probs, kind="mergesort")
    return order, probs[order]


@compiled
def _update(kinds: Ints, parents: Ints, depths: Ints, path: Ints, accepted: Probs, verified: Probs) -> None:
    for node in range(len(kinds)):
        parent = parents[node]
        if parent == ROOT or path[parent]:
            kind, depth = kinds[node], depths[node + 1] - 1
            decay = min(1.0, CALIBRATION_WINDOW / verified[kind, depth])
            verified[kind, depth] = verified[kind, depth] * decay + 1.0
            accepted[kind, depth] = accepted[kind, depth] * decay + path[node]


class RankingRecorder(WrappedDrafter):
    """Records the target's top tokens at each position of an answer, and delegates drafting to another drafter."""

    reads_logits = True

    def __init__(self, drafter: Drafter, num_tokens: int) -> None:
        """``num_tokens`` is the number of tokens to record per position."""
        super().__init__(drafter)
        self._num_tokens = num_tokens
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    @property
    def rankings(self) -> Rankings:
        return Rankings(np.concatenate(self._tokens), np.concatenate(self._logprobs))

    def begin(self, prompt: Sequence[int]) -> None:
        self._tokens.clear()
        self._logprobs.clear()
        super().begin(prompt)

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        rows = verified.logits[[0, *(node + 1 for node in accepted.path)]].float()
        tokens, scores = topk(rows, min(self._num_tokens, rows.shape[-1]))
        self._tokens.append(tokens.astype(np.int32))
        self._logprobs.append(scores - rows.logsumexp(-1, keepdim=True).cpu().numpy())
        super().observe(accepted, verified)
