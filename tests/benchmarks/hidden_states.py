"""Estimates what the target's hidden states could add to draft probabilities.

    python -m tests.benchmarks.hidden_states recording.jsonl --model MODEL [--model-db FOLDER] [--corpus-db FOLDER]

The recording must hold MODEL's own answers. When the next token is drafted, the hidden state that chose the last token
is known. It is compared with the states that chose the same token at earlier places of the conversation. Candidates of
`hd`, recency included, get gains by the largest similarity among their places and by probability. The gains are fitted
on every other conversation and evaluated on the rest. Only the first token of a tree has these similarities, and
nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.drafters.hierarchy.candidates import DRAFTING, prob_class
from hdtool.runtime.drafters.hierarchy.drafter import Hierarchy
from hdtool.runtime.drafters.hierarchy.tree import MIN_CONTRIBUTION, MIN_LEFT, expand, feed
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load
from tests.benchmarks.methods import parser_of_recordings, read_recordings
from tests.benchmarks.recency import RANKS, SHAPE, Candidates, fit
from tests.support.one_sequence import OneSequence

MAX_POSITIONS = 64
SIMILARITIES = np.array([-0.2, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
"""Borders of the similarity classes; class 0 is a candidate without an earlier place."""
CLASSES = (len(SIMILARITIES) + 2) * SHAPE[1]


def read_candidates(
    model: OneSequence, conversations: Sequence[Sequence[RecordedTurn]], stores: StoreSet
) -> Candidates:
    rows = [row for turns in conversations for row in _rows(model, turns, stores)]
    chances, similarity, emitted = (np.concatenate([row[field] for row in rows]) for field in range(3))
    kinds = similarity * SHAPE[1] + np.array([prob_class(chance) for chance in chances])
    positions = np.repeat(np.arange(len(rows)), [len(row[0]) for row in rows])
    return Candidates(*(torch.from_numpy(field) for field in (chances, kinds, positions, emitted)))


def _rows(
    model: OneSequence, turns: Sequence[RecordedTurn], stores: StoreSet
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield probabilities, similarity classes and emitted flags of the candidates at each position."""
    drafter = Hierarchy(stores.model, stores.corpus, budget=FixedBudget(1))
    work = drafter.work[0]
    for turn in turns:
        drafter.begin(turn.prompt)
        tokens, states = np.array([*turn.prompt, *turn.answer]), _states(model, [*turn.prompt, *turn.answer])
        for at, token in enumerate(turn.answer, len(turn.prompt)):
            expand(drafter.address, 0, MIN_LEFT, MIN_CONTRIBUTION, DRAFTING)
            candidates = work["candidates"][: int(work["size"])].copy()
            classes = _classes(candidates, tokens[:at], states)
            yield work["chances"][: len(candidates)].copy(), classes, candidates == token
            feed(drafter.address, np.array([token], np.int64))


def _states(model: OneSequence, tokens: list[int]) -> np.ndarray:
    """Return the hidden states of all tokens, centered and normalized to unit length."""
    model.prefill(tokens)
    assert model.verified.hidden is not None
    states = model.verified.hidden.float().numpy()
    states = states - states.mean(0)
    return np.asarray(states / np.linalg.norm(states, axis=1, keepdims=True))


def _classes(candidates: np.ndarray, tokens: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Return the class of the largest similarity among places where each candidate followed the last token."""
    last = len(tokens) - 1
    places = np.flatnonzero(tokens[1:last] == tokens[last])[-MAX_POSITIONS:] + 1
    similarities = states[places - 1] @ states[last - 1]
    largest: dict[int, float] = {}
    for place, similarity in zip(places, similarities, strict=True):
        following = int(tokens[place + 1])
        largest[following] = max(float(similarity), largest.get(following, -1.0))
    return np.array(
        [1 + np.searchsorted(SIMILARITIES, largest[int(one)]) if int(one) in largest else 0 for one in candidates],
        np.int64,
    )


def main() -> None:
    options = parser_of_recordings(__doc__).parse_args()
    conversations, stores = read_recordings(options)
    target = load(ModelConfig(options.model, device="cpu")).target
    target.watch_hidden()
    model = OneSequence(target)
    halves = [read_candidates(model, conversations[half::2], stores) for half in range(2)]
    print("| gains | log loss, nats |" + "".join(f" among {most}, % |" for most in RANKS))
    print("|---|---|" + "---|" * len(RANKS))
    for name, gains in (
        ("none", [torch.zeros(CLASSES)] * 2),
        ("fitted", [fit(half, CLASSES) for half in halves[::-1]]),
    ):
        losses = [half.loss(own) for half, own in zip(halves, gains, strict=True)]
        hits = np.mean([half.hits(own) for half, own in zip(halves, gains, strict=True)], axis=0)
        print(f"| {name} | {sum(map(float, losses)) / 2:.4f} |" + "".join(f" {100 * hit:.2f} |" for hit in hits))


if __name__ == "__main__":
    main()
