"""Build a model store from a model's answers: their most frequent n-grams.

The answers are streamed to disk first. From there the most frequent sequences of two to five tokens are
counted, several lengths at once. Those of each length are sorted by prefix and written twice: as the flat
arrays of lookups, and as the LMDB file of listings, while longer ones are still counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hdtool.builders.stores.document_file import DocumentFile
from hdtool.builders.stores.engine import Engine, LocalEngine
from hdtool.builders.stores.lmdb_entries import Group, write_entries
from hdtool.builders.stores.sequences import Answers, table_size
from hdtool.data.errors import StoreError
from hdtool.data.stores.documents import Document, Source, token_type
from hdtool.data.stores.store import Checkpoint, FolderCheck, Manifest, TokenizerFingerprint, building
from hdtool.runtime.config import BuildConfig
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.stores.model_store import (
    DISTINCT,
    HASH_HIGH,
    HASH_LOW,
    KEY_WIDTH,
    KIND,
    LONGEST_PREFIX,
    LONGEST_PROBE,
    PHRASE,
    START,
    STOP,
    TOTAL,
    Ints,
    halves,
    sequence_hash,
    slot_of,
)

DOUBLINGS = 3
"""How often the hash table is doubled at most, for keys that lie too close together."""


def build_model_store(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: TokenizerFingerprint,
    sources: Sequence[Source],
    *,
    top_k: int = BuildConfig.top_k,
    per_key: int = BuildConfig.per_key,
    once_per_document: bool = True,
    engine: Engine | None = None,
    model: Checkpoint | None = None,
    rankings: Ints | None = None,
    check: FolderCheck | None = None,
) -> Manifest:
    """Write the store of all documents to ``folder``, replacing the one there in one step.

    The ``top_k`` most frequent sequences of each length are kept, as prefixes with their next token, and those
    of five tokens also as phrases after their first token; at most ``per_key`` for each prefix or token. Among
    equals the one with the smaller tokens comes first. ``model`` gave the answers, and ``rankings``
    are its own, of the vocabulary; with them, a store without any document can be built. ``check`` raises if the store
    at ``folder`` must stay.
    """
    end = tokenizer.vocab_size
    with building(folder, check) as build:
        with DocumentFile(build.path("documents"), end, sources) as file:
            for document in documents:
                file.add(document.ids, document.source)
        if not file.longest and (sources or rankings is None):
            raise StoreError("the answers hold no text at all: name files that do")
        if file.longest <= PHRASE and file.documents:
            raise StoreError(f"the longest answer has {file.longest} tokens: name files with answers of more than 4")
        kind = token_type(end)
        # An empty file cannot be mapped.
        tokens = np.asarray(np.memmap(build.path("documents"), kind, "r")) if file.size else np.empty(0, kind)
        answers = Answers(tokens, end, once_per_document)
        groups: list[Group] = []
        in_order = (engine or LocalEngine()).mine(answers, top_k, per_key)
        numbered = enumerate(_collected(in_order, groups), start=1)
        write_entries(build.path("entries"), numbered, (LONGEST_PREFIX + 1) * min(top_k, len(tokens)))
        *by_length, phrases = groups
        arrays = {**_hashed(by_length), **_by_token(phrases, end)}
        if rankings is not None:
            arrays["rankings"] = rankings
        for part, array in arrays.items():
            array.tofile(build.path(part))
        shares = file.shares()
        counts = {
            "tokens": sum(share.tokens for share in shares),
            "documents": file.documents,
            "keys": len(arrays["keys"]),
            "continuations": len(arrays["rows"]),
            "phrases": len(arrays["phrases"]),
            **({"rankings": len(rankings)} if rankings is not None else {}),
        }
        options = {
            "token_bytes": tokens.itemsize,
            "top_k": top_k,
            "per_key": per_key,
            "once_per_document": once_per_document,
        }
        return build.commit(Manifest(KIND, tokenizer, counts, options, shares, model=model))


def _collected(groups: Iterable[Group], into: list[Group]) -> Iterator[Group]:
    for group in groups:
        into.append(group)
        yield group


def _hashed(by_length: list[Group]) -> dict[str, Ints]:
    """The prefixes of all lengths as a hash table, and what comes next after each."""
    keys = np.empty((sum(len(group.heads) for group in by_length), KEY_WIDTH), np.int32)
    key = row = 0
    for group in by_length:
        own = keys[key : key + len(group.heads)]
        own[:, START], own[:, STOP] = group.starts + row, group.stops + row
        own[:, TOTAL], own[:, DISTINCT] = group.totals, group.distinct
        key, row = key + len(group.heads), row + len(group.counts)
    rows = np.concatenate([np.column_stack([group.tokens, group.counts]) for group in by_length])
    heads = [group.heads for group in by_length]
    return {"slots": _table(keys, heads), "keys": keys, "rows": rows.astype(np.int32)}


def _table(keys: Ints, heads: list[Ints]) -> Ints:
    """The hash table of all prefixes, so large that a search for each ends within ``LONGEST_PROBE`` slots.

    Keys with equal hashes are neighbours in any table: after some doublings the rest is left out.
    """
    size = table_size(len(keys))
    for _ in range(DOUBLINGS + 1):
        slots = np.full(size, -1, np.int32)
        firsts = np.cumsum([0, *map(len, heads)])
        if not sum(_fill(slots, keys, own, first) for own, first in zip(heads, firsts, strict=False)):
            break
        size *= 2
    return slots


@compiled
def _fill(slots: Ints, keys: Ints, heads: Ints, first: int) -> int:
    """Enter prefixes into the hash table, the keys from ``first`` on; the number of those without a slot."""
    mask, left_out = len(slots) - 1, 0
    for number in range(len(heads)):
        prefix_hash = sequence_hash(heads[number], 0, heads.shape[1])
        keys[first + number, HASH_LOW], keys[first + number, HASH_HIGH] = halves(prefix_hash)
        slot, probes = slot_of(prefix_hash, mask), 1
        while slots[slot] >= 0 and probes < LONGEST_PROBE:
            slot = (slot + 1) & mask
            probes += 1
        if slots[slot] < 0:
            slots[slot] = first + number
        else:
            left_out += 1
    return left_out


def _by_token(phrases: Group, end: int) -> dict[str, Ints]:
    """Phrases, and for each token where those begin that follow it."""
    sizes = np.zeros(end + 1, np.int32)
    sizes[phrases.heads[:, 0].astype(np.int64) + 1] = phrases.stops - phrases.starts
    rows = np.column_stack([phrases.tokens, phrases.counts])
    return {"heads": np.cumsum(sizes, dtype=np.int32), "phrases": rows.astype(np.int32)}
