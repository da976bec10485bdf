"""The benefit and the cost of a larger corpus index: replays with smaller ones."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from pathlib import Path

import numpy as np

from hdtool.data.progress import bar
from hdtool.data.stores.documents import Document, Source, stored_documents
from hdtool.data.stores.store import TokenizerFingerprint
from hdtool.runtime.evaluation.report.ablations import Study
from hdtool.runtime.evaluation.report.tables import Size, Sizes
from hdtool.runtime.evaluation.worker_pool import replay
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.store_set import StoreSet

PARTS = (16, 8, 4, 2)
"""Each smaller index holds one document in so many."""
MAX_TOKENS = 50_000_000
"""From a larger index, building the smaller ones takes minutes."""
MIN_DOCUMENTS = 10 * PARTS[0]
METHOD = "hd"


BuildIndex = Callable[[Path, Iterable[Document], TokenizerFingerprint, Sequence[Source]], object]
"""Builds a corpus index in a folder."""


def sizes(study: Study, build: BuildIndex, *, quiet: bool = False) -> Sizes | str:
    """The replays, or the reason why there are none."""
    corpus = study.store_set.corpus
    if corpus is None:
        return "there is no corpus index"
    counts = corpus.manifest.counts
    if counts["tokens"] > MAX_TOKENS:
        return f"the corpus index holds {counts['tokens']:,} tokens, and at most {MAX_TOKENS:,} are supported here"
    if counts["documents"] < MIN_DOCUMENTS:
        return f"the corpus index holds {counts['documents']} documents, and at least {MIN_DOCUMENTS} are needed"
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        bar(len(PARTS) + 1, "replays with less corpus", unit="sizes", quiet=quiet) as progress,
    ):
        for part in PARTS:
            rows.append(_size(study, _thinned(corpus, part, Path(scratch) / str(part), build)))
            progress.advance()
        rows.append(_size(study, corpus))
        progress.advance()
    return Sizes(METHOD, tuple(rows))


def _thinned(corpus: CorpusIndex, part: int, folder: Path, build: BuildIndex) -> CorpusIndex:
    """An index of one document in ``part``, drawn at random: many corpora alternate questions and answers."""
    manifest = corpus.manifest
    stored = stored_documents(corpus.documents, corpus.end)
    drawn = np.random.default_rng(0).random(manifest.counts["documents"]) < 1 / part
    documents = (Document(tokens) for tokens in compress(stored, drawn))
    build(folder, documents, manifest.tokenizer, [Source("a part of another index", "")])
    return CorpusIndex(folder)


def _size(study: Study, corpus: CorpusIndex) -> Size:
    store_set = StoreSet(study.store_set.model, corpus)
    contender = study.contender(METHOD, study.letters)
    # In one process, because the times are reported.
    result = replay([contender], study.conversations, store_set, workers=1)[contender.name]
    return Size(
        tokens=corpus.manifest.counts["tokens"],
        tokens_per_step=result.tokens_per_step,
        draft_us=result.draft_us(50),
        draft_us_p90=result.draft_us(90),
        corpus_us=result.source_seconds.get(SourceName.CORPUS, 0.0) / result.drafted_steps * 1e6,
    )
