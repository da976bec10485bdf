"""Measures what the demo's stores contain of answers to unseen questions.

``python -m tests.benchmarks.demo_stores`` prints the table in docs/reference/demo-model.md: for greedy answers to the
200 held-out prompts, how much each store holds and how much its lookups draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hdtool.builders.stores.edit_store import StoreContents
from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore
from tests.benchmarks.demo_texts import KINDS
from tests.benchmarks.laboratory import Table

LENGTH = 4
MAX_ANSWER_TOKENS = 160
Gram = tuple[int, ...]


def grams(ids: Sequence[int]) -> list[Gram]:
    return [tuple(ids[at : at + LENGTH]) for at in range(len(ids) - LENGTH + 1)]


def held(folder: Path) -> set[Gram]:
    """Return all 4-grams in the documents of a store."""
    return {gram for ids in StoreContents.of(folder).texts() for gram in grams(ids.tolist())}


def drafted(model: ModelStore, corpus: CorpusIndex, context: list[int]) -> tuple[set[int], set[int]]:
    """Return the tokens that a lookup in each store drafts next."""
    tree = corpus.after(context)
    next_tokens = {token for entry in model.after(context) for token in entry.tokens.tolist()}
    return next_tokens, set(tree.tokens[tree.parents < 0].tolist())


def answers() -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield kind, prompt and greedy answer of each held-out prompt."""
    answerer = Answerer(ModelConfig(), DecodeConfig(max_new_tokens=MAX_ANSWER_TOKENS), SamplingConfig())
    for prompt in read_prompts(demo.PROMPTS):
        (answer,) = answerer.all_answers([prompt])
        for _ in answer:
            pass
        yield prompt.category, encode_conversation(answerer.loaded.tokenizer, prompt.messages), answer.output_ids


def shares(found: list[tuple[bool, bool]]) -> list[str]:
    """Return the shares of the model store, of the corpus index, and of their union, as table cells."""
    one, other = np.array(found).T
    return [f"{part.mean():.0%}" for part in (one, other, one | other)]


def main() -> None:
    model, corpus = ModelStore(demo.MODEL_STORE), CorpusIndex(demo.CORPUS_INDEX)
    said, written = held(demo.MODEL_STORE), held(demo.CORPUS_INDEX)
    stretches: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    places: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for kind, prompt, ids in answers():
        for name in (kind, "all"):
            stretches[name] += [(gram in said, gram in written) for gram in grams(ids)]
        for at in range(1, len(ids)):
            one, other = drafted(model, corpus, prompt + ids[:at])
            for name in (kind, "all"):
                places[name].append((ids[at] in one, ids[at] in other))
    heads = (f"{of}{store}" for of in ("held: ", "drafted: ") for store in ("model store", "corpus index", "either"))
    table = Table("kind", "tokens", *heads)
    for kind in (*KINDS, "all"):
        table.row(kind, f"{len(places[kind]):,}", *shares(stretches[kind]), *shares(places[kind]))


if __name__ == "__main__":
    main()
