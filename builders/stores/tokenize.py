"""Texts to token ids, many at a time: the tokenizer works on a batch with all cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from hdtool.data.progress import Bar
from hdtool.data.records import Reading
from hdtool.data.stores.documents import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 1024


def tokenized(reading: Reading, tokenizer: PreTrainedTokenizerBase, shown: Bar) -> Iterator[Document]:
    """Every text as a document."""
    texts = ((text, record.source) for record in reading for text in record.texts)
    while batch := list(islice(texts, BATCH)):
        encoded = ids_of([text for text, _ in batch], tokenizer)
        for ids, (_, source) in zip(encoded, batch, strict=True):
            yield Document(ids, source)
        shown.to(reading.bytes_read)


def ids_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The ids of each text, without special tokens: drafts follow text, not markup."""
    if not texts:
        return []
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return encoded
