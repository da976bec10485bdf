"""The demo's stores: ``python -m hdtool.builders.demo.stores --gsm8k DIR --answers FILE --out data/demo/stores``.

The model store is mined from the model's own answers to everyday questions (``chat_questions``), which ship as text.
The corpus index holds the documents of the embedded model's index, in the real model's tokens. Neither contains a
question that the demo asks.

A model store of the demo model's own greedy answers to questions that it learned from, and a corpus
index of whole documents that it learned from; nothing that was held out is in either. FILE holds the
answers as ``hdtool collect`` writes them, and those that it lacks are collected first: a killed run
goes on, and with a whole FILE the stores are built anew in seconds.
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
from hdtool.builders.demo.corpus import Document, arguments, documents, stable_hash
from hdtool.builders.demo.prompts import learned_questions
from hdtool.builders.stores.build import build_corpus_index, build_model_store
from hdtool.builders.stores.engine import LocalEngine
from hdtool.builders.stores.sequences import ids_of, tokenized
from hdtool.data import demo
from hdtool.data.errors import StoreError
from hdtool.data.progress import bar
from hdtool.data.prompts import Prompt
from hdtool.data.records import Reading
from hdtool.data.stores.home import home
from hdtool.data.stores.manifest import Checkpoint, Manifest, TokenizerFingerprint
from hdtool.data.stores.store import checksum, read_manifest
from hdtool.data.stores.store_files import Document as Tokenized
from hdtool.data.stores.store_files import Source, check_destination, stored_documents
from hdtool.runtime.answerer import Answerer
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig, StoresConfig
from hdtool.runtime.model.checkpoint_identity import checkpoint_of
from hdtool.runtime.model.load import load_tokenizer
from hdtool.runtime.stores.corpus_index import CorpusIndex


@dataclass(frozen=True)
class Recipe:
    """The defaults make the embedded demo model."""

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


HYBRID = Recipe(kind="hybrid", layers=8, mlp=320, batch=64, steps=3000, rounds=4, matrix_decay=0.1)
"""A third of the embedded model's layers of attention, and four times the tokens of each of its steps."""

RECIPES = {recipe.kind: recipe for recipe in (Recipe(), HYBRID)}


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


def _converted(corpus: CorpusIndex, tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokenized]:
    """The documents of the embedded index in the tokens of another tokenizer."""
    embedded = load_tokenizer(ModelConfig())
    texts = embedded.batch_decode([ids.tolist() for ids in stored_documents(corpus.documents, corpus.end)])
    with bar(len(texts), "corpus index", unit="texts") as shown:
        for number, ids in enumerate(ids_of(texts, tokenizer), start=1):
            yield Tokenized(ids)
            shown.to(number)


QUESTIONS_OF_EACH = 300
LONGEST_ANSWER = 160
"""Tokens; ``hdtool demo`` stops there too."""

KINDS = ("math", "explain", "write")
"""Kinds in the corpus index. Answers of the kind ``edit`` repeat ``write``; prose and code help less."""
TOKENS_OF_EACH = 200_000
OWN_TERMS = re.compile("copyright|licen[cs]e", re.IGNORECASE)
"""Source files with these words may be under other terms than the library as a whole; the index omits them."""


def answer(prompts: Sequence[Prompt], path: Path) -> None:
    """Collect the answers that the file lacks, as ``hdtool collect --max-new-tokens 160`` does."""
    sampling, decoding = SamplingConfig(), DecodeConfig(max_new_tokens=LONGEST_ANSWER)
    model = ModelConfig()
    answerer = Answerer(model, decoding, sampling)
    with bar(len(prompts), "answers") as shown:
        for answered in collect(answerer, prompts, GenerationFile(path, model, decoding, sampling)):
            shown.to(answered)


def corpus(everything: Sequence[Document], tokenizer: Any, of_each: int = TOKENS_OF_EACH) -> Iterator[Document]:
    """Whole documents that are not held out, in an order given by a hash, with equal tokens of each kind."""
    left_out = {d.page for d in everything if d.held_out or (d.kind == "code" and OWN_TERMS.search(d.answer))}
    learned = sorted((d for d in everything if d.page not in left_out), key=lambda d: stable_hash(d.name))
    for kind in KINDS:
        left = of_each
        for document in {d.answer: d for d in learned if d.kind == kind}.values():
            size = len(tokenizer(document.answer, add_special_tokens=False, verbose=False)["input_ids"])
            if size <= left:
                left -= size
                yield document


def build(out: Path, answers: Path, chosen: Iterable[Document], tokenizer: Any) -> Iterator[tuple[Path, Manifest]]:
    """Both stores; the names of the inputs in their manifests do not depend on paths."""
    fingerprint, model = TokenizerFingerprint.of(tokenizer), checkpoint_of(ModelConfig())
    answered, sources = _tokens_of(answers, "answers.jsonl", tokenizer, answers_only=True)
    yield out / "model", build_model_store(out / "model", answered, fingerprint, sources, top_k=SEQUENCES, model=model)
    with TemporaryDirectory() as scratch:
        path = Path(scratch, "documents.jsonl")
        lines = (json.dumps({"text": document.answer}, ensure_ascii=False) + "\n" for document in chosen)
        path.write_text("".join(lines), encoding="utf-8", newline="\n")
        written, sources = _tokens_of(path, path.name, tokenizer, answers_only=False)
    yield out / "corpus", build_corpus_index(out / "corpus", written, fingerprint, sources, engine=LocalEngine(1))


def _tokens_of(path: Path, name: str, tokenizer: Any, *, answers_only: bool) -> tuple[list[Tokenized], list[Source]]:
    reading = Reading([path], answers_only=answers_only, tolerance=0)
    with bar(reading.total_bytes, "reading", unit="B") as shown:
        read = list(tokenized(reading, tokenizer, shown))
    return read, [Source(name, source.sha256) for source in reading.sources]


def main() -> None:
    parser = arguments(__doc__, "where the two stores go")
    parser.add_argument("--answers", type=Path, required=True, help="the model's answers, there or to be collected")
    options = parser.parse_args()
    for kind in ("model", "corpus"):
        check_destination(options.out / kind)
    everything = list(documents(options.gsm8k, options.docs))
    answer(list(learned_questions(everything, QUESTIONS_OF_EACH)), options.answers)
    tokenizer = load_tokenizer(ModelConfig())
    for folder, manifest in build(options.out, options.answers, corpus(everything, tokenizer), tokenizer):
        # The lock file must not ship with the store.
        (folder / ".lock").unlink(missing_ok=True)
        print(f"{folder}: {manifest.counts}, {manifest.bytes:,} bytes")


if __name__ == "__main__":
    main()
