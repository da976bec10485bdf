"""Token arrays of a corpus index: concatenated documents, each followed by an end token.

The end token's id is the size of the vocabulary, so no draft crosses documents. The documents of an input are
contiguous, and the inputs are in manifest order, so the counts in the manifest locate each input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.data.errors import StoreError

TOKEN_CHUNK = 1 << 22
"""Number of tokens processed at once, so that a memory-mapped corpus is never loaded as a whole."""

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class InputFile:
    """Input file that a store was built from."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Document:
    """Tokenized text, with the index of the source that it comes from."""

    ids: Sequence[int] | Tokens
    source: int = 0


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Return uint16 if all token ids and the end token fit into 16 bits, else uint32."""
    return np.dtype(np.uint16 if vocab_size < 2**16 else np.uint32)


def stored_documents(tokens: Tokens, end: int) -> Iterator[Tokens]:
    """Yield the documents of a token array without their end tokens.

    Raise StoreError if the file is damaged: if a token id exceeds the end token's, or the last document has no
    end token.
    """
    start = 0
    for at in range(0, len(tokens), TOKEN_CHUNK):
        chunk = tokens[at : at + TOKEN_CHUNK]
        if chunk.max() > end:
            raise StoreError(f"the documents of the store are damaged (token {chunk.max():,}): build it again")
        for stop in np.flatnonzero(chunk == end) + at:
            yield tokens[start:stop]
            start = int(stop) + 1
    if start != len(tokens):
        raise StoreError("the documents of the store are damaged (the last one has no end): build it again")


def with_sources(documents: Iterable[Tokens], counts: Sequence[int]) -> Iterator[Document]:
    """Yield stored documents, each with the index of the input that it came from.

    ``counts`` has the number of documents per input. Raise StoreError if the sum of ``counts`` differs from the
    number of documents.
    """
    owners = (source for source, count in enumerate(counts) for _ in range(count))
    for ids in documents:
        if (source := next(owners, None)) is None:
            raise StoreError(f"the store holds more documents than the {sum(counts):,} of its manifest: build it again")
        yield Document(ids, source)
    if next(owners, None) is not None:
        raise StoreError(f"the store holds fewer documents than the {sum(counts):,} of its manifest: build it again")
