"""A model's own rankings of its vocabulary in a model store, and what is drafted from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hdtool.builders.stores.build_stores import PROBABILITY_UNITS, build_model_store, vocabulary_rankings
from hdtool.builders.stores.edit_store import StoreContents, add, merge
from hdtool.cli.app import run as command
from hdtool.data import demo
from hdtool.data.documents import Document, InputFile
from hdtool.data.errors import StoreError
from hdtool.data.stores.manifest import Checkpoint, TokenizerFingerprint
from hdtool.data.stores.store_file_names import MANIFEST
from hdtool.data.stores.store_folder import read_manifest
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.model_store import VOCABULARY_RANKING_TOKENS, ModelStore
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, output_tokens, run
from tests.support.families import VOCABULARY, model_of
from tests.support.gguf_files import tiny_llama, write_gguf
from tests.support.oracle import prompt_of
from tests.support.stores import build

DOCUMENTS = [prompt_of(length) for length in (20, 30)]
OF_MODEL = Checkpoint("0123456789abcdef", "some")


class _Tokenizer:
    bos_token_id = 3


def rankings_of(family: str) -> Any:
    tokenizer: Any = _Tokenizer()
    return vocabulary_rankings(Loaded(family, Target(model_of(family)), tokenizer), VOCABULARY)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_they_are_the_rankings_of_the_model(family: str) -> None:
    rows = rankings_of(family)
    for token in (0, 5, VOCABULARY - 1):
        with torch.inference_mode():
            probs = model_of(family)(input_ids=torch.tensor([[3, token]])).logits[0, -1].softmax(-1)
        best = probs.topk(VOCABULARY_RANKING_TOKENS)
        assert rows[token, :VOCABULARY_RANKING_TOKENS].tolist() == best.indices.tolist()
        assert np.allclose(rows[token, VOCABULARY_RANKING_TOKENS:] / PROBABILITY_UNITS, best.values, atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3"])
@pytest.mark.parametrize("recycles", [False, True])
def test_they_are_drafted_from_the_first_step_on(family: str, recycles: bool, tmp_path: Path) -> None:
    build(tmp_path, DOCUMENTS, VOCABULARY, rankings=rankings_of(family))
    target, prompt = Target(model_of(family)), prompt_of(12)
    for sampling in list(SAMPLINGS)[:2]:
        drafter = Hierarchy(ModelStore(tmp_path), budget=FixedBudget(24), last=recycles, recycled=recycles)
        steps = run(target, prompt, SAMPLINGS[sampling], 24, drafter=drafter)
        assert output_tokens(steps) == output_tokens(run(target, prompt, SAMPLINGS[sampling], 24))
        first = steps[1].tree
        of_rankings = first.tokens[(first.parents == -1) & (first.sources == SourceId.RECYCLED)]
        best = ModelStore(tmp_path).rankings
        assert best is not None and len(of_rankings)
        assert set(of_rankings.tolist()) <= set(best[first.root, :VOCABULARY_RANKING_TOKENS].tolist())


def test_without_them_nothing_is_drafted_of_unknown_tokens(tmp_path: Path) -> None:
    build(tmp_path, DOCUMENTS, VOCABULARY)
    assert ModelStore(tmp_path).rankings is None
    drafter = Hierarchy(ModelStore(tmp_path), budget=FixedBudget(24))
    drafter.begin([1])
    assert SourceId.RECYCLED not in drafter.draft([1]).sources


def test_they_last_as_long_as_their_model(tmp_path: Path) -> None:
    rows = rankings_of("llama")
    build(tmp_path / "one", DOCUMENTS, VOCABULARY, rankings=rows, model=OF_MODEL)
    build(tmp_path / "same", [prompt_of(25)], VOCABULARY, model=OF_MODEL)
    build(tmp_path / "other", [prompt_of(26)], VOCABULARY, model=Checkpoint("f" * 16, "other"))
    for number, order in enumerate((["one", "same"], ["same", "one"])):
        merge([tmp_path / name for name in order], tmp_path / f"merged{number}")
        merged = ModelStore(tmp_path / f"merged{number}")
        assert merged.rankings is not None and (merged.rankings == rows).all()
    merge([tmp_path / "one", tmp_path / "other"], tmp_path / "of two models")
    assert ModelStore(tmp_path / "of two models").rankings is None


def rankings_alone(folder: Path, family: str) -> ModelStore:
    mark = TokenizerFingerprint("test", VOCABULARY)
    build_model_store(folder, [], mark, [], rankings=rankings_of(family), model=OF_MODEL)
    return ModelStore(folder, mark)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_store_of_rankings_alone_is_drafted_from(family: str, tmp_path: Path) -> None:
    store = rankings_alone(tmp_path, family)
    assert not store.after([1, 2, 3, 4]) and not len(store.phrases_after(5)[0])
    target, prompt = Target(model_of(family)), prompt_of(12)
    for sampling in SAMPLINGS.values():
        steps = run(target, prompt, sampling, max_new_tokens=24, drafter=Hierarchy(store, budget=FixedBudget(24)))
        assert output_tokens(steps) == output_tokens(run(target, prompt, sampling, max_new_tokens=24))
        assert SourceId.RECYCLED in steps[1].tree.sources


def test_answers_are_added_to_rankings_as_if_built_with_them(tmp_path: Path) -> None:
    rankings_alone(tmp_path / "grown", "llama")
    mark, source = TokenizerFingerprint("test", VOCABULARY), InputFile("test", "")
    add(tmp_path / "grown", [Document(ids) for ids in DOCUMENTS], [source], mark)
    build(tmp_path / "whole", DOCUMENTS, VOCABULARY, rankings=rankings_of("llama"), model=OF_MODEL)
    rankings_alone(tmp_path / "alone", "llama")
    build(tmp_path / "answers", DOCUMENTS, VOCABULARY, model=OF_MODEL)
    merge([tmp_path / "alone", tmp_path / "answers"], tmp_path / "merged")
    for name in ("grown", "merged"):
        grown, whole = read_manifest(tmp_path / name), read_manifest(tmp_path / "whole")
        assert {part: file.sha256 for part, file in grown.files.items()} == {
            part: file.sha256 for part, file in whole.files.items()
        }


def test_empty_parts_are_damage_if_there_are_answers(tmp_path: Path) -> None:
    build(tmp_path, DOCUMENTS, VOCABULARY)
    row = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / row["files"]["rows"]["name"]).write_bytes(b"")
    row["files"]["rows"]["bytes"] = 0
    (tmp_path / MANIFEST).write_text(json.dumps(row))
    with pytest.raises(StoreError, match="no whole rows"):
        ModelStore(tmp_path)


def test_answers_without_text_are_refused_with_rankings_too(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no text at all"):
        build(tmp_path, [[]], VOCABULARY, rankings=rankings_of("llama"))


def test_rankings_of_another_size_are_damage(tmp_path: Path) -> None:
    build(tmp_path, DOCUMENTS, VOCABULARY, rankings=rankings_of("llama")[:-1])
    with pytest.raises(StoreError, match="is damaged"):
        ModelStore(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with few tokens to rank the others after."""
    return str(write_gguf(tmp_path_factory.mktemp("model") / "small.gguf", tiny_llama()))


def test_the_command_needs_answers_or_rankings(small: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = str(tmp_path / "store")
    assert command(["build-model-db", "--model", small, "--out", store]) == 2
    assert "nothing to build from: give the model's answers with --from, or --rankings" in capfd.readouterr().err
    assert command(["build-model-db", "--model", small, "--out", store, "--rankings", "--quiet"]) == 0
    assert command(["inspect", store, "--verify"]) == 0
    assert "512 rankings" in capfd.readouterr().out
    assert str(StoreSet(ModelStore(tmp_path / "store"))).endswith("(512 rankings)")


def test_add_takes_rankings_of_the_same_model_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    shutil.copytree(demo.MODEL_STORE, store)
    assert command(["add", str(store), "--model", "embedded"]) == 2
    assert "nothing to add: name FILES, or give --rankings" in capfd.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(demo.MODEL, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    assert command(["add", str(store), "--model", str(other), "--rankings"]) == 1
    assert "do not belong to them: build a store of that model" in capfd.readouterr().err
    assert command(["add", str(store), "--model", "embedded", "--rankings", "--quiet"]) == 0
    grown, before = read_manifest(store), read_manifest(demo.MODEL_STORE)
    assert grown.counts == {**before.counts, "rankings": 4096}
    texts, texts_before = (
        [ids.tolist() for ids in StoreContents.of(place).texts()] for place in (store, demo.MODEL_STORE)
    )
    assert texts == texts_before
    shutil.copytree(demo.CORPUS_INDEX, tmp_path / "corpus")
    assert command(["add", str(tmp_path / "corpus"), "--model", "embedded", "--rankings"]) == 1
    assert "a model store is needed" in capfd.readouterr().err


def test_the_command_computes_them(small: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps({"output": f"The answer to question {n} is {n}."}) + "\n" for n in range(9)))
    store = tmp_path / "store"
    arguments = ["build-model-db", "--from", str(answers), "--out", str(store), "--rankings", "--quiet"]
    assert command([*arguments, "--model", small]) == 0
    assert "rankings" in capfd.readouterr().out
    found = ModelStore(store)
    loaded = load(ModelConfig(small))
    assert found.rankings is not None and len(found.rankings) == len(loaded.tokenizer)
    assert (found.rankings == vocabulary_rankings(loaded, len(loaded.tokenizer))).mean() > 0.99
    assert "rankings" in json.loads((store / MANIFEST).read_text())["files"]
