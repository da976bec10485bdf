"""The demo's stores: ``python -m hdtool.builders.demo.stores --gsm8k DIR --answers FILE --out data/demo/stores``.

A model store of the demo model's own greedy answers to questions that it learned from, and a corpus
index of whole documents that it learned from; nothing that was held out is in either. FILE holds the
answers as ``hdtool collect`` writes them, and those that it lacks are collected first: a killed run
goes on, and with a whole FILE the stores are built anew in seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hdtool.builders.collect import GenerationFile, collect
from hdtool.builders.demo.corpus import Document, arguments, documents, stable_hash
from hdtool.builders.demo.prompts import learned_questions
from hdtool.builders.stores.build_corpus_index import build_corpus_index
from hdtool.builders.stores.build_model_store import build_model_store
from hdtool.builders.stores.engine import LocalEngine
from hdtool.builders.stores.tokenize import tokenized
from hdtool.data.progress import bar
from hdtool.data.prompts import Prompt
from hdtool.data.records import Reading
from hdtool.data.stores.documents import Document as Tokenized
from hdtool.data.stores.documents import Source
from hdtool.data.stores.store import Manifest, TokenizerFingerprint, check_destination
from hdtool.runtime.answerer import Answerer
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.model.checkpoint.identity import checkpoint_of
from hdtool.runtime.model.load import load_tokenizer

QUESTIONS_OF_EACH = 300
LONGEST_ANSWER = 160
"""Tokens; ``hdtool demo`` stops there too."""
SEQUENCES = 20_000
"""Sequences of each length in the model store: all that occur more than once, and few of the others."""

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
