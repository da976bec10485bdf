"""Fits the initial recency gains in `runtime/drafters/hierarchy/token_probabilities.py`.

    python -m tests.benchmarks.recency traces.jsonl --model MODEL --model-db FOLDER --corpus-db FOLDER

At each position of recorded answers, candidates are computed without recency. The fitted gains maximize the likelihood
of the emitted tokens. Two tables are fitted, each on every other conversation, and evaluated on the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.hierarchy.compiled_source import DRAFTING
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.hierarchy.token_probabilities import RECENCY, prob_class
from hdtool.runtime.drafters.hierarchy.tree_growth import MIN_CONTRIBUTION, MIN_LEFT, expand, feed
from hdtool.runtime.stores.store_set import StoreSet
from tests.benchmarks.laboratory import Table, parser_of_recordings, read_recordings

PENALTY = 3e-4
"""Weight of the squared log gains in the loss, which keeps rare classes near a gain of 1."""
RANKS = (1, 2, 4, 8, 16)
SHAPE = len(RECENCY), len(RECENCY[0])


class Candidates(NamedTuple):
    """Candidates of many positions, concatenated."""

    chances: torch.Tensor
    kinds: torch.Tensor
    """Class of each candidate by distance and probability."""
    positions: torch.Tensor
    emitted: torch.Tensor
    """True for the candidate that was emitted at its position."""

    def weighed(self, logarithms: torch.Tensor) -> torch.Tensor:
        """Return the probabilities with these gains, renormalized to the original sum of each position."""
        gained = self.chances * logarithms.exp()[self.kinds]
        return gained * (self._sums(self.chances) / self._sums(gained))[self.positions]

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(int(self.positions[-1]) + 1, dtype=torch.float64)
        return whole.index_add(0, self.positions, values)

    def loss(self, logarithms: torch.Tensor) -> torch.Tensor:
        """Return the mean negative log-likelihood of emitted candidates, in nats."""
        return -self.weighed(logarithms)[self.emitted].log().mean()

    def hits(self, logarithms: torch.Tensor) -> list[float]:
        """Return the share of positions whose token ranks among the top k, for each k in ``RANKS``."""
        chances, positions = self.weighed(logarithms).numpy(), self.positions.numpy()
        order = np.lexsort((-chances, positions))
        ranks = np.arange(len(order)) - np.searchsorted(positions, positions)
        emitted = ranks[self.emitted.numpy()[order]]
        return [float((emitted < most).sum() / (positions[-1] + 1)) for most in RANKS]


def read_candidates(conversations: Sequence[Sequence[RecordedTurn]], stores: StoreSet) -> Candidates:
    rows = [row for turns in conversations for row in _rows(turns, stores)]
    chances, recency, emitted = (np.concatenate([row[field] for row in rows]) for field in range(3))
    kinds = recency * SHAPE[1] + np.array([prob_class(chance) for chance in chances])
    positions = np.repeat(np.arange(len(rows)), [len(row[0]) for row in rows])
    return Candidates(*(torch.from_numpy(field) for field in (chances, kinds, positions, emitted)))


def _rows(turns: Sequence[RecordedTurn], stores: StoreSet) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield probabilities, distance classes and emitted flags of the candidates at each position of a conversation."""
    drafter = Hierarchy(stores.model, stores.corpus, budget=FixedBudget(1))
    drafter._records.weights["recency"][:] = 1
    at = drafter.address
    work = drafter.work[0]
    for turn in turns:
        drafter.begin(turn.prompt)
        for token in turn.answer:
            expand(at, 0, MIN_LEFT, MIN_CONTRIBUTION, DRAFTING)
            size = int(work["size"])
            chances, recency = work["chances"][:size].copy(), work["recency"][:size].copy()
            yield chances, recency, work["candidates"][:size] == token
            feed(at, np.array([token], np.int64))


def fit(candidates: Candidates, classes: int = SHAPE[0] * SHAPE[1]) -> torch.Tensor:
    """Return the fitted log gains by class."""
    logarithms = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logarithms], max_iter=100)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = candidates.loss(logarithms) + PENALTY * logarithms.square().sum()
        loss.backward()
        return loss

    optimizer.step(step)
    return logarithms.detach()


def main() -> None:
    conversations, stores = read_recordings(parser_of_recordings(__doc__).parse_args())
    halves = [read_candidates(conversations[half::2], stores) for half in range(2)]
    table = Table("gains", "log loss, nats", *(f"among {most}, %" for most in RANKS))
    shipped = torch.tensor(RECENCY, dtype=torch.float64).log().flatten()
    fitted = [fit(half) for half in halves]
    for name, tables in (
        ("none", [0 * shipped] * 2),
        ("fitted on the others", fitted[::-1]),
        ("shipped", [shipped] * 2),
    ):
        losses = [half.loss(table) for half, table in zip(halves, tables, strict=True)]
        hits = np.mean([half.hits(table) for half, table in zip(halves, tables, strict=True)], axis=0)
        table.row(name, f"{sum(losses) / 2:.4f}", *(f"{100 * share:.2f}" for share in hits))
    print("\nfitted on all, by distance and by probability:")
    for row in ((fitted[0] + fitted[1]) / 2).exp().reshape(SHAPE).tolist():
        print("    (" + ", ".join(f"{gain:.2f}" for gain in row) + "),")


if __name__ == "__main__":
    main()
