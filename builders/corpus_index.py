"""Build a corpus index: documents of token ids in, a store of suffix-array shards out.

The documents stream to disk first; then every shard is sorted where it lies, several at once, so
that memory is bounded by the size of a shard and not by that of the corpus.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.data.documents import Document, Source, token_type
from hdtool.data.errors import StoreError
from hdtool.data.store import Manifest, SourceShare, StoreBuild, TokenizerMark, building, shares_of
from hdtool.runtime.config import BuildConfig
from hdtool.runtime.corpus_index import KIND, ShardPlace

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class _Written:
    """The corpus on disk, before it is sorted."""

    shards: list[ShardPlace]
    shares: tuple[SourceShare, ...]


def build_corpus_index(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: TokenizerMark,
    sources: Sequence[Source],
    *,
    shard_bytes: int = BuildConfig.shard_bytes,
    workers: int | None = None,
) -> Manifest:
    """Write the index of all documents to ``folder``, replacing the one there in one step."""
    end = tokenizer.vocab_size
    width = token_type(end)
    with building(folder) as build:
        written = _write_documents(build, documents, sources, end, shard_bytes // width.itemsize)
        if not written.shards:
            raise StoreError("the corpus holds no text at all: name files that do")
        _sort_shards(build, written.shards, end, width, workers or os.cpu_count() or 1)
        places = np.array([(shard.token, shard.tokens, shard.suffix, shard.suffixes) for shard in written.shards])
        places.astype(np.int64).tofile(build.path("shards"))
        counts = {
            "tokens": sum(shard.suffixes for shard in written.shards),
            "documents": sum(share.records for share in written.shares),
            "shards": len(written.shards),
        }
        options = {"token_bytes": width.itemsize, "shard_bytes": shard_bytes}
        return build.commit(Manifest(KIND, tokenizer, counts, options, written.shares))


def _write_documents(
    build: StoreBuild, documents: Iterable[Document], sources: Sequence[Source], end: int, most: int
) -> _Written:
    """Stream the documents to disk, an end behind each, in shards of at most ``most`` tokens and ends."""
    width = token_type(end)
    shards: list[ShardPlace] = []
    start, held, ends = 0, 0, 0
    seen = np.zeros((len(sources), 2), np.int64)

    def close() -> None:
        before = shards[-1].suffix + shards[-1].suffixes if shards else 0
        shards.append(ShardPlace(start, held, before, held - ends))

    with open(build.path("tokens"), "wb") as stream:
        for document in documents:
            ids = np.asarray(document.ids, width)
            for at in range(0, len(ids), most - 1):
                piece = np.append(ids[at : at + most - 1], width.type(end))
                if held + len(piece) > most:
                    close()
                    start, held, ends = start + held, 0, 0
                piece.tofile(stream)
                held, ends = held + len(piece), ends + 1
                seen[document.source] += (1, len(piece) - 1)
    if held:
        close()
    return _Written(shards, shares_of(sources, seen))


def _sort_shards(build: StoreBuild, shards: list[ShardPlace], end: int, width: np.dtype[Any], workers: int) -> None:
    """Fill the suffixes and the heads, every worker its own stretch of the files."""
    total = shards[-1].suffix + shards[-1].suffixes
    sizes = {"suffixes": total * 4, "heads": len(shards) * (end + 1) * 8}
    for part, size in sizes.items():
        with open(build.path(part), "wb") as stream:
            stream.truncate(size)
    paths = {part: str(build.path(part)) for part in ("tokens", *sizes)}
    jobs = [(paths, shard, number, end, width.str) for number, shard in enumerate(shards)]
    if len(jobs) == 1 or workers == 1:
        for job in jobs:
            _sort_shard(*job)
        return
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_sort_shard, *job) for job in jobs]:
            done.result()


def _sort_shard(paths: dict[str, str], shard: ShardPlace, number: int, end: int, width: str) -> None:
    kind = np.dtype(width)
    tokens = np.fromfile(paths["tokens"], kind, shard.tokens, offset=shard.token * kind.itemsize)
    suffixes = np.memmap(paths["suffixes"], np.uint32, "r+", shard.suffix * 4, (shard.suffixes,))
    # Nothing is ever looked up that starts with an end, and those suffixes sort last.
    suffixes[:] = suffix_array(tokens)[: shard.suffixes]
    suffixes.flush()
    heads = np.memmap(paths["heads"], np.int64, "r+", number * (end + 1) * 8, (end + 1,))
    np.cumsum(np.bincount(tokens, minlength=end + 1)[:end], out=heads[1:])
    heads.flush()


def suffix_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Positions in the order of what follows from there on.

    libdivsufsort sorts bytes: those of big-endian tokens sort as the tokens do, and of the byte
    positions the ones where tokens start are the answer.
    """
    from pydivsufsort import divsufsort

    places = divsufsort(tokens.astype(tokens.dtype.newbyteorder(">")).view(np.uint8))
    out = np.empty(len(tokens), np.uint32)
    _token_starts(places, tokens.dtype.itemsize, out)
    return out


@njit(cache=True)
def _token_starts(places: Tokens, size: int, out: Tokens) -> None:
    kept = 0
    for place in places:
        if place % size == 0:
            out[kept] = place // size
            kept += 1
