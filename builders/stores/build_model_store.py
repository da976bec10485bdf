"""Build a model store from a model's answers: their most frequent n-grams.

The answers are streamed to disk first, as the text in which the most frequent sequences of two to five tokens are
counted, several lengths at once. The record of the store gets the answers and the n-grams, those of each length while
longer ones are still counted; the flat arrays of look-ups are compiled from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from hdtool.builders.stores.compile_arrays import compiled_arrays
from hdtool.builders.stores.document_file import DocumentFile
from hdtool.builders.stores.engine import Engine, LocalEngine
from hdtool.builders.stores.sequences import Answers
from hdtool.data.errors import StoreError
from hdtool.data.stores.documents import Document, Source, stored_documents, token_type
from hdtool.data.stores.store import Checkpoint, Manifest, TokenizerFingerprint
from hdtool.data.stores.store_replacement import FolderCheck, building
from hdtool.runtime.config import BuildConfig
from hdtool.runtime.stores.model_record import NGRAMS, PART, ModelRecord, writing
from hdtool.runtime.stores.model_store import KIND, PHRASE, Ints


def build_model_store(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: TokenizerFingerprint,
    sources: Sequence[Source],
    *,
    top_k: int = BuildConfig.top_k,
    per_key: int = BuildConfig.per_key,
    once_per_document: bool = True,
    engine: Engine | None = None,
    model: Checkpoint | None = None,
    rankings: Ints | None = None,
    check: FolderCheck | None = None,
) -> Manifest:
    """Write the store of all documents to ``folder``, replacing the one there in one step.

    The ``top_k`` most frequent sequences of each length are kept, as prefixes with their next token, and those
    of five tokens also as phrases after their first token; at most ``per_key`` for each prefix or token. Among
    equals the one with the smaller tokens comes first. ``model`` gave the answers, and ``rankings``
    are its own, of the vocabulary; with them, a store without any document can be built. ``check`` raises if the store
    at ``folder`` must stay.
    """
    end = tokenizer.vocab_size
    with building(folder, check) as build:
        text = build.scratch("documents")
        with DocumentFile(text, end, sources) as file:
            for document in documents:
                file.add(document.ids, document.source)
        if not file.longest and (sources or rankings is None):
            raise StoreError("the answers hold no text at all: name files that do")
        if file.longest <= PHRASE and file.documents:
            raise StoreError(f"the longest answer has {file.longest} tokens: name files with answers of more than 4")
        kind = token_type(end)
        # An empty file cannot be mapped.
        tokens = np.asarray(np.memmap(text, kind, "r")) if file.size else np.empty(0, kind)
        mined = (engine or LocalEngine()).mine(Answers(tokens, end, once_per_document), top_k, per_key)
        ngrams = len(NGRAMS) * min(top_k, len(tokens))
        with writing(build.path(PART), end, tokens.nbytes, file.documents + ngrams) as record:
            record.put_documents(stored_documents(tokens, end))
            for number, group in zip(NGRAMS, mined, strict=True):
                record.put_ngrams(number, group)
        arrays = compiled_arrays(ModelRecord.opened(build.path(PART), end))
        if rankings is not None:
            arrays["rankings"] = rankings
        for part, array in arrays.items():
            array.tofile(build.path(part))
        shares = file.shares()
        counts = {
            "tokens": sum(share.tokens for share in shares),
            "documents": file.documents,
            "keys": len(arrays["keys"]),
            "continuations": len(arrays["rows"]),
            "phrases": len(arrays["phrases"]),
            **({"rankings": len(rankings)} if rankings is not None else {}),
        }
        options = {
            "token_bytes": tokens.itemsize,
            "top_k": top_k,
            "per_key": per_key,
            "once_per_document": once_per_document,
        }
        return build.commit(Manifest(KIND, tokenizer, counts, options, shares, model=model))
