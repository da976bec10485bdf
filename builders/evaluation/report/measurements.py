"""Temporal locality: earlier occurrences of the 4-grams of answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.report.tables import Durations, Repeats, Share, Shares, Speeds, Table, wins_of
from hdtool.builders.evaluation.scores import OVERALL, Scores, in_words, scores_of
from hdtool.data.bench_results import Results
from hdtool.data.conversation_shapes import AnsweredQuestion
from hdtool.data.stores.store_files import CHUNK
from hdtool.runtime.source_names import source_named
from hdtool.runtime.stores.model_store import ModelRecord
from hdtool.runtime.stores.store_set import StoreSet


@dataclass(frozen=True)
class Measured:
    """The results of a benchmark, and those of the same one at other temperatures."""

    results: Results
    baseline: str | None = None
    others: Sequence[Results] = ()

    @property
    def scores(self) -> Scores:
        return scores_of(self.results, self.baseline)

    def speedups(self) -> Speeds:
        """Over plain decoding, unless it was not measured or another baseline is named."""
        scores = self.scores
        other = scores.comparisons[0] if self.baseline is None else scores.baseline
        methods = {
            method: tuple(scores.speedup(task, method, other) for task in scores.tasks)
            for method in self.results.run.methods
            if method != other
        }
        return Speeds(tuple(scores.tasks), methods, other)

    def durations(self) -> Durations:
        answers = {
            method: tuple((len(turn.output_ids), turn.seconds) for row in rows for turn in row.turns if turn.output_ids)
            for method, rows in self.results.answers.items()
        }
        return Durations({method: points for method, points in answers.items() if points})

    def temperatures(self) -> Speeds | None:
        """None if there is only one temperature."""
        runs = {temperature_of(one): one for one in (self.results, *self.others)}
        if len(runs) < 2:
            return None
        overall = {at: scores_of(runs[at], self.baseline).tasks[OVERALL] for at in sorted(runs)}
        methods = {
            method: tuple(scores[method].tokens_per_second for scores in overall.values())
            for method in self.results.run.methods
            if all(method in scores for scores in overall.values())  # llama.cpp has greedy answers alone
        }
        return Speeds(tuple(overall), methods)

    def shares(self) -> tuple[Shares, ...]:
        """The sources of the methods that drafted from more than one."""
        found = (_shares(method, rows) for method, rows in self.results.answers.items())
        return tuple(shares for shares in found if len(shares.sources) > 1)

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
            for method, score in scores.tasks[OVERALL].items()
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
            *(
                _by_task(f"Times as fast as {in_words(other)}", scores, partial(scores.speedup, other=other), ".2f")
                for other in scores.comparisons
            ),
            _by_task("Tokens per step", scores, lambda task, name: scores.tasks[task][name].tokens_per_step, ".2f"),
            Table.of("All questions", columns, rows, note if scores.reference else ""),
        )


def temperature_of(results: Results) -> float:
    return float(results.run.options["temperature"])


def _by_task(title: str, scores: Scores, value: Callable[[str, str], float], form: str) -> Table:
    sizes = (f"{task} ({next(iter(found.values())).questions})" for task, found in scores.tasks.items())
    rows = ((method, *(value(task, method) for task in scores.tasks)) for method in scores.tasks[OVERALL])
    return Table.of(title, {"method": "", **dict.fromkeys(sizes, form)}, rows)


def _shares(method: str, rows: Sequence[AnsweredQuestion]) -> Shares:
    turns = [turn for row in rows for turn in row.turns if turn.output_ids]
    names = dict.fromkeys(name for turn in turns for name, found in turn.sources.items() if found["drafted"])
    wins = Counter[int]()
    for turn in turns:
        wins += wins_of(turn.drafted_by, turn.step_tokens)
    sources = {}
    for name in names:
        drafted, accepted, hits = (
            int(sum(turn.sources.get(name, {}).get(key, 0) for turn in turns))
            for key in ("drafted", "accepted", "hits")
        )
        sources[name] = Share(drafted, accepted, hits, wins[source_named(name)])
    # Nothing is drafted for the pass over the prompt.
    return Shares(method, sum(len(turn.step_tokens) - 1 for turn in turns), sources)


LENGTH = 4
GROUPS = 16
"""Points of the curve over the answers, at most."""
FARTHEST = 2**16
"""Tokens back."""
MIX = np.uint64(0x9E3779B97F4A7C15)
"""The multiplier of the rolling hash; odd, so that multiplication is invertible."""

Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


def repeats(conversations: Sequence[Sequence[RecordedTurn]], store_set: StoreSet) -> Repeats | None:
    """The repeats of the 4-grams of answers; None if no answer has four tokens."""
    hashes = [hashes_of(turn.answer) for turns in conversations for turn in turns]
    if not sum(map(len, hashes)):
        return None
    places = {
        "this conversation": [in_context(turn) for turns in conversations for turn in turns],
        "earlier answers": list(_in_earlier_answers(conversations)),
    }
    for name, text in _texts(store_set):
        known = _known(np.concatenate(hashes), text)
        places[name] = np.split(known, np.cumsum([len(own) for own in hashes])[:-1])
    places["none of them"] = [~np.any(found, axis=0) for found in zip(*places.values(), strict=True)]
    groups = [group for group in np.array_split(np.arange(len(hashes)), min(GROUPS, len(hashes))) if len(group)]
    groups = [group for group in groups if sum(len(hashes[place]) for place in group)]
    back = distances(hashes)
    steps = 2 ** np.arange(int(np.log2(FARTHEST)) + 1)
    return Repeats(
        generations=tuple(int(group[-1]) + 1 for group in groups),
        places={
            name: tuple(float(np.concatenate([found[place] for place in group]).mean()) for group in groups)
            for name, found in places.items()
        },
        distances=tuple(steps.tolist()),
        within=tuple((np.searchsorted(np.sort(back), steps, "right") / sum(map(len, hashes))).tolist()),
    )


def _texts(store_set: StoreSet) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    if model := store_set.model:
        yield "model store", ModelRecord.of(model.folder, model.manifest).text()
    if store_set.corpus:
        yield "corpus index", store_set.corpus.documents


def hashes_of(tokens: Sequence[int] | npt.NDArray[Any]) -> Hashes:
    """A hash of each 4-gram of a text."""
    ids = np.asarray(tokens).astype(np.uint64)
    count = max(0, len(ids) - LENGTH + 1)
    hashes = np.zeros(count, np.uint64)
    for place in range(LENGTH):
        hashes = hashes * MIX + ids[place : place + count]
    return hashes


def in_context(turn: RecordedTurn) -> Flags:
    """Which 4-grams of an answer occur before it, or earlier in it."""
    every = hashes_of([*turn.prompt, *turn.answer])
    _, first, which = np.unique(every, return_index=True, return_inverse=True)
    known = first[which] < np.arange(len(every))
    inside = max(0, len(turn.answer) - LENGTH + 1)
    return np.asarray(known[len(every) - inside :], np.bool_)


def _in_earlier_answers(conversations: Sequence[Sequence[RecordedTurn]]) -> Iterator[Flags]:
    """Which 4-grams occur in an answer of an earlier conversation."""
    seen: Hashes = np.empty(0, np.uint64)
    for turns in conversations:
        own = [hashes_of(turn.answer) for turn in turns]
        for hashes in own:
            yield np.isin(hashes, seen)
        seen = np.union1d(seen, np.concatenate([np.empty(0, np.uint64), *own]))


def distances(hashes: Sequence[Hashes]) -> npt.NDArray[np.int64]:
    """Tokens between each repeated 4-gram and its last occurrence in the stream of all answers."""
    every = np.concatenate(hashes)
    starts = np.cumsum([0, *(len(own) + LENGTH - 1 for own in hashes[:-1])])
    places = np.concatenate([start + np.arange(len(own)) for start, own in zip(starts, hashes, strict=True)])
    order = np.lexsort((places, every))
    same = every[order][1:] == every[order][:-1]
    return np.asarray(np.diff(places[order])[same], np.int64)


def _known(hashes: Hashes, documents: npt.NDArray[Any]) -> Flags:
    """Which 4-grams occur in the documents of a store."""
    wanted, which = np.unique(hashes, return_inverse=True)
    known = np.zeros(len(wanted), np.bool_)
    for at in range(0, len(documents), CHUNK):
        there = hashes_of(documents[at : at + CHUNK + LENGTH - 1])
        place = np.minimum(np.searchsorted(wanted, there), len(wanted) - 1)
        known[place[wanted[place] == there]] = True
    return np.asarray(known[which], np.bool_)
