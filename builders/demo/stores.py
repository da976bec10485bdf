"""Builds the demo's stores: ``python -m hdtool.builders.demo.stores --gsm8k DIR --answers FILE --out
data/demo/stores``.

The embedded stores hold the demo model's greedy answers to training questions, and whole training documents; neither
contains held-out text. FILE holds the answers as ``hdtool collect`` writes them; missing answers are collected.

The stores of the real model are built when the demo first runs, from the answers to everyday questions that ship with
the package (``prompts --everyday``) and from the documents of the embedded index. Neither contains a question that the
demo asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase

from hdtool.builders.collect import GenerationFile, collect
from hdtool.builders.demo.corpus import TrainingDocument, demo_arguments, documents, stable_hash
from hdtool.builders.demo.prompts import learned_questions
from hdtool.builders.stores.build import build_corpus_index, build_model_store
from hdtool.builders.stores.build_engine import LocalBuildEngine
from hdtool.builders.stores.sequences import encode_texts, tokenized
from hdtool.data import demo
from hdtool.data.documents import Document as Tokenized, Source, stored_documents
from hdtool.data.durable_files import file_lock
from hdtool.data.errors import StoreError
from hdtool.data.home import home
from hdtool.data.progress import progress_bar
from hdtool.data.prompts import Prompt
from hdtool.data.stores.manifest import Checkpoint, Manifest, TokenizerFingerprint
from hdtool.data.stores.store import file_checksum, read_manifest
from hdtool.data.stores.store_files import LOCK_FILE, check_destination
from hdtool.data.texts_and_traces import RecordReader
from hdtool.runtime.answerer import Answerer
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig, StoresConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.target.load import load_tokenizer
from hdtool.runtime.weights.checkpoint_identity import checkpoint_of


@dataclass(frozen=True)
class Recipe:
    """Shape and training settings of a demo model; the defaults describe the embedded model."""

    kind: str = "llama"
    vocabulary: int = 4096
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 1024
    context: int = 1024
    window: int = 512
    long_share: float = 0.15
    batch: int = 16
    steps: int = 3400
    rounds: int = 1
    matrix_rate: float = 0.012
    vector_rate: float = 0.003
    matrix_decay: float = 0.01
    seed: int = 0


HYBRID_RECIPE = Recipe(kind="hybrid", layers=8, mlp=320, batch=64, steps=3000, rounds=4, matrix_decay=0.1)
"""Recipe with a third of the embedded model's attention layers, and four times its tokens per step."""

RECIPES = {recipe.kind: recipe for recipe in (Recipe(), HYBRID_RECIPE)}


SEQUENCES_PER_LENGTH = 20_000
"""Maximum number of sequences of each length in the model store."""


def stores_of_real_model(loading: ModelConfig) -> StoresConfig:
    """Return the demo's two stores for SmolLM2, building those that are missing or outdated."""
    tokenizer, model = load_tokenizer(loading), checkpoint_of(loading)
    fingerprint = TokenizerFingerprint.of(tokenizer)
    folder = home() / "demo" / fingerprint.fingerprint
    answers = Source(demo.ANSWERS.name, file_checksum(demo.ANSWERS))
    corpus = CorpusIndex(demo.CORPUS_INDEX)
    texts = Source("corpus", corpus.manifest.files["documents"].sha256)
    if not _is_current(folder / "model", fingerprint, answers, model):
        reading = RecordReader([demo.ANSWERS], answers_only=True, tolerance=0)
        with progress_bar(reading.total_bytes, "model store", unit="B") as progress:
            answered = list(tokenized(reading, tokenizer, progress))
        build_model_store(folder / "model", answered, fingerprint, [answers], top_k=SEQUENCES_PER_LENGTH, model=model)
    if not _is_current(folder / "corpus", fingerprint, texts):
        build_corpus_index(
            folder / "corpus", _retokenized(corpus, tokenizer), fingerprint, [texts], engine=LocalBuildEngine(1)
        )
    return StoresConfig(model_db=str(folder / "model"), corpus_db=str(folder / "corpus"))


def _is_current(folder: Path, tokenizer: TokenizerFingerprint, source: Source, model: Checkpoint | None = None) -> bool:
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


LEARNED_QUESTIONS_PER_KIND = 300
MAX_ANSWER_TOKENS = 160
"""Maximum number of tokens of an answer, as in ``hdtool demo``."""

INDEX_KINDS = ("math", "explain", "write")
"""Kinds of documents in the corpus index. Answers of kind ``edit`` repeat ``write``; prose and code help less."""
TOKENS_PER_KIND = 200_000
LICENCE_WORDS = re.compile("copyright|licen[cs]e", re.IGNORECASE)
"""Source files that match may have other license terms than the library, so the index omits them."""


def collect_answers(prompts: Sequence[Prompt], path: Path) -> None:
    """Answer the prompts that have no answer in the file, as ``hdtool collect --max-new-tokens 160`` does."""
    sampling, decoding = SamplingConfig(), DecodeConfig(max_new_tokens=MAX_ANSWER_TOKENS)
    model = ModelConfig()
    answerer = Answerer(model, decoding, sampling)
    with progress_bar(len(prompts), "answers") as progress:
        for answered in collect(answerer, prompts, GenerationFile(path, model, decoding, sampling)):
            progress.to(answered)


def index_documents(
    everything: Sequence[TrainingDocument], tokenizer: Any, per_kind: int = TOKENS_PER_KIND
) -> Iterator[TrainingDocument]:
    """Yield whole documents that are not held out, up to ``per_kind`` tokens of each kind, chosen by hash."""
    left_out = {d.page for d in everything if d.held_out or (d.kind == "code" and LICENCE_WORDS.search(d.answer))}
    learned = sorted((d for d in everything if d.page not in left_out), key=lambda d: stable_hash(d.name))
    for kind in INDEX_KINDS:
        left = per_kind
        for document in {d.answer: d for d in learned if d.kind == kind}.values():
            size = len(tokenizer(document.answer, add_special_tokens=False, verbose=False)["input_ids"])
            if size <= left:
                left -= size
                yield document


def build_stores(
    out: Path, answers: Path, chosen: Iterable[TrainingDocument], tokenizer: Any
) -> Iterator[tuple[Path, Manifest]]:
    """Build both stores, yielding ``(folder, manifest)`` for each. The manifests do not depend on the input paths."""
    fingerprint, model = TokenizerFingerprint.of(tokenizer), checkpoint_of(ModelConfig())
    answered, sources = _tokens_of(answers, "answers.jsonl", tokenizer, answers_only=True)
    yield (
        out / "model",
        build_model_store(out / "model", answered, fingerprint, sources, top_k=SEQUENCES_PER_LENGTH, model=model),
    )
    with TemporaryDirectory() as scratch:
        path = Path(scratch, "documents.jsonl")
        lines = (json.dumps({"text": document.answer}, ensure_ascii=False) + "\n" for document in chosen)
        path.write_text("".join(lines), encoding="utf-8", newline="\n")
        written, sources = _tokens_of(path, path.name, tokenizer, answers_only=False)
    yield out / "corpus", build_corpus_index(out / "corpus", written, fingerprint, sources, engine=LocalBuildEngine(1))


def _tokens_of(path: Path, name: str, tokenizer: Any, *, answers_only: bool) -> tuple[list[Tokenized], list[Source]]:
    reading = RecordReader([path], answers_only=answers_only, tolerance=0)
    with progress_bar(reading.total_bytes, "reading", unit="B") as progress:
        read = list(tokenized(reading, tokenizer, progress))
    return read, [Source(name, source.sha256) for source in reading.sources]


def main() -> None:
    parser = demo_arguments(__doc__, "where the two stores go")
    parser.add_argument("--answers", type=Path, required=True, help="the model's answers, there or to be collected")
    options = parser.parse_args()
    for kind in ("model", "corpus"):
        check_destination(options.out / kind)
    everything = list(documents(options.gsm8k, options.docs))
    collect_answers(list(learned_questions(everything, LEARNED_QUESTIONS_PER_KIND)), options.answers)
    tokenizer = load_tokenizer(ModelConfig())
    for folder, manifest in build_stores(
        options.out, options.answers, index_documents(everything, tokenizer), tokenizer
    ):
        busy = StoreError(f"another build of {folder} is running: wait for it")
        with file_lock(folder / LOCK_FILE, busy, remove=True):
            pass  # the lock file must not ship with the store
        print(f"{folder}: {manifest.counts}, {manifest.bytes:,} bytes")


if __name__ == "__main__":
    main()
