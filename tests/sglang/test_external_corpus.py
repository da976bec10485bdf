"""SGLang's own loader reads what ``hdtool export --to sglang`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.speculative.cpp_ngram.external_corpus import SEPARATOR_TOKEN, iter_external_corpus_chunks
from transformers import AutoTokenizer

from hdtool.builders.export import count_preserved_tokens, export_corpus
from hdtool.builders.stores.edit_store import StoreContents
from hdtool.data import demo
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.model import ModelConfig


def test_the_loader_reads_the_documents_of_a_store(tmp_path: Path) -> None:
    out = tmp_path / "corpus.jsonl"
    made = export_corpus(ModelConfig(), out, StoresConfig(str(demo.MODEL_STORE), "none"))
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    tokens = [token for chunk in iter_external_corpus_chunks(str(out), tokenizer, made.tokens) for token in chunk]
    assert len(tokens) == made.tokens, "the limit that the command line names is enough"
    documents, read = [document.ids for document in StoreContents.of(demo.MODEL_STORE).documents()], [list[int]()]
    for token in tokens:
        if token == SEPARATOR_TOKEN:
            read.append([])
        else:
            read[-1].append(token)
    lost = sum(len(ids) - count_preserved_tokens(ids, back) for ids, back in zip(documents, read, strict=True))
    assert lost == made.lost_tokens
    with pytest.raises(ValueError, match="exceeds the configured token limit"):
        list(iter_external_corpus_chunks(str(out), tokenizer, made.tokens - 1))
