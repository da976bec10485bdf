"""The demo's stores: whole, of the demo's tokenizer, small, and free of what was held out."""

from __future__ import annotations

import json
from pathlib import Path, PurePath

import pytest
from transformers import PreTrainedTokenizerBase

from hdtool.builders.demo import demo_stores
from hdtool.builders.stores.edit_store import StoreContents
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.prompts import read_prompts
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_folder import damaged_files, read_manifest
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.target.load import load_tokenizer
from tests.benchmarks.demo_texts import INDEX_KINDS, TrainingDocument, index_documents, questions

STORES = (demo.MODEL_STORE, demo.CORPUS_INDEX)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig())


def texts_of(store: Path, tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {str(tokenizer.decode(ids)) for ids in StoreContents.of(store).texts()}


def test_the_shipped_stores_open_and_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    mark = TokenizerFingerprint.of(tokenizer)
    context = tokenizer("He has 3 x 12 = <<3*12", add_special_tokens=False)["input_ids"]
    assert ModelStore(demo.MODEL_STORE, mark).after(context)
    assert len(CorpusIndex(demo.CORPUS_INDEX, mark).after(context).tokens)


@pytest.mark.parametrize("store", STORES, ids=lambda store: store.name)
def test_the_shipped_stores_are_whole(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(store)
    assert damaged_files(store, manifest) == []
    names = [source.name for source in manifest.sources]
    assert names and all(name == PurePath(name).name for name in names), "nothing tells of the place of the build"
    assert run(["inspect", str(store), "--verify", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["verified"] == len(manifest.files)


def test_the_shipped_stores_are_small() -> None:
    assert sum(path.stat().st_size for store in STORES for path in store.iterdir()) < 10**7


def test_nothing_held_out_is_in_the_shipped_stores(tokenizer: PreTrainedTokenizerBase) -> None:
    references = {json.loads(line)["reference"] for line in demo.PROMPTS.read_text(encoding="utf-8").splitlines()}
    asked = [prompt.messages[0]["content"] for prompt in read_prompts(demo.PROMPTS)]
    for store in STORES:
        texts = texts_of(store, tokenizer)
        assert not references & texts
        together = "\0".join(texts)
        assert not [question for question in asked if question in together]


def morsel() -> list[TrainingDocument]:
    """Of each kind some documents; one page repeats a question that was held out, and one has terms of its own."""
    pages = [f"lib/page{number}.py" for number in range(80)]
    rows = [
        TrainingDocument(kind, f"{page}#x", f"This is what {kind} is on {page}.", f"What is {kind} on {page}?")
        for kind in ("explain", "write", "edit")
        for page in pages
    ]
    rows += [TrainingDocument("math", f"gsm8k/train#{n}", f"{n} + 1 = {n + 1}", f"What is {n} + 1?") for n in range(80)]
    held_out = next(row for row in rows if row.held_out)
    again = TrainingDocument("write", "lib/copy.py#x", "A copy.", held_out.question)
    owned = [
        TrainingDocument("code", "lib/owned.py", "# Copyright"),
        TrainingDocument("write", "lib/owned.py#x", "Owned.", "Own it."),
    ]
    return [*rows, again, *owned]


def test_the_questions_are_of_every_kind_and_not_held_out() -> None:
    everything = morsel()
    held_out = {document.question for document in everything if document.held_out}
    rows = list(questions(everything, per_kind=70))
    asked = {row["messages"][0]["content"] for row in rows}
    assert held_out and not held_out & asked
    assert [row["category"] for row in rows[:4]] == ["math", "explain", "write", "edit"]
    assert len(asked) == len({row["id"] for row in rows}) == 280


def test_the_corpus_is_whole_documents_of_as_many_tokens_of_each_kind(tokenizer: PreTrainedTokenizerBase) -> None:
    everything = morsel()
    chosen = list(index_documents(everything, tokenizer, per_kind=200))
    assert not [document for document in chosen if document.held_out or document.page == "lib/owned.py"]
    tokens = dict.fromkeys(INDEX_KINDS, 0)
    for document in chosen:
        tokens[document.kind] += len(tokenizer(document.answer, add_special_tokens=False)["input_ids"])
    assert all(170 < count <= 200 for count in tokens.values())


@pytest.mark.long
def test_texts_added_to_the_demo_s_stores_are_kept(home: Path, tmp_path: Path) -> None:
    stores = demo_stores.stores_of_real_model(ModelConfig())  # the embedded tokenizer stands in for SmolLM2's
    own = tmp_path / "own.jsonl"
    own.write_text('{"text": "A document that the demo does not hold."}\n')
    folders = [Path(folder) for folder in (stores.model_db, stores.corpus_db) if folder]
    for folder in folders:
        assert run(["add", str(folder), str(own), "--quiet"]) == 0
    manifests = [read_manifest(folder) for folder in folders]
    assert demo_stores.stores_of_real_model(ModelConfig()) == stores
    assert [read_manifest(folder) for folder in folders] == manifests
    assert all(manifest.sources[1].name == str(own) for manifest in manifests)


def test_a_demo_store_without_the_demo_s_texts_is_built_again(home: Path) -> None:
    stores = demo_stores.stores_of_real_model(ModelConfig())
    folder = Path(str(stores.corpus_db))
    own, path = read_manifest(folder).sources, folder / "manifest.json"
    path.write_text(path.read_text().replace(own[0].sha256, "0" * 64))
    demo_stores.stores_of_real_model(ModelConfig())
    assert read_manifest(folder).sources == own
