"""Build a corpus index: documents of token ids in, a store of suffix-array shards out.

The documents stream to disk first; then every shard is sorted where it lies, several at once, so
that memory is bounded by the size of a shard and not by that of the corpus.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.builders.documents import DocumentFile
from hdtool.data.documents import Document, Source, token_type
from hdtool.data.errors import StoreError
from hdtool.data.store import Manifest, StoreBuild, TokenizerMark, building
from hdtool.runtime.config import BuildConfig
from hdtool.runtime.corpus_index import KIND
from hdtool.runtime.suffixes import SIGNPOST_EVERY, SIGNPOST_TOKENS, ShardPlace, signposts_in

Tokens = npt.NDArray[Any]


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
        with DocumentFile(build.path("documents"), end, sources) as file:
            shards = _write_documents(file, documents, shard_bytes // width.itemsize)
        if not shards:
            raise StoreError("the corpus holds no text at all: name files that do")
        _sort_shards(build, shards, end, width, workers or os.cpu_count() or 1)
        np.array(shards, np.int64).tofile(build.path("shards"))
        counts = {
            "tokens": sum(shard.suffixes for shard in shards),
            "documents": file.documents,
            "shards": len(shards),
        }
        options = {"token_bytes": width.itemsize, "shard_bytes": shard_bytes}
        return build.commit(Manifest(KIND, tokenizer, counts, options, file.shares()))


def _write_documents(file: DocumentFile, documents: Iterable[Document], most: int) -> list[ShardPlace]:
    """Stream the documents to disk, in shards of at most ``most`` tokens and ends."""
    shards: list[ShardPlace] = []
    start = documents_before = 0

    def close() -> None:
        nonlocal start, documents_before
        size, ends = file.size - start, file.documents - documents_before
        last = shards[-1] if shards else ShardPlace(0, 0, 0, 0, 0)
        signpost = last.signpost + signposts_in(last.suffixes)
        shards.append(ShardPlace(start, size, last.suffix + last.suffixes, size - ends, signpost))
        start, documents_before = file.size, file.documents

    for document in documents:
        for at in range(0, len(document.ids), most - 1):
            piece = document.ids[at : at + most - 1]
            if file.size - start + len(piece) + 1 > most:
                close()
            file.add(piece, document.source)
    if file.size > start:
        close()
    return shards


def _sort_shards(build: StoreBuild, shards: list[ShardPlace], end: int, width: np.dtype[Any], workers: int) -> None:
    """Fill the suffixes, the heads and the signposts, every worker its own stretch of the files."""
    last = shards[-1]
    signposts = last.signpost + signposts_in(last.suffixes)
    sizes = {
        "suffixes": (last.suffix + last.suffixes) * 4,
        "heads": len(shards) * (end + 1) * 4,
        "signposts": signposts * SIGNPOST_TOKENS * width.itemsize,
    }
    for part, size in sizes.items():
        with open(build.path(part), "wb") as stream:
            stream.truncate(size)
    paths = {part: str(build.path(part)) for part in ("documents", *sizes)}
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
    tokens = np.fromfile(paths["documents"], kind, shard.tokens, offset=shard.token * kind.itemsize)
    suffixes = np.memmap(paths["suffixes"], np.uint32, "r+", shard.suffix * 4, (shard.suffixes,))
    # Nothing is ever looked up that starts with an end, and those suffixes sort last.
    suffixes[:] = suffix_array(tokens)[: shard.suffixes]
    heads = np.memmap(paths["heads"], np.uint32, "r+", number * (end + 1) * 4, (end + 1,))
    np.cumsum(np.bincount(tokens, minlength=end + 1)[:end], out=heads[1:])
    shape = (signposts_in(shard.suffixes), SIGNPOST_TOKENS)
    offset = shard.signpost * SIGNPOST_TOKENS * kind.itemsize
    signposts = np.memmap(paths["signposts"], kind, "r+", offset, shape)
    # The last token is an end, which no search looks behind.
    behind = suffixes[::SIGNPOST_EVERY, None] + np.arange(1, SIGNPOST_TOKENS + 1)
    signposts[:] = tokens[np.minimum(behind, len(tokens) - 1)]
    for written in (suffixes, heads, signposts):
        written.flush()


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
