"""Temporal locality: earlier occurrences of the 4-grams of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.data.stores.documents import CHUNK
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.evaluation.report.tables import Repeats
from hdtool.runtime.stores.model_record import ModelRecord
from hdtool.runtime.stores.store_set import StoreSet

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
