"""Build a corpus index: documents of token ids in, a store of suffix-array shards out.

The documents are streamed to disk first; then every shard is sorted, several at once, so that memory is
bounded by the size of a shard and not by that of the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from hdtool.builders.stores.document_file import DocumentFile
from hdtool.builders.stores.engine import Engine, LocalEngine
from hdtool.builders.stores.shards import ShardFiles
from hdtool.data.errors import StoreError
from hdtool.data.stores.documents import Document, Source, token_type
from hdtool.data.stores.store import Manifest, TokenizerFingerprint
from hdtool.data.stores.store_replacement import FolderCheck, building
from hdtool.runtime.config import BuildConfig
from hdtool.runtime.stores.corpus_index import KIND
from hdtool.runtime.stores.suffix_search import ShardPlace, sampled_prefixes_in

LEAST_TOKENS = 2
"""A shard holds at least a token and an end."""


def build_corpus_index(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: TokenizerFingerprint,
    sources: Sequence[Source],
    *,
    shard_bytes: int = BuildConfig.shard_bytes,
    engine: Engine | None = None,
    check: FolderCheck | None = None,
) -> Manifest:
    """Write the index of all documents to ``folder``, replacing the one there in one step.

    ``engine`` sorts the shards; without one, a process for each core does. ``check`` raises if the
    store at ``folder`` must stay.
    """
    end = tokenizer.vocab_size
    width = token_type(end)
    with building(folder, check) as build:
        with DocumentFile(build.path("documents"), end, sources) as file:
            shards = _write_documents(file, documents, max(LEAST_TOKENS, shard_bytes // width.itemsize))
        if not shards:
            raise StoreError("the corpus holds no text at all: name files that do")
        text, suffixes, heads, prefixes = map(build.path, ("documents", "suffixes", "heads", "signposts"))
        files = ShardFiles(text, suffixes, heads, prefixes, width, end)
        files.create()
        (engine or LocalEngine()).sort(files, shards)
        np.array(shards, np.int64).tofile(build.path("shards"))
        tokens = sum(shard.suffixes for shard in shards)
        counts = {"tokens": tokens, "documents": file.documents, "shards": len(shards)}
        options = {"token_bytes": width.itemsize, "shard_bytes": shard_bytes}
        return build.commit(Manifest(KIND, tokenizer, counts, options, file.shares()))


def _write_documents(file: DocumentFile, documents: Iterable[Document], most: int) -> list[ShardPlace]:
    """Stream the documents to disk, in shards of at most ``most`` tokens and ends."""
    borders = [(0, 0)]  # tokens and ends, and ends, before each shard
    for document in documents:
        for at in range(0, len(document.ids), most - 1):
            piece = document.ids[at : at + most - 1]
            if file.size - borders[-1][0] + len(piece) + 1 > most:
                borders.append((file.size, file.documents))
            file.add(piece, document.source)
    shards: list[ShardPlace] = []
    prefix = 0
    for (start, ends), (stop, more_ends) in pairwise([*borders, (file.size, file.documents)]):
        if suffixes := stop - more_ends - (start - ends):  # none without documents
            shards.append(ShardPlace(start, stop - start, start - ends, suffixes, prefix))
            prefix += sampled_prefixes_in(suffixes)
    return shards
