"""Build small stores from given documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.data.documents import Document, InputFile
from hdtool.data.stores.manifest import Manifest, TokenizerFingerprint
from hdtool.runtime.stores.corpus_index import CorpusIndex

Documents = list[list[int]]


def index_of(folder: Path, documents: Documents, vocabulary: int, shard_bytes: int = 1 << 20) -> CorpusIndex:
    mark = TokenizerFingerprint("test", vocabulary)
    sources = [InputFile("some", "0"), InputFile("more", "1")]
    given = (Document(ids, number * 2 // len(documents)) for number, ids in enumerate(documents))
    build_corpus_index(folder, given, mark, sources, shard_bytes=shard_bytes, executor=BuildExecutor(1))
    return CorpusIndex(folder, mark)


def build(folder: Path, documents: Documents, vocabulary: int, **options: Any) -> Manifest:
    mark = TokenizerFingerprint("test", vocabulary)
    return build_model_store(folder, (Document(ids) for ids in documents), mark, [InputFile("test", "")], **options)
