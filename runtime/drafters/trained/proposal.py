"""What trained drafters propose: rankings of the next token after the root, and after paths that begin there."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from hdtool.runtime.accept import Accepted
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.verified import Verified

BEST = 10
"""Tokens of a ranking."""
MOST_RANKINGS = 64
NONE = -1
"""In place of the number of a ranking: nothing is known after this token."""


class Proposal(NamedTuple):
    """Rankings of the next token, each after another path; the first one is for the root."""

    tokens: Array
    """``[rankings, best]``, most probable first."""
    probs: Array
    """The probability of each token, given that the path before it is accepted."""
    after: Array
    """The ranking that follows each token, or ``NONE``."""
    after_others: Array
    """The ranking that follows a token that is not named, or ``NONE``."""
    depths: Array
    """The tokens between the root and what a ranking is for."""

    @classmethod
    def in_parallel(cls, tokens: Array, probs: Array) -> Proposal:
        """Rankings by position ``[positions, best]``, whatever the tokens before them."""
        positions = np.arange(len(tokens))
        follows = np.where(positions + 1 < len(tokens), positions + 1, NONE)
        return cls(tokens, probs, np.broadcast_to(follows[:, None], tokens.shape), follows, positions)

    def along(self, tokens: list[int]) -> list[int]:
        """The rankings of the positions of these emitted tokens, as far as there are any."""
        found, at = list[int](), 0
        for token in tokens:
            if at == NONE or at >= len(self.tokens):
                break
            found.append(at)
            named = np.flatnonzero(self.tokens[at] == token)
            at = int(self.after[at, named[0]] if len(named) else self.after_others[at])
        return found


class TrainedDrafter(Protocol):
    """A drafter that was trained for its target, as one of the sources of a tree or as the only one."""

    @property
    def source(self) -> SourceName:
        """Whose nodes they are."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds spent in its own passes."""
        ...

    def begin(self, prompt: list[int]) -> None:
        """Start another answer. Its first input is the prompt, which the target reads next."""
        ...

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        """Note accepted tokens and their hidden states; nothing is computed."""
        ...

    def propose(self, most: int) -> Proposal:
        """Read what was noted, and rank what may follow; no tree will have more than ``most`` nodes."""
        ...


@compiled
def best_paths(
    probs: Array, after: Array, most: int, parents: Array, ranks: Array, rankings: Array, path_probs: Array
) -> int:
    """Fill the arrays with the most probable nodes of a proposal, best first; return how many.

    Each node is a token of the ranking after its parent: ``rankings`` gets its number, and ``ranks`` the place in it.
    """
    best = probs.shape[1]
    below = np.zeros(most + 1, np.int64)  # number of children of the root and each node
    size = 0
    while size < most:
        highest, chosen, of_chosen = 0.0, -1, -1
        for node in range(size + 1):
            ranking = after[rankings[node - 1], ranks[node - 1]] if node > 0 else min(0, len(probs) - 1)
            if ranking >= 0 and below[node] < best:
                path_prob = probs[ranking, below[node]] * (path_probs[node - 1] if node > 0 else 1.0)
                if path_prob > highest:
                    highest, chosen, of_chosen = path_prob, node, ranking
        if chosen < 0:
            break
        parents[size], ranks[size], rankings[size] = chosen - 1, below[chosen], of_chosen
        path_probs[size] = highest
        below[chosen] += 1
        size += 1
    return size
