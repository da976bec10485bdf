"""Stores as an external corpus of SGLang: the tokens that it reads back are those of the stores, or are counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hdtool.builders.export import REPLACEMENT, count_preserved_tokens, export_corpus, text_of
from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store
from hdtool.builders.stores.edit_store import StoreContents
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.documents import Document, InputFile
from hdtool.data.progress import progress_bar
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.history_ring import create_if_new
from hdtool.runtime.stores.history_store import HistoryStore
from hdtool.runtime.stores.model_store import VOCABULARY_RANKING_TOKENS

TEXTS = ("One, two.\nThree, four!", "  a line\r\nwith 'quotes' \"and\" \\ and \u2028 é 漢字 🙂", "<|im_start|>x")
SMILE = "🙂"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.MODEL)


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def index(folder: Path, tokenizer: Any, documents: list[list[int]]) -> Path:
    given = (Document(document) for document in documents)
    mark = TokenizerFingerprint.of(tokenizer)
    build_corpus_index(folder, given, mark, [InputFile("some", "0")], executor=BuildExecutor(1))
    return folder


def read_back(path: Path, tokenizer: Any) -> Iterator[list[int]]:
    """What SGLang encodes, by the rules of its loader: a JSON string in each line, no special tokens added."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            record = json.loads(line)
            assert isinstance(record, str)
            yield list(tokenizer.encode(record, add_special_tokens=False))


def exported(out: Path, *options: str, model: str = "embedded") -> int:
    return run(["export", model, "--to", "sglang", "--out", str(out), *options])


def test_texts_come_back_as_the_tokens_of_the_store(tmp_path: Path, tokenizer: Any) -> None:
    documents = [ids(tokenizer, text) for text in TEXTS]
    special = tokenizer.eos_token_id
    documents.append([*documents[0], special, *documents[1]])
    store = index(tmp_path / "store", tokenizer, documents)
    made = export_corpus(ModelConfig(), tmp_path / "corpus.jsonl", StoresConfig("none", str(store)))
    assert list(read_back(tmp_path / "corpus.jsonl", tokenizer)) == documents
    assert (made.documents, made.lost_tokens, made.changed_documents) == (len(documents), 0, 0)
    assert made.tokens == sum(map(len, documents)) + len(documents) - 1, "SGLang counts a separator between documents"


def test_the_stores_of_the_demo(home: Path, tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "corpus.jsonl"
    assert exported(out, "--corpus-db", "none", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    back, (kept, lost) = list(read_back(out, tokenizer)), (0, 0)
    for document, again in zip(StoreContents.of(demo.MODEL_STORE).documents(), back, strict=True):
        same = count_preserved_tokens(document.ids, again)
        kept, lost = kept + same, lost + len(document.ids) - same
    assert kept > 100 * lost
    assert told["lost_tokens"] == lost
    assert told["tokens"] == sum(map(len, back)) + len(back) - 1
    assert (told["file"], told["documents"]) == (str(out), len(back))
    assert told["stores"] == [str(demo.MODEL_STORE)]


def test_parts_of_characters_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    smile = ids(tokenizer, SMILE)
    assert len(smile) > 1
    word = ids(tokenizer, "word")
    cut = [*word, *smile[:-1]]
    assert REPLACEMENT not in text_of(tokenizer, cut)
    assert text_of(tokenizer, [*smile[1:], *word]) == "word"
    store = index(tmp_path / "store", tokenizer, [cut, word, smile[:-1], [*word, *smile]])
    out = tmp_path / "corpus.jsonl"
    assert exported(out, "--model-db", "none", "--corpus-db", str(store)) == 0
    assert list(read_back(out, tokenizer)) == [word, word, [*word, *smile]]
    told = capfd.readouterr()
    assert told.out.startswith(f"{out}: 3 documents, {2 * len(word) + len(word) + len(smile) + 2} tokens")
    assert f"{2 * (len(smile) - 1)} tokens of 2 documents come back as others" in told.err
    assert "1 document left out: no text remains" in told.err
    assert f"--speculative-ngram-external-corpus-path {out}" in told.err


def test_tokens_that_the_tokenizer_would_not_choose_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    single = [token for letter in "pencils" for token in ids(tokenizer, letter)]
    whole = ids(tokenizer, "pencils")
    assert len(whole) < len(single)
    store = index(tmp_path / "store", tokenizer, [single, whole])
    made = export_corpus(ModelConfig(), tmp_path / "corpus.jsonl", StoresConfig("none", str(store)))
    assert list(read_back(tmp_path / "corpus.jsonl", tokenizer)) == [whole, whole]
    assert (made.changed_documents, made.lost_tokens) == (1, len(single) - count_preserved_tokens(single, whole))


@pytest.mark.parametrize(
    ("one", "other", "kept"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 9, 3], 2), ([1, 1, 1], [1, 1], 2), ([], [1], 0), ([4], [5], 0)],
)
def test_kept_tokens(one: list[int], other: list[int], kept: int) -> None:
    assert count_preserved_tokens(one, other) == kept


def test_answers_of_a_history_come_first(tmp_path: Path, tokenizer: Any) -> None:
    folder, mark = tmp_path / "history", TokenizerFingerprint.of(tokenizer)
    create_if_new(folder, mark, "model")
    answer = ids(tokenizer, TEXTS[0])
    assert HistoryStore(folder).append(answer, [1, 2])
    store = index(tmp_path / "store", tokenizer, [ids(tokenizer, "other")])
    out = tmp_path / "corpus.jsonl"
    options = ("--history", str(folder), "--corpus-db", str(store))
    assert exported(out, "--model-db", "none", *options) == 0
    assert list(read_back(out, tokenizer)) == [answer, ids(tokenizer, "other")]


def test_the_progress_counts_the_tokens_of_all_documents(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = tmp_path / "history", TokenizerFingerprint.of(tokenizer)
    create_if_new(folder, mark, "model")
    answer, other, totals = ids(tokenizer, TEXTS[0]), ids(tokenizer, "other"), list[int]()
    assert HistoryStore(folder).append(answer, [1, 2])

    def recorded(total: int, *arguments: Any, **options: Any) -> Any:
        totals.append(total)
        return progress_bar(total, *arguments, **options)

    monkeypatch.setattr("hdtool.builders.export.progress_bar", recorded)
    stores = StoresConfig("none", str(index(tmp_path / "store", tokenizer, [other])))
    export_corpus(ModelConfig(), tmp_path / "corpus.jsonl", stores, str(folder))
    assert totals == [len(answer) + len(other)]


class TestRefusals:
    def fault(self, capfd: pytest.CaptureFixture[str], out: Path, *options: str, code: int = 1, **named: Any) -> str:
        assert exported(out, *options, **named) == code
        (line,) = capfd.readouterr().err.splitlines()
        return line

    def test_a_file_is_never_replaced(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "corpus.jsonl"
        out.write_text('"mine"\n')
        assert "is there and is not an empty file: choose another --out" in self.fault(capfd, out)
        assert out.read_text() == '"mine"\n'
        assert "it is a folder" in self.fault(capfd, tmp_path)

    def test_a_write_that_is_stopped_leaves_nothing(
        self, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        store = index(tmp_path / "store", tokenizer, [ids(tokenizer, "word")])
        monkeypatch.setattr("hdtool.builders.export.ExportedCorpus.count", stop)
        out = tmp_path / "out" / "corpus.jsonl"
        assert exported(out, "--model-db", "none", "--corpus-db", str(store)) == 130
        assert list(out.parent.iterdir()) == []

    def test_nothing_to_export(self, tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "corpus.jsonl"
        none = ("--model-db", "none", "--corpus-db", "none")
        assert "name one with --model-db, --corpus-db or --history" in self.fault(capfd, out, *none)
        assert "holds no history store" in self.fault(capfd, out, "--history", str(tmp_path))
        mark, end = TokenizerFingerprint.of(tokenizer), len(tokenizer)
        rankings = np.full((end, 2 * VOCABULARY_RANKING_TOKENS), -1, np.int32)
        build_model_store(tmp_path / "rankings", iter(()), mark, [], rankings=rankings)
        said = self.fault(capfd, out, "--model-db", str(tmp_path / "rankings"), "--corpus-db", "none")
        assert "no text is in" in said
        assert not out.exists()

    def test_options_of_a_folder(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "corpus.jsonl"
        said = self.fault(capfd, out, "--method", "rest", code=2)
        assert "--method has no effect with --to sglang" in said
        assert run(["export", "embedded", "--to", "vllm", "--out", str(out)]) == 2
        assert "--to must be one of transformers, sglang, got vllm" in capfd.readouterr().err

    def test_a_store_of_another_tokenizer(
        self, tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        mark = TokenizerFingerprint("other", len(tokenizer))
        given = (Document([1, 2]) for _ in range(2))
        build_corpus_index(tmp_path / "store", given, mark, [InputFile("some", "0")], executor=BuildExecutor(1))
        assert "another tokenizer" in self.fault(capfd, tmp_path / "c.jsonl", "--corpus-db", str(tmp_path / "store"))
