"""The stores of the demo's real model, built when the demo first runs.

They hold the answers to everyday questions that ship with the package, and the documents of the embedded index. Neither
contains a question that the demo asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store
from hdtool.builders.stores.frequent_sequences import encode_texts, tokenized
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.data import demo
from hdtool.data.documents import Document as Tokenized, InputFile, stored_documents
from hdtool.data.errors import StoreError
from hdtool.data.home import home
from hdtool.data.progress import progress_bar
from hdtool.data.stores.manifest import Checkpoint, Manifest, TokenizerFingerprint
from hdtool.data.stores.store_folder import file_checksum, read_manifest
from hdtool.data.texts_and_traces import RecordReader
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.target.load import load_tokenizer
from hdtool.runtime.weights.checkpoint_identity import checkpoint_of

SEQUENCES_PER_LENGTH = 20_000
"""Maximum number of sequences of each length in the model store."""


def stores_of_real_model(loading: ModelConfig) -> StoresConfig:
    """Return the demo's two stores for SmolLM2, building those that are missing or outdated."""
    tokenizer, model = load_tokenizer(loading), checkpoint_of(loading)
    fingerprint = TokenizerFingerprint.of(tokenizer)
    folder = home() / "demo" / fingerprint.fingerprint
    answers = InputFile(demo.ANSWERS.name, file_checksum(demo.ANSWERS))
    corpus = CorpusIndex(demo.CORPUS_INDEX)
    texts = InputFile("corpus", corpus.manifest.files["documents"].sha256)
    if not _is_current(folder / "model", fingerprint, answers, model):
        reading = RecordReader([demo.ANSWERS], answers_only=True, tolerance=0)
        answered = list(tokenized(reading, tokenizer, "model store"))
        build_model_store(folder / "model", answered, fingerprint, [answers], top_k=SEQUENCES_PER_LENGTH, model=model)
    if not _is_current(folder / "corpus", fingerprint, texts, None):
        build_corpus_index(
            folder / "corpus",
            _retokenized(corpus, tokenizer),
            fingerprint,
            [texts],
            executor=BuildExecutor(1, quiet=True),
        )
    return StoresConfig(model_db=str(folder / "model"), corpus_db=str(folder / "corpus"))


def _is_current(folder: Path, tokenizer: TokenizerFingerprint, source: InputFile, model: Checkpoint | None) -> bool:
    try:
        manifest: Manifest = read_manifest(folder)
    except (StoreError, OSError):
        return False
    same = (manifest.tokenizer, manifest.model) == (tokenizer, model)
    return same and source.sha256 in (share.sha256 for share in manifest.sources)  # texts may have been added


def _retokenized(corpus: CorpusIndex, tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokenized]:
    """Yield the documents of the embedded index ``corpus``, tokenized again by ``tokenizer``."""
    embedded = load_tokenizer(ModelConfig())
    texts = embedded.batch_decode([ids.tolist() for ids in stored_documents(corpus.documents, corpus.end)])
    with progress_bar(len(texts), "corpus index", unit="texts") as progress:
        for number, ids in enumerate(encode_texts(texts, tokenizer), start=1):
            yield Tokenized(ids)
            progress.to(number)
