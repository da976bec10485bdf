"""The proof of a model is kept, and another start uses it only where everything is the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from hdtool.data.durable_files import json_digest
from hdtool.data.home import proofs_at_home
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.engines.proofs.tree_proof import prove_trees
from hdtool.runtime.engines.stock.model_facts import ModelFacts
from hdtool.runtime.engines.stock.stock_model import StockModel
from hdtool.runtime.model.compact_layers import has_compact_weights
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target import proof_cache
from hdtool.runtime.target.load import load

pytest.importorskip("gguf")

from tests.support.families import saved
from tests.support.gguf_files import tiny_llama, write_gguf
from tests.support.one_sequence import OneSequence

WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Heads are as wide as vectors, so that the model is compiled."""
TREE = DraftTree.of(3, [11, 23, 5], [-1, 0, -1])
Folder = Callable[[str], Path]


@pytest.fixture
def file(tmp_path: Path, home: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama(**WIDE), "Q8_0")


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[StockModel]:
    """The models whose trees were checked."""
    checked: list[StockModel] = []

    def check(stock: StockModel, facts: ModelFacts) -> ModelFacts:
        checked.append(stock)
        return prove_trees(stock, facts)

    monkeypatch.setattr("hdtool.runtime.engines.proofs.tree_proof.prove_trees", check)
    return checked


def logits_of(config: ModelConfig) -> torch.Tensor:
    target = load(config).target
    one = OneSequence(target)
    prompt = one.prefill(some_context(70, target.vocabulary))
    return torch.cat([prompt, one.verify(TREE)]).clone()


def records() -> list[Path]:
    return sorted(proofs_at_home().glob("[!.]*.json"))


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_the_second_start_has_the_bits_of_the_first(activations: str, file: Path, proofs: list[StockModel]) -> None:
    config = ModelConfig(str(file), activations=activations)
    expected = logits_of(config)
    assert len(proofs) == len(records()) == 1
    assert torch.equal(logits_of(config), expected)
    assert len(proofs) == 1, "it was proved again"


def test_a_kept_proof_changes_nothing_in_the_model(file: Path) -> None:
    first, second = (load(ModelConfig(str(file))).target for _ in range(2))
    names = [[(name, type(module)) for name, module in each.model.named_modules()] for each in (first, second)]
    assert names[0] == names[1]
    assert first.facts.shapes == second.facts.shapes and first.compiled is not None and second.compiled is not None
    assert has_compact_weights(second.model)
    assert first.model.generation_config.to_dict() == second.model.generation_config.to_dict()


def test_a_folder_is_proved_once_too(tmp_path: Path, home: Path, proofs: list[StockModel]) -> None:
    config = ModelConfig(str(saved(tiny_llama(**WIDE).bfloat16(), tmp_path / "model")))
    assert torch.equal(logits_of(config), logits_of(config))
    assert len(proofs) == 1


def test_a_changed_file_is_proved_again(file: Path, proofs: list[StockModel]) -> None:
    before = logits_of(ModelConfig(str(file)))
    write_gguf(file, tiny_llama(seed=1, **WIDE), "Q8_0")
    assert not torch.equal(logits_of(ModelConfig(str(file))), before)
    assert len(proofs) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(proof_cache, "FORMAT", 0),
        lambda patch: patch.setattr(proof_cache, "_source_hash", lambda: "another"),
        lambda patch: patch.setattr(proof_cache, "processor_name", lambda: "another"),
        lambda patch: patch.setattr("importlib.metadata.version", lambda name: "0"),
        lambda patch: patch.setattr("torch.get_num_threads", lambda: 7),
        lambda patch: patch.setenv("NUMBA_CPU_NAME", "another"),
    ],
    ids=["format", "hdtool", "processor", "versions", "threads", "environment"],
)
def test_other_circumstances_have_no_proof(
    change: Callable[[pytest.MonkeyPatch], None], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_llama(**WIDE).config

    def place(threads: int | None = None) -> Path:
        config = ModelConfig(threads=threads)
        return proof_cache.KeptProof(config, settings, LlamaForCausalLM, [file]).record.path

    proof_cache._machine.cache_clear()
    usual = place()
    with monkeypatch.context() as patch:
        change(patch)
        proof_cache._machine.cache_clear()
        other = place()
    proof_cache._machine.cache_clear()
    assert other != usual and place() == usual
    assert place(threads=3) != usual


def test_a_damaged_record_is_made_again(file: Path, proofs: list[StockModel]) -> None:
    expected = logits_of(ModelConfig(str(file)))
    (record,) = records()
    record.write_bytes(record.read_bytes()[:-40])
    assert torch.equal(logits_of(ModelConfig(str(file))), expected)
    assert len(proofs) == 2
    logits_of(ModelConfig(str(file)))
    assert len(proofs) == 2, "the record was not made again"


@pytest.mark.parametrize("field", ["logits", "shapes", "compact"])
def test_a_record_of_another_model_is_made_again(field: str, file: Path, proofs: list[StockModel]) -> None:
    """The name of the record and its checksum are right, and what it holds is not."""
    config = ModelConfig(str(file))
    expected = logits_of(config)
    (path,) = records()
    row = json.loads(path.read_text())
    value = row["value"]
    value[field] = {"logits": "0" * 64, "shapes": value["shapes"][:1], "compact": {"x": 1}}[field]
    row["sha256"] = json_digest(value)
    path.write_text(json.dumps(row))
    assert torch.equal(logits_of(config), expected)
    assert len(proofs) == (2 if field != "compact" else 1), "forms that are not named are proved as before"


def test_without_a_home_that_can_be_written_it_is_proved_each_time(home: Path, proofs: list[StockModel]) -> None:
    home.mkdir()
    (home / "proofs").write_text("a file where the folder would be")
    assert torch.equal(logits_of(ModelConfig()), logits_of(ModelConfig()))
    assert len(proofs) == 2
    assert os.listdir(home) != []


def test_other_options_are_proved_by_themselves(file: Path, proofs: list[StockModel]) -> None:
    for options in ({}, {"threads": 1}, {"dtype": "float32"}, {"fused_layers": False}):
        load(ModelConfig(str(file), **options))
    assert len(proofs) == 4 and len(records()) == 2, "only the usual way has a record"
