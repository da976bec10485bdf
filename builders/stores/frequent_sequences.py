"""Writes documents to disk as tokens and counts their most frequent sequences in bounded memory.

Counts are exact: sequences with equal hashes are compared token by token. If the hash table cannot hold all sequences,
prefixes are split into parts that are counted separately, so memory depends on the table size and not on the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdtool.data.documents import Document, InputFile, Tokens, token_type
from hdtool.data.progress import progress_bar
from hdtool.data.stores.manifest import InputShare
from hdtool.data.texts_and_traces import RecordReader
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.stores.model_store import mix_hash, sequence_hash, slot_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DocumentFile:
    """Writes documents as tokens, each followed by an end token; empty documents are skipped."""

    def __init__(self, path: Path, end: int, sources: Sequence[InputFile]) -> None:
        self.width = token_type(end)
        self.size = 0
        """Number of tokens written, end tokens included."""
        self.documents = 0
        self.longest = 0
        self._end = self.width.type(end)
        self._sources = sources
        self._counted = np.zeros((len(sources), 2), np.int64)
        self._stream = open(path, "wb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> DocumentFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def add(self, ids: Sequence[int] | Tokens, source: int) -> None:
        length = len(ids)
        if not length:
            return
        closed = np.empty(length + 1, self.width)
        closed[:length], closed[length] = ids, self._end
        self._stream.write(closed.data)
        self.size += length + 1
        self.documents += 1
        self.longest = max(self.longest, length)
        self._counted[source] += (1, length)

    def shares(self) -> tuple[InputShare, ...]:
        return tuple(
            InputShare(source.name, source.sha256, records, tokens)
            for source, (records, tokens) in zip(self._sources, self._counted.tolist(), strict=True)
        )


TOKENIZER_BATCH = 1024


def tokenized(reading: RecordReader, tokenizer: PreTrainedTokenizerBase, title: str = "reading") -> Iterator[Document]:
    """Yield each text as a document, tokenized in batches, and show a progress bar."""
    texts = ((text, record.source) for record in reading for text in record.texts)
    with progress_bar(reading.total_bytes, title, unit="B") as progress:
        while batch := list(islice(texts, TOKENIZER_BATCH)):
            encoded = encode_texts([text for text, _ in batch], tokenizer)
            for ids, (_, source) in zip(encoded, batch, strict=True):
                yield Document(ids, source)
            progress.to(reading.bytes_read)


def encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of each text, without special tokens because drafts continue text and not markup."""
    if not texts:
        return []
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return encoded


MAX_TABLE_SLOTS = 1 << 21
"""Maximum number of slots of the counting table, a power of two. A slot takes about 40 bytes."""


@dataclass(frozen=True)
class CountedDocuments:
    """Documents in one token array. A sequence that occurs several times in a document counts once."""

    tokens: Ints
    end: int

    @property
    def position_type(self) -> np.dtype[Any]:
        return np.dtype(np.int32 if len(self.tokens) < 2**31 else np.int64)


FrequentSequences = npt.NDArray[np.int64]
"""Sequences of one length, as an array ``[4, sequences]``.

Row 0 is a position at which the sequence occurs, row 1 its count, row 2 the total count of all sequences with the same
prefix, and row 3 the number of distinct sequences with that prefix. A prefix is all tokens but the last.
"""


def most_frequent(answers: CountedDocuments, length: int, top_k: int) -> FrequentSequences:
    """Return the ``top_k`` most frequent sequences of ``length`` tokens; ties prefer smaller token ids."""
    parts = part_count(answers)
    frequent_by_part = (most_frequent_in_part(answers, length, part, parts, top_k) for part in range(parts))
    return merge_frequent(answers, length, frequent_by_part, top_k)


def part_count(answers: CountedDocuments) -> int:
    """Return the number of parts to split the prefixes into, so that each part probably fits the counting table."""
    return 1 << (len(answers.tokens) * 4 // (_slots(answers) * 3)).bit_length()


def most_frequent_in_part(
    answers: CountedDocuments, length: int, part: int, parts: int, top_k: int
) -> FrequentSequences:
    """Return the ``top_k`` most frequent sequences whose prefix hash falls into part number ``part``."""
    size = _slots(answers)
    table, repeats = np.full(size, -1, answers.position_type), np.zeros(size, np.uint32)
    if _count(answers.tokens, answers.end, length, part, parts, table, repeats):
        return _top_sequences(answers.tokens, _table_sequences(answers.tokens, length, table, repeats), length, top_k)
    del table, repeats  # the part does not fit: count its halves one after the other
    halves = (most_frequent_in_part(answers, length, half, 2 * parts, top_k) for half in (part, part + parts))
    return merge_frequent(answers, length, halves, top_k)


def merge_frequent(
    answers: CountedDocuments, length: int, frequent_by_part: Iterable[FrequentSequences], top_k: int
) -> FrequentSequences:
    """Return the ``top_k`` most frequent sequences among the results of several parts."""
    best = np.empty((4, 0), np.int64)
    for more in frequent_by_part:
        best = _top_sequences(answers.tokens, np.hstack([best, more]), length, top_k)
    return best


def _slots(answers: CountedDocuments) -> int:
    return min(table_size(len(answers.tokens)), MAX_TABLE_SLOTS)


def table_size(entries: int) -> int:
    """Return the number of hash table slots for ``entries``: a power of two that keeps at least half of them free."""
    return 1 << (2 * entries).bit_length()


def _table_sequences(tokens: Ints, length: int, table: Ints, repeats: Ints) -> FrequentSequences:
    """Return the sequences in a counting table; all sequences that share a prefix must be in the table.

    ``table`` holds a position of each sequence, and ``repeats`` its count less one.
    """
    used = np.flatnonzero(table >= 0)
    positions, counts = table[used].astype(np.int64), repeats[used] + np.int64(1)
    totals, distinct = _by_prefix(tokens, positions, counts, length - 1, np.full(table_size(len(used)), -1, np.int32))
    return np.stack([positions, counts, totals, distinct])


def _top_sequences(tokens: Ints, sequences: FrequentSequences, length: int, limit: int) -> FrequentSequences:
    """Return the ``limit`` most frequent of ``sequences``, which must be distinct; ties prefer smaller token ids."""
    positions, counts, *_ = sequences
    if len(positions) <= limit:
        return sequences
    min_count = np.sort(counts)[-limit]  # with many ties, np.sort is faster than np.partition
    best = [np.flatnonzero(counts > min_count)]
    equal = np.flatnonzero(counts == min_count)
    missing = limit - len(best[0])
    for offset in range(length):
        column = tokens[positions[equal] + offset].astype(np.int64)  # np.partition is slow for 16-bit integers
        largest = np.partition(column, missing - 1)[missing - 1]
        best.append(equal[column < largest])
        missing -= len(best[-1])
        equal = equal[column == largest]
    return sequences[:, np.concatenate([*best, equal])]


@compiled
def _count(tokens: Ints, end: int, length: int, part: int, parts: int, positions: Ints, repeats: Ints) -> bool:
    """Count the sequences whose prefix hash falls into ``part``; return False if the table is too small.

    ``positions`` is the hash table: each slot holds a sequence's last position, or -1. ``repeats`` counts, per slot,
    the documents that contain the sequence, without the first of them.
    """
    room, mask = len(positions) // 4 * 3, len(positions) - 1
    begin = 0
    for last in range(len(tokens)):
        if tokens[last] == end:
            begin = last + 1
        at = last + 1 - length
        if at < begin:
            continue
        prefix = sequence_hash(tokens, at, length - 1)
        if np.int64(prefix >> np.uint64(32)) & (parts - 1) != part:
            continue
        slot = slot_of(mix_hash(prefix, np.int64(tokens[last])), mask)
        while positions[slot] >= 0 and not _equal_sequences(tokens, positions[slot], at, length):
            slot = (slot + 1) & mask
        if positions[slot] < 0:
            room -= 1
            if room < 0:
                return False
        elif positions[slot] < begin:
            repeats[slot] += 1
        positions[slot] = at
    return True


@compiled
def _by_prefix(tokens: Ints, positions: Ints, counts: Ints, prefix: int, table: Ints) -> tuple[Ints, Ints]:
    """Return ``(totals, distinct)``: per sequence, the total count and the number of all sequences with its prefix."""
    mask = len(table) - 1
    firsts = np.empty(len(positions), np.int32)  # index of the first sequence with the same prefix
    totals, distinct = np.zeros(len(positions), np.int64), np.zeros(len(positions), np.int64)
    for number in range(len(positions)):
        slot = slot_of(sequence_hash(tokens, positions[number], prefix), mask)
        while table[slot] >= 0 and not _equal_sequences(tokens, positions[table[slot]], positions[number], prefix):
            slot = (slot + 1) & mask
        if table[slot] < 0:
            table[slot] = number
        firsts[number] = table[slot]
        totals[firsts[number]] += counts[number]
        distinct[firsts[number]] += 1
    for number in range(len(positions)):
        totals[number], distinct[number] = totals[firsts[number]], distinct[firsts[number]]
    return totals, distinct


@compiled
def _equal_sequences(tokens: Ints, first: int, second: int, length: int) -> bool:
    for offset in range(length):  # noqa: SIM110 - compiled code has no generators
        if tokens[first + offset] != tokens[second + offset]:
            return False
    return True
