"""Measures what a history store costs, by size: ``python -m tests.benchmarks.history``.

    python -m tests.benchmarks.history [--tokens 10000 1000000 10000000]

Conversations of 300 tokens, half of which repeat earlier ones, are appended one by one. Times are wall-clock times of
the process after a warm-up; the store syncs to disk once a second, as usual. A lookup is the drafter's lookup at the
root.

Then drafts are timed without a history and with each store, in turn at every token of the same new answers, half of
which repeat the last conversations of all stores. A draft of at most 32 nodes comes from the conversation and the
store, and then the drafter learns from the next token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.stores.history_store import History, HistoryStore
from hdtool.runtime.stores.token_log import MAX_MATCH_TOKENS, matches
from tests.benchmarks.laboratory import Table, parser_of, seconds_of

VOCABULARY, ANSWER, PIECE, TAIL = 32_000, 300, 10, 8
Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
MARK, MODEL = TokenizerFingerprint("benchmark", VOCABULARY), "0" * 16
REPEATED = 1 << 16
"""Number of latest tokens that answers may repeat."""
LOOKUPS, OPENINGS = 20_000, 5
NODES, PROMPT, SHARED = 32, 40, 30


class Speech:
    """Generates answers that repeat pieces of earlier ones."""

    def __init__(self, seed: int, said: Tokens | None = None) -> None:
        self._rng = np.random.default_rng(seed)
        self._said = self._new(REPEATED) if said is None else said

    def _new(self, count: int) -> Tokens:
        return (VOCABULARY * self._rng.random(count) ** 3).astype(np.int32)

    def answer(self) -> Tokens:
        pieces = []
        for number in range(ANSWER // PIECE):
            start = int(self._rng.integers(len(self._said) - PIECE))
            pieces.append(self._said[start : start + PIECE] if number % 2 else self._new(PIECE))
        answer = np.concatenate(pieces)
        start = int(self._rng.integers(len(self._said) - ANSWER))
        self._said[start : start + ANSWER] = answer
        return answer


def fill(store: HistoryStore, speech: Speech, tokens: int) -> tuple[float, float]:
    """Append ``tokens`` tokens of answers; return the total seconds and those of the slowest append."""
    spent = []
    for _ in range(tokens // ANSWER):
        answer = speech.answer()
        started = time.perf_counter()
        assert store.append(answer, answer[:TAIL])
        spent.append(time.perf_counter() - started)
    return sum(spent), max(spent)


def opening(folder: Path) -> float:
    """Return the median milliseconds to open a store; LMDB opens its file once per process."""
    return 1e3 * median(seconds_of(lambda: HistoryStore.open(folder, MARK, MODEL)) for _ in range(OPENINGS))


def lookups(store: HistoryStore, context: Callable[[int], np.ndarray[tuple[int], np.dtype[np.int64]]]) -> str:
    taken = np.empty(LOOKUPS)
    for number in range(LOOKUPS):
        taken[number] = seconds_of(partial(matches, store.log, context(number)))
    low, high = np.percentile(taken[LOOKUPS // 10 :] * 1e6, (50, 99))
    return f"{low:.2f} / {high:.2f} µs"


def drafts(stores: list[HistoryStore], new: list[list[int]]) -> list[Floats]:
    """Time drafts at each token of new answers, without a history and with each store.

    The arrays have the columns: microseconds of the draft, microseconds of learning, and draft nodes.
    """
    budget, none = FixedBudget(NODES), Verified(torch.empty(0))
    drafters = [Hierarchy(budget=budget)]
    drafters += [Hierarchy(budget=budget, history=History(store=store)) for store in stores]
    taken: list[list[tuple[float, float, float]]] = [[] for _ in drafters]
    for answer in new:
        for drafter in drafters:
            drafter.begin(answer[:PROMPT])
        for at in range(PROMPT, len(answer)):
            for turn in range(len(drafters)):
                number = (at + turn) % len(drafters)
                context, accepted = answer[:at], Accepted([], answer[at : at + 1])
                started = time.perf_counter()
                tree = drafters[number].draft(context)
                drafted = time.perf_counter()
                drafters[number].observe(accepted, none)
                learned = time.perf_counter()
                taken[number].append(((drafted - started) * 1e6, (learned - drafted) * 1e6, len(tree)))
    return [np.array(each[len(each) // 10 :]) for each in taken]


def row(tokens: int, folder: Path, last: list[Tokens]) -> list[str]:
    store, rng = HistoryStore.open(folder, MARK, MODEL), np.random.default_rng(1)
    spent, longest = fill(store, Speech(0), tokens - len(last) * ANSWER)
    count = max(0, tokens - len(last) * ANSWER) // ANSWER * ANSWER
    for answer in last:
        store.append(answer, answer[:TAIL])
    disk = sum(path.stat().st_blocks * 512 for path in folder.iterdir()) / tokens
    mapped = store.nbytes / tokens
    del store
    opened = opening(folder)
    store = HistoryStore.open(folder, MARK, MODEL)

    def tail(_: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        start = int(rng.integers(max(1, store.num_positions - MAX_MATCH_TOKENS)))
        return store.tokens(start, MAX_MATCH_TOKENS).astype(np.int64)

    appended = f"{spent / count * 1e6:.2f} µs", f"{longest * 1e3:.0f} ms"
    return [f"{tokens:,}", *appended, f"{opened:.1f} ms", f"{disk:.1f}", f"{mapped:.1f}", lookups(store, tail)]


def main() -> None:
    parser = parser_of(__doc__, tokens=[10_000, 1_000_000, 10_000_000], answers=40)
    parser.add_argument("--folder", type=Path, help="where the stores are written; a temporary folder by default")
    options = parser.parse_args()
    print(f"{machine()}\n")
    heads = "append, a token", "longest append", "opening", "bytes of disk a token", "mapped", "look-up, p50 / p99"
    table = Table("tokens", *heads)
    with TemporaryDirectory(dir=options.folder) as folder:
        shared = Speech(1)
        last = [shared.answer() for _ in range(SHARED)]
        row(10_000, Path(folder, "warm-up"), last)
        for tokens in options.tokens:
            table.row(*row(tokens, Path(folder, str(tokens)), last))
        new = [Speech(2 + number, np.concatenate(last)).answer().tolist() for number in range(options.answers)]
        stores = [HistoryStore(Path(folder, str(tokens)), read_only=True) for tokens in options.tokens]
        taken = drafts(stores, new)
    print()
    table = Table("tokens of the history", "draft, p50 / p99", "learning, p50", "nodes a draft")
    for size, each in zip(["none", *(f"{tokens:,}" for tokens in options.tokens)], taken, strict=True):
        (middle, learning, _), high = np.median(each, 0), np.percentile(each[:, 0], 99)
        table.row(size, f"{middle:.1f} / {high:.1f} µs", f"{learning:.1f} µs", f"{each[:, 2].mean():.1f}")


if __name__ == "__main__":
    main()
