"""What the size of the corpus index is worth, and what it costs: replays with smaller ones."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from pathlib import Path

import numpy as np

from hdtool.data.stores.documents import Document, Source, stored_documents
from hdtool.data.stores.store import TokenizerFingerprint
from hdtool.runtime.evaluation.report.ablations import Study
from hdtool.runtime.evaluation.report.tables import Size, Sizes
from hdtool.runtime.evaluation.worker_pool import replay
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.store_set import StoreSet

PARTS = (16, 8, 4, 2)
"""One document in so many makes a smaller index."""
LARGEST = 50_000_000
"""Tokens of an index that smaller ones are made from: of more, making them takes minutes."""
FEWEST = 10 * PARTS[0]
"""Documents."""
METHOD = "hd"


BuildIndex = Callable[[Path, Iterable[Document], TokenizerFingerprint, Sequence[Source]], object]
"""Builds a corpus index in a folder."""


def sizes(study: Study, build: BuildIndex, told: Callable[[], None] = lambda: None) -> Sizes | str:
    """Or why there is nothing to tell; ``told`` is called after each of the replays."""
    corpus = study.store_set.corpus
    if corpus is None:
        return "there is no corpus index"
    counts = corpus.manifest.counts
    if counts["tokens"] > LARGEST:
        return (
            f"the corpus index holds {counts['tokens']:,} tokens, and smaller ones are made of up to {LARGEST:,} only"
        )
    if counts["documents"] < FEWEST:
        return f"the corpus index holds {counts['documents']} documents, and a part of fewer than {FEWEST} says little"
    rows = []
    with tempfile.TemporaryDirectory() as passing:
        for part in PARTS:
            rows.append(_size(study, _thinned(corpus, part, Path(passing) / str(part), build)))
            told()
    rows.append(_size(study, corpus))
    told()
    return Sizes(METHOD, tuple(rows))


def _thinned(corpus: CorpusIndex, part: int, folder: Path, build: BuildIndex) -> CorpusIndex:
    """An index of one document in so many, by lot: questions and answers stand in turn in many a corpus."""
    manifest = corpus.manifest
    stored = stored_documents(corpus.documents, corpus.end)
    drawn = np.random.default_rng(0).random(manifest.counts["documents"]) < 1 / part
    documents = (Document(tokens) for tokens in compress(stored, drawn))
    build(folder, documents, manifest.tokenizer, [Source("a part of another index", "")])
    return CorpusIndex(folder)


def _size(study: Study, corpus: CorpusIndex) -> Size:
    store_set = StoreSet(study.store_set.model, corpus)
    contender = study.contender(METHOD, study.letters)
    # Alone on the machine: here the time is what counts.
    played = replay([contender], study.conversations, store_set, workers=1)[contender.name]
    return Size(
        tokens=corpus.manifest.counts["tokens"],
        tokens_per_step=played.tokens_per_step,
        draft_us=played.draft_us(50),
        draft_us_p90=played.draft_us(90),
        corpus_us=played.source_seconds.get(SourceName.CORPUS, 0.0) / played.drafted_steps * 1e6,
    )
