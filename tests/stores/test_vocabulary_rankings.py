"""A model's own rankings of its vocabulary in a model store, and what is drafted from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdtool.builders.stores.edit_store import merge
from hdtool.builders.stores.vocabulary_rankings import WHOLE, vocabulary_rankings
from hdtool.cli.app import run as command
from hdtool.data.errors import StoreError
from hdtool.data.stores.store import MANIFEST, Checkpoint
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.drafters.hierarchy.drafter import Hierarchy
from hdtool.runtime.model.load import Loaded, load
from hdtool.runtime.model.target import Target
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.model_store import RANKED, ModelStore
from tests.support.decoding import SAMPLINGS, run, said
from tests.support.families import VOCABULARY, model_of
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
        best = probs.topk(RANKED)
        assert rows[token, :RANKED].tolist() == best.indices.tolist()
        assert np.allclose(rows[token, RANKED:] / WHOLE, best.values, atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3"])
@pytest.mark.parametrize("recycles", [False, True])
def test_they_are_drafted_from_the_first_step_on(family: str, recycles: bool, tmp_path: Path) -> None:
    build(tmp_path, DOCUMENTS, VOCABULARY, rankings=rankings_of(family))
    target, prompt = Target(model_of(family)), prompt_of(12)
    for sampling in list(SAMPLINGS)[:2]:
        drafter = Hierarchy(ModelStore(tmp_path), budget=FixedBudget(24), last=recycles, recycled=recycles)
        steps = run(target, prompt, SAMPLINGS[sampling], drafter=drafter)
        assert said(steps) == said(run(target, prompt, SAMPLINGS[sampling]))
        first = steps[1].tree
        of_rankings = first.tokens[(first.parents == -1) & (first.sources == SourceName.RECYCLED)]
        best = ModelStore(tmp_path).rankings
        assert best is not None and len(of_rankings)
        assert set(of_rankings.tolist()) <= set(best[first.root, :RANKED].tolist())


def test_without_them_nothing_is_drafted_of_unknown_tokens(tmp_path: Path) -> None:
    build(tmp_path, DOCUMENTS, VOCABULARY)
    assert ModelStore(tmp_path).rankings is None
    drafter = Hierarchy(ModelStore(tmp_path), budget=FixedBudget(24))
    drafter.begin([1])
    assert SourceName.RECYCLED not in drafter.draft([1]).sources


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


def test_rankings_of_another_size_are_damage(tmp_path: Path) -> None:
    build(tmp_path, DOCUMENTS, VOCABULARY, rankings=rankings_of("llama")[:-1])
    with pytest.raises(StoreError, match="is damaged"):
        ModelStore(tmp_path)


def test_the_command_computes_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps({"output": f"The answer to question {n} is {n}."}) + "\n" for n in range(9)))
    store = tmp_path / "store"
    arguments = ["build-model-db", "--from", str(answers), "--out", str(store), "--rankings", "--quiet"]
    assert command(arguments) == 0
    assert "rankings" in capfd.readouterr().out
    found = ModelStore(store)
    loaded = load(ModelConfig())
    assert found.rankings is not None and len(found.rankings) == len(loaded.tokenizer)
    assert (found.rankings == vocabulary_rankings(loaded, len(loaded.tokenizer))).mean() > 0.99
    assert "rankings" in json.loads((store / MANIFEST).read_text())["files"]
