"""Models that compute with activations in 8 bits: drafted answers are those of plain decoding, in whatever company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hdtool.builders.evaluation.environment import describe_environment
from hdtool.builders.setup.held_out_answers import answer_prompts
from hdtool.cli.app import run as command
from hdtool.data.errors import OptionError
from hdtool.data.prompts import read_prompts
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.cpu.compiled_support import may_be_compiled
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.kernels.linear_layers import CompiledLinear
from hdtool.runtime.settings.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target import load as loading
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support import described, families, fused
from tests.support.decoding import answer_of
from tests.support.fused import compiled
from tests.support.gguf_files import VOCABULARY, tiny_llama, write_gguf
from tests.support.one_sequence import OneSequence
from tests.support.oracle import assert_same_logits, plain_logits
from tests.support.packed_blocks import needs_blocks

pytestmark = [needs_blocks, pytest.mark.usefixtures("home")]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads as wide as vectors, and blocks of 256 columns."""
PROMPT = [token % VOCABULARY for token in range(3, 600, 29)]


def file_of(folder: Path, kind: str = "Q4_1") -> Path:
    return write_gguf(folder / "tiny.gguf", tiny_llama(0, **SHAPE), kind)


def target_of(file: Path, activations: str = "int8") -> Target:
    return load(ModelConfig(str(file), device="cpu", activations=activations)).target


def test_logits_are_near_those_in_float32(tmp_path: Path) -> None:
    file = file_of(tmp_path, "Q8_0")
    found = []
    for activations in ("float32", "int8"):
        one = OneSequence(target_of(file, activations))
        one.prefill(PROMPT)
        found.append(one.verify(DraftTree.of(3, [5, 8, 13, 21], [-1, 0, 0, 2])).clone())
    distance = torch.linalg.vector_norm(found[1] - found[0]) / torch.linalg.vector_norm(found[0])
    assert 1e-5 < distance < 0.05


def test_a_replaced_weight_is_used(tmp_path: Path) -> None:
    """Adapters that are merged change weights after panels were made of them: the library's code computes then."""
    target = target_of(file_of(tmp_path, "Q8_0"))
    before = answer_of(target, PROMPT, max_new_tokens=8)
    layers = [module for module in target.model.modules() if isinstance(module, CompiledLinear)]
    assert len(layers) == 15 and compiled(target).is_current
    for layer in layers:
        layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0), requires_grad=False)
    one = OneSequence(target)
    found = one.prefill(PROMPT)
    assert not compiled(target).is_current
    assert_same_logits(found[0], plain_logits(target.model, PROMPT))
    assert answer_of(target, PROMPT, max_new_tokens=8) != before


def test_a_generator_rounds_as_the_loaded_model_does(tmp_path: Path) -> None:
    file = str(file_of(tmp_path))
    loaded = load(ModelConfig(file, device="cpu", activations="int8"))
    model: Any = loaded.target.model
    generator = Generator.drafting(loaded.tokenizer)
    drafted = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, custom_generate=generator)
    answers = [answer_of(target_of(Path(file), activations), PROMPT, max_new_tokens=40) for activations in ACTIVATIONS]
    assert answers[0] != answers[1]
    assert drafted[0, len(PROMPT) :].tolist() == answers[ACTIVATIONS.index("int8")]


def test_batches_and_servers_compute_so_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say it {number} times."}) + "\n" for number in range(5)))
    file = str(file_of(tmp_path))
    texts = []
    for batch in ("1", "3"):
        options = ("--prompts", str(prompts), "--max-new-tokens", "20", "--activations", "int8", "--batch-size", batch)
        assert command(["generate", "--model", file, *options, "--json"]) == 0
        lines = capfd.readouterr().out.strip().splitlines()
        texts.append(sorted(json.dumps(json.loads(line).get("text")) for line in lines))
    assert texts[0] == texts[1] and len(texts[0]) >= 5


def test_figures_name_the_activations(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    for activations in ("float32", "int8"):
        loaded = load(ModelConfig(str(file), device="cpu", activations=activations))
        assert describe_environment(loaded, StoreSet())["activations"] == activations


def test_the_answers_of_generate_may_differ(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``generate`` computes with activations in float32: a bench says so, and a set-up compares without it."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say it {number} times."}) + "\n" for number in range(3)))
    file = str(file_of(tmp_path))
    options = ("--questions", str(prompts), "--max-new-tokens", "24", "--activations", "int8", "--warm-up", "0")
    methods = ("--methods", "generate,ar,hd", "--out", str(tmp_path / "bench"))
    assert command(["bench", "--model", file, *options, *methods, "--quiet"]) == 0
    shown = capfd.readouterr().out
    assert "in float32, activations in int8, 3 questions" in " ".join(shown.split())
    assert "\ngenerate does not round activations: its answers may differ" in shown
    config = ModelConfig(file, device="cpu", activations="int8")
    found = answer_prompts(load(config), StoreSet(), config, SamplingConfig(), read_prompts(prompts), 3, 24, None)
    assert (found["prompts"], found["identical"], found["near_ties"]) == (3, 3, 0)


def test_other_models_refuse_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(["generate", "--model", "embedded", "--activations", "int8", "Hello"]) == 2
    assert "embedded has none: take --quantization q8_0" in capfd.readouterr().err
    with pytest.raises(OptionError, match="packed weights"):
        load(ModelConfig(str(file_of(tmp_path)), device="cpu", dtype="float32", activations="int8"))
    with pytest.raises(OptionError, match="compiled code"):
        load(ModelConfig(str(file_of(tmp_path)), device="cpu", fused_layers=False, activations="int8"))
    with pytest.raises(OptionError, match="activations"):
        ModelConfig(activations="int4")


def test_models_that_it_rules_out_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_on_one_device", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(loading, "stored_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(OptionError, match="has none: take --quantization q8_0, or leave it out"):
        load(ModelConfig(device="cpu", activations="int8"))
    families.saved(families.model_of("gpt2"), tmp_path)
    with pytest.raises(OptionError, match="of type gpt2, has others: leave it out"):
        load(ModelConfig(str(tmp_path), device="cpu", activations="int8", quantization="q8_0"))


@pytest.mark.parametrize("name", [*fused.KINDS, *described.MODELS, *described.HYBRID_MODELS, *described.VARIED_MODELS])
def test_what_is_compiled_has_the_outline_of_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused.widen(monkeypatch)
    monkeypatch.setitem(families.SHAPE, "head_dim", 32)
    model = fused.model_of(name) if name in fused.KINDS else described.model_of(name)
    assert may_be_compiled(model.config)
