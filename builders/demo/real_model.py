"""The stores of the demo's real model, built on this machine at the first demo.

The model store is mined from the model's own answers to everyday questions (``chat_questions``), which ship as text.
The corpus index holds the documents of the embedded model's index, in the real model's tokens. Neither contains a
question that the demo asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hdtool.builders.stores.build_corpus_index import build_corpus_index
from hdtool.builders.stores.build_model_store import build_model_store
from hdtool.builders.stores.engine import LocalEngine
from hdtool.builders.stores.tokenize import ids_of, tokenized
from hdtool.data import demo
from hdtool.data.errors import StoreError
from hdtool.data.progress import bar
from hdtool.data.records import Reading
from hdtool.data.stores.documents import Document, Source, stored_documents
from hdtool.data.stores.home import home
from hdtool.data.stores.store import Checkpoint, Manifest, TokenizerFingerprint, checksum, read_manifest
from hdtool.runtime.config import ModelConfig, StoresConfig
from hdtool.runtime.model.checkpoint.identity import checkpoint_of
from hdtool.runtime.model.load import load_tokenizer
from hdtool.runtime.stores.corpus_index import CorpusIndex

SEQUENCES = 20_000
"""Sequences of each length in the model store."""


def is_first_demo() -> bool:
    """Whether no store of a real model was built here."""
    return not (home() / "demo").exists()


def stores_of_real_model(loading: ModelConfig) -> StoresConfig:
    """The two stores, built if they are missing or were made from other texts."""
    tokenizer, model = load_tokenizer(loading), checkpoint_of(loading)
    fingerprint = TokenizerFingerprint.of(tokenizer)
    folder = home() / "demo" / fingerprint.fingerprint
    answers = Source(demo.ANSWERS.name, checksum(demo.ANSWERS))
    corpus = CorpusIndex(demo.CORPUS_INDEX)
    texts = Source("corpus", corpus.manifest.files["documents"].sha256)
    if not _is_current(folder / "model", fingerprint, answers, model):
        reading = Reading([demo.ANSWERS], answers_only=True, tolerance=0)
        with bar(reading.total_bytes, "model store", unit="B") as shown:
            answered = list(tokenized(reading, tokenizer, shown))
        build_model_store(folder / "model", answered, fingerprint, [answers], top_k=SEQUENCES, model=model)
    if not _is_current(folder / "corpus", fingerprint, texts):
        build_corpus_index(
            folder / "corpus", _converted(corpus, tokenizer), fingerprint, [texts], engine=LocalEngine(1)
        )
    return StoresConfig(model_db=str(folder / "model"), corpus_db=str(folder / "corpus"))


def _is_current(folder: Path, tokenizer: TokenizerFingerprint, source: Source, model: Checkpoint | None = None) -> bool:
    try:
        found: Manifest = read_manifest(folder)
    except (StoreError, OSError):
        return False
    same = (found.tokenizer, found.model) == (tokenizer, model)
    return same and [share.sha256 for share in found.sources] == [source.sha256]


def _converted(corpus: CorpusIndex, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    """The documents of the embedded index in the tokens of another tokenizer."""
    embedded = load_tokenizer(ModelConfig())
    texts = embedded.batch_decode([ids.tolist() for ids in stored_documents(corpus.documents, corpus.end)])
    with bar(len(texts), "corpus index", unit="texts") as shown:
        for number, ids in enumerate(ids_of(texts, tokenizer), start=1):
            yield Document(ids)
            shown.to(number)
