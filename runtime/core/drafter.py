"""The base class of drafters, a drafter for plain decoding, and a wrapper of other drafters."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.settings.draft_sources import SourceId


class Drafter:
    """Proposes a draft tree for each step and learns which of its nodes were accepted.

    Subclasses override the methods that they need; by default, a drafter drafts nothing and learns nothing.
    """

    def __init__(self, *sources: SourceId) -> None:
        self._seconds = dict.fromkeys(sources, 0.0)

    @contextmanager
    def _timing(self, source: SourceId) -> Iterator[None]:
        """Count the seconds in this block as spent in ``source``."""
        started = time.perf_counter()
        yield
        self._seconds[source] += time.perf_counter() - started

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
        """Number of top tokens per row of logits that the drafter reads; 0 if it reads no rankings."""
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
        """End the answer; a drafter with a history remembers it."""


def draft_many(drafters: Sequence[Drafter], contexts: Sequence[Sequence[int]]) -> list[DraftTree]:
    """Return each drafter's tree for its context; drafters of one class with equal ``joint`` keys draft in one call."""
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
    """Delegates all but ``joint`` and ``draft_many`` to another drafter; subclasses override what they change."""

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

    def expect(self, tokens: Sequence[int]) -> None:
        self._drafter.expect(tokens)

    def draft(self, context: Sequence[int]) -> DraftTree:
        return self._drafter.draft(context)

    def forget_tree(self) -> None:
        self._drafter.forget_tree()

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        self._drafter.observe(accepted, verified)

    def end(self) -> None:
        self._drafter.end()
