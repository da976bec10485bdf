"""Report data from benchmarks, and the temporal locality of 4-grams in answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.report.tables import (
    Durations,
    Repeats,
    SourceCounts,
    SourceShares,
    Speeds,
    Table,
    source_wins,
)
from hdtool.builders.evaluation.scores import ALL_TASKS, Scores, method_in_words, scores_of
from hdtool.data.bench_results import Results
from hdtool.data.conversation_shapes import AnsweredQuestion
from hdtool.data.documents import TOKEN_CHUNK
from hdtool.runtime.config.source_names import source_named
from hdtool.runtime.stores.model_store import ModelRecord
from hdtool.runtime.stores.store_set import StoreSet


@dataclass(frozen=True)
class BenchMeasurements:
    """Results of a benchmark, and of the same benchmark at other temperatures."""

    results: Results
    baseline: str | None = None
    other_temperatures: Sequence[Results] = ()

    @property
    def scores(self) -> Scores:
        return scores_of(self.results, self.baseline)

    def speedups(self) -> Speeds | None:
        """Return speedups over plain decoding, or over the baseline if one was named or plain decoding is missing.

        Returns None if the measured times allow no comparison.
        """
        scores = self.scores
        if scores.doubt:
            return None
        compared = scores.comparisons[0] if self.baseline is None else scores.baseline
        methods = {
            method: tuple(scores.speedup(task, method, compared) for task in scores.tasks)
            for method in self.results.run.methods
            if method != compared
        }
        return Speeds(tuple(scores.tasks), methods, compared)

    def durations(self) -> Durations:
        answers = {
            method: tuple(
                (len(turn.output_ids), turn.seconds, turn.first_seconds)
                for row in rows
                for turn in row.turns
                if turn.output_ids
            )
            for method, rows in self.results.answers.items()
        }
        return Durations({method: points for method, points in answers.items() if points})

    def temperatures(self) -> Speeds | None:
        """Return speeds by temperature; None if there is only one temperature."""
        runs = {run_temperature(run): run for run in (self.results, *self.other_temperatures)}
        if len(runs) < 2:
            return None
        overall = {at: scores_of(runs[at], self.baseline).tasks[ALL_TASKS] for at in sorted(runs)}
        methods = {
            method: tuple(scores[method].tokens_per_second for scores in overall.values())
            for method in self.results.run.methods
            if all(method in scores for scores in overall.values())  # llama.cpp is measured with greedy answers only
        }
        return Speeds(tuple(overall), methods)

    def shares(self) -> tuple[SourceShares, ...]:
        """Return, for each method that drafted from more than one source, the draft counts of its sources."""
        method_shares = (_shares(method, rows) for method, rows in self.results.answers.items())
        return tuple(shares for shares in method_shares if len(shares.sources) > 1)

    def tables(self) -> tuple[Table, ...]:
        scores = self.scores
        rows = (
            (
                method,
                None if score.identical is None else f"{score.identical:,} of {score.questions:,}",
                score.nodes_per_step,
                score.draft_us_per_step,
                score.model_ms_per_step,
            )
            for method, score in scores.tasks[ALL_TASKS].items()
        )
        columns = {
            "method": "",
            "identical answers": "",
            "nodes a step": ".1f",
            "drafting, µs a step": ",.0f",
            "in the model, ms a step": ".2f",
        }
        note = f"Identical: questions with the very tokens of {scores.reference} in all turns."
        return (
            _by_task(
                "Tokens per second", scores, lambda task, name: scores.tasks[task][name].tokens_per_second, ",.1f"
            ),
            _by_task(
                "Tokens per second of CPU time",
                scores,
                lambda task, name: scores.tasks[task][name].tokens_per_cpu_second,
                ",.1f",
            ),
            *(
                _by_task(
                    f"Times as fast as {method_in_words(compared)}",
                    scores,
                    partial(scores.speedup, reference=compared),
                    ".2f",
                )
                for compared in scores.comparisons
            ),
            _by_task("Tokens per step", scores, lambda task, name: scores.tasks[task][name].tokens_per_step, ".2f"),
            Table.of("All questions", columns, rows, note if scores.reference else ""),
        )


def run_temperature(results: Results) -> float:
    return float(results.run.options["temperature"])


def _by_task(title: str, scores: Scores, value: Callable[[str, str], float | None], form: str) -> Table:
    sizes = (
        f"{task} ({next(iter(scores_of_task.values())).questions})" for task, scores_of_task in scores.tasks.items()
    )
    rows = ((method, *(value(task, method) for task in scores.tasks)) for method in scores.tasks[ALL_TASKS])
    return Table.of(title, {"method": "", **dict.fromkeys(sizes, form)}, rows)


def _shares(method: str, rows: Sequence[AnsweredQuestion]) -> SourceShares:
    turns = [turn for row in rows for turn in row.turns if turn.output_ids]
    names = dict.fromkeys(name for turn in turns for name, counts in turn.sources.items() if counts["drafted"])
    wins = Counter[int]()
    for turn in turns:
        wins += source_wins(turn.drafted_by, turn.step_tokens)
    sources = {}
    for name in names:
        drafted, accepted, hits = (
            int(sum(turn.sources.get(name, {}).get(key, 0) for turn in turns))
            for key in ("drafted", "accepted", "hits")
        )
        sources[name] = SourceCounts(drafted, accepted, hits, wins[source_named(name)])
    # The first step is the prefill, for which nothing is drafted.
    return SourceShares(method, sum(len(turn.step_tokens) - 1 for turn in turns), sources)


NGRAM = 4
MAX_CURVE_POINTS = 16
"""Maximum number of points in the curve of repeated 4-grams over the answers."""
MAX_DISTANCE = 2**16
"""Longest distance to an earlier occurrence that the report shows, in tokens."""
HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier of the rolling hash; odd, so that multiplication is invertible."""

Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


def ngram_repeats(conversations: Sequence[Sequence[RecordedTurn]], store_set: StoreSet) -> Repeats | None:
    """Return shares of answers' 4-grams that occurred before, by place and distance; None if there are no 4-grams."""
    hashes = [ngram_hashes(turn.answer) for turns in conversations for turn in turns]
    if not sum(map(len, hashes)):
        return None
    origins = {
        "this conversation": [repeated_in_context(turn) for turns in conversations for turn in turns],
        "earlier answers": list(_in_earlier_answers(conversations)),
    }
    for name, text in _texts(store_set):
        known = _in_documents(np.concatenate(hashes), text)
        origins[name] = np.split(known, np.cumsum([len(turn_hashes) for turn_hashes in hashes])[:-1])
    origins["none of them"] = [~np.any(flags, axis=0) for flags in zip(*origins.values(), strict=True)]
    groups = [
        group for group in np.array_split(np.arange(len(hashes)), min(MAX_CURVE_POINTS, len(hashes))) if len(group)
    ]
    groups = [group for group in groups if sum(len(hashes[turn_index]) for turn_index in group)]
    back = repeat_distances(hashes)
    steps = 2 ** np.arange(int(np.log2(MAX_DISTANCE)) + 1)
    return Repeats(
        generations=tuple(int(group[-1]) + 1 for group in groups),
        origins={
            name: tuple(float(np.concatenate([flags[turn_index] for turn_index in group]).mean()) for group in groups)
            for name, flags in origins.items()
        },
        distances=tuple(steps.tolist()),
        shares_within=tuple((np.searchsorted(np.sort(back), steps, "right") / sum(map(len, hashes))).tolist()),
    )


def _texts(store_set: StoreSet) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    if model := store_set.model:
        yield "model store", ModelRecord.of(model.folder, model.manifest).text()
    if store_set.corpus:
        yield "corpus index", store_set.corpus.documents


def ngram_hashes(tokens: Sequence[int] | npt.NDArray[Any]) -> Hashes:
    """Return the hash of each 4-gram of ``tokens``."""
    ids = np.asarray(tokens).astype(np.uint64)
    count = max(0, len(ids) - NGRAM + 1)
    hashes = np.zeros(count, np.uint64)
    for place in range(NGRAM):
        hashes = hashes * HASH_MULTIPLIER + ids[place : place + count]
    return hashes


def repeated_in_context(turn: RecordedTurn) -> Flags:
    """Return a flag per 4-gram of the answer: True if it occurs in the prompt or earlier in the answer."""
    every = ngram_hashes([*turn.prompt, *turn.answer])
    _, first, which = np.unique(every, return_index=True, return_inverse=True)
    known = first[which] < np.arange(len(every))
    inside = max(0, len(turn.answer) - NGRAM + 1)
    return np.asarray(known[len(every) - inside :], np.bool_)


def _in_earlier_answers(conversations: Sequence[Sequence[RecordedTurn]]) -> Iterator[Flags]:
    """Yield, for each answer, a flag per 4-gram: True if it occurs in an answer of an earlier conversation."""
    seen: Hashes = np.empty(0, np.uint64)
    for turns in conversations:
        turn_hashes = [ngram_hashes(turn.answer) for turn in turns]
        for hashes in turn_hashes:
            yield np.isin(hashes, seen)
        seen = np.union1d(seen, np.concatenate([np.empty(0, np.uint64), *turn_hashes]))


def repeat_distances(hashes: Sequence[Hashes]) -> npt.NDArray[np.int64]:
    """Return the distance, in tokens, from each repeated 4-gram to its previous occurrence in the joined answers."""
    every = np.concatenate(hashes)
    starts = np.cumsum([0, *(len(turn_hashes) + NGRAM - 1 for turn_hashes in hashes[:-1])])
    positions = np.concatenate(
        [start + np.arange(len(turn_hashes)) for start, turn_hashes in zip(starts, hashes, strict=True)]
    )
    order = np.lexsort((positions, every))
    same = every[order][1:] == every[order][:-1]
    return np.asarray(np.diff(positions[order])[same], np.int64)


def _in_documents(hashes: Hashes, documents: npt.NDArray[Any]) -> Flags:
    """Return a flag per hash: True if the 4-gram with this hash occurs in the documents of a store."""
    distinct, which = np.unique(hashes, return_inverse=True)
    known = np.zeros(len(distinct), np.bool_)
    for at in range(0, len(documents), TOKEN_CHUNK):
        there = ngram_hashes(documents[at : at + TOKEN_CHUNK + NGRAM - 1])
        nearest = np.minimum(np.searchsorted(distinct, there), len(distinct) - 1)
        known[nearest[distinct[nearest] == there]] = True
    return np.asarray(known[which], np.bool_)
