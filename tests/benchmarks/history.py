"""What a history store takes: ``python -m tests.benchmarks.history [--tokens 10000 1000000 10000000]``.

Conversations of 300 tokens, half of which repeat earlier ones, are appended one by one. Times are those of the process,
after a warm-up; the disk is asked to write once a second, as always. A look-up is that of the drafter at the root.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from hdtool.data.stores.store import TokenizerFingerprint
from hdtool.runtime.environment import machine
from hdtool.runtime.stores.history_store import HistoryStore
from hdtool.runtime.stores.log_search import LONGEST_MATCH, matches

VOCABULARY, ANSWER, PIECE, TAIL = 32_000, 300, 10, 8
MARK, MODEL = TokenizerFingerprint("benchmark", VOCABULARY), "0" * 16
REPEATED = 1 << 16
"""The latest tokens, which answers repeat."""
LOOKUPS, OPENINGS = 20_000, 5


class Speech:
    """Answers that repeat pieces of earlier ones."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._said = self._new(REPEATED)

    def _new(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return (VOCABULARY * self._rng.random(count) ** 3).astype(np.int32)

    def answer(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        pieces = []
        for number in range(ANSWER // PIECE):
            start = int(self._rng.integers(REPEATED - PIECE))
            pieces.append(self._said[start : start + PIECE] if number % 2 else self._new(PIECE))
        answer = np.concatenate(pieces)
        start = int(self._rng.integers(REPEATED - ANSWER))
        self._said[start : start + ANSWER] = answer
        return answer


def fill(store: HistoryStore, speech: Speech, tokens: int) -> tuple[float, float]:
    """Append so many tokens; the seconds of all appends, and the longest of one."""
    spent = []
    for _ in range(tokens // ANSWER):
        answer = speech.answer()
        started = time.perf_counter()
        assert store.append(answer, answer[:TAIL])
        spent.append(time.perf_counter() - started)
    return sum(spent), max(spent)


def opening(folder: Path) -> float:
    """The median milliseconds of an opening; the file of LMDB is opened once in a process."""
    taken = []
    for _ in range(OPENINGS):
        started = time.perf_counter()
        store = HistoryStore.open(folder, MARK, MODEL)
        taken.append(time.perf_counter() - started)
        del store
    return median(taken) * 1e3


def lookups(store: HistoryStore, context: Callable[[int], np.ndarray[tuple[int], np.dtype[np.int64]]]) -> str:
    taken = np.empty(LOOKUPS)
    for number in range(LOOKUPS):
        tail = context(number)
        started = time.perf_counter()
        matches(store.log, tail)
        taken[number] = time.perf_counter() - started
    low, high = np.percentile(taken[LOOKUPS // 10 :] * 1e6, (50, 99))
    return f"{low:.2f} / {high:.2f} µs"


def row(tokens: int, folder: Path) -> str:
    store, speech, rng = HistoryStore.open(folder, MARK, MODEL), Speech(), np.random.default_rng(1)
    spent, longest = fill(store, speech, tokens)
    count = tokens // ANSWER * ANSWER
    disk = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    mapped = store.nbytes
    del store
    opened = opening(folder)
    store = HistoryStore.open(folder, MARK, MODEL)

    def tail(_: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        start = int(rng.integers(max(1, store.places - LONGEST_MATCH)))
        return store.tokens(start, LONGEST_MATCH).astype(np.int64)

    return (
        f"| {tokens:,} | {spent / count * 1e6:.2f} µs | {longest * 1e3:.0f} ms | {opened:.1f} ms "
        f"| {disk / count:.1f} | {mapped / count:.1f} | {lookups(store, tail)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--folder", type=Path, help="where the stores are written; a temporary folder by default")
    options = parser.parse_args()
    print(f"{machine()}\n")
    print(
        "| tokens | append, a token | longest append | opening | bytes of disk a token | mapped | look-up, p50 / p99 |"
    )
    print("|---|---|---|---|---|---|---|")
    with TemporaryDirectory(dir=options.folder) as folder:
        row(10_000, Path(folder, "warm-up"))
        for tokens in options.tokens:
            print(row(tokens, Path(folder, str(tokens))), flush=True)


if __name__ == "__main__":
    main()
