"""Drafting by a small model: no token changes, and its cache holds what was accepted alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdtool.cli.app import run as hdtool
from hdtool.data import demo
from hdtool.data.errors import ModelError, OptionError
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.drafter_factory import drafter_for, drafters_for
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter
from hdtool.runtime.drafters.trained.block_drafter import BlockDrafter
from hdtool.runtime.drafters.trained.checkpoints import LOADED_BY_TARGET
from hdtool.runtime.drafters.trained.draft_model import DraftModel, draft_model_drafter
from hdtool.runtime.drafters.trained.path_drafting import DEPTHS, path_drafter
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support.decoding import (
    SAMPLINGS,
    answer_of,
    answers_of,
    output_tokens,
    request,
    run,
)
from tests.support.families import model_of, random_model
from tests.support.oracle import prompt_of
from tests.support.rehearsed import Rehearsed, Replayed, direct

CAPTURES: dict[str, CaptureMaker] = {
    "eager": never,
    "rehearsed": lambda device: Rehearsed(),
    "replayed": lambda device: Replayed(),
    "fixed": direct,
}


def alone(draft: Target, target: Target, nodes: int = 8) -> StandaloneDrafter:
    module = DraftModel(draft, target.vocabulary)
    drafter = path_drafter(module, module.drafts_in_one_run, None, None, source=SourceId.DRAFTER)
    return StandaloneDrafter(drafter, FixedBudget(nodes))


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", ["greedy", "T 0.7"])
@pytest.mark.parametrize("draft", ["llama", "qwen3_5", "gemma2"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_drafts_change_no_token(family: str, draft: str, sampling: str) -> None:
    """Over two turns of a conversation, the second of which goes on from the first."""
    target, chosen = Target(model_of(family)), SAMPLINGS[sampling]
    drafter = alone(Target(model_of(draft)), target)
    first = prompt_of(20)
    second = [*first, *answer_of(target, first, chosen, 20), *prompt_of(5)]
    for prompt in (first, second, prompt_of(7)):
        plain = answer_of(target, prompt, chosen, 24)
        steps = run(target, prompt, chosen, max_new_tokens=24, drafter=drafter)
        assert output_tokens(steps) == plain
        assert {source for step in steps for source in step.tree.sources.tolist()} == {SourceId.DRAFTER}


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_model_that_drafts_for_itself_is_always_right(family: str, capture: CaptureMaker) -> None:
    """So its cache is that of the context, whatever was drafted and cut off before."""
    made, target = Target(model_of(family), capture), Target(model_of(family))
    drafter = alone(made, target, nodes=4)
    in_one_run = isinstance(drafter.trained, BlockDrafter)
    assert in_one_run == (made.captures and family == "llama"), "recurrent states are taken back by the host"
    for prompt in (prompt_of(20), prompt_of(90)):
        steps = run(target, prompt, SamplingConfig(), max_new_tokens=40, drafter=drafter)
        chains = [step.tree.first_chain() for step in steps[1:-1]]
        assert all(len(chain) for chain in chains)
        accepted = [len(step.tokens) - 1 for step in steps[1:-1]]
        assert accepted == [len(chain) for chain in chains]


@pytest.mark.parametrize("capture", [each for each in CAPTURES if each != "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.one_in(2)
def test_one_run_ranks_what_passes_in_turn_do(family: str, capture: str) -> None:
    """Also after rejected drafts, a change of weights, and a prompt for which the cache grows."""
    model = copy.deepcopy(model_of(family))  # other tests share the original
    in_turn, in_one = DraftModel(Target(model), 90), DraftModel(Target(model, CAPTURES[capture]), 90)
    hidden, tokens, read = torch.empty(0), prompt_of(460), 1
    for changes in range(2):
        for module in (in_turn, in_one):
            module.begin(tokens[:1])
        for number, new in enumerate((300, 1, 9, 1, 17, 2, 70, 1)):
            depth = DEPTHS[number % len(DEPTHS)]
            in_one.draft_within_reading(depth)
            ranked = in_one.start(hidden, tokens[read : read + new])()
            expected = [in_turn.read(hidden, tokens[read : read + new])]
            for _ in range(depth):
                expected.append(in_turn.extend([0], [int(expected[-1][0][0, 0])]))
            read += new
            assert (ranked[0] == np.concatenate([tokens for tokens, _ in expected])).mean() > 0.9
            np.testing.assert_allclose(
                ranked[1], np.concatenate([probs for _, probs in expected]), rtol=2e-3, atol=1e-6
            )
        read = 1
        with torch.no_grad():
            for module in (in_turn, in_one):
                embedding: Any = module._model.model.get_input_embeddings()
                embedding.weight.mul_(1.5)
        assert not changes or in_one._runs._read[0] == 1


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_draft_that_was_rejected_leaves_no_trace(family: str) -> None:
    """Rankings after wrong tokens are those of a model that never read them."""
    model = Target(model_of(family))
    used = DraftModel(model, model.vocabulary)
    tokens = prompt_of(30)
    used.begin(tokens[:1])
    hidden = torch.empty(0)
    with torch.inference_mode():
        read = 1
        for new in (9, 1, 4, 1, 2):
            found = used.read(hidden, tokens[read : read + new])
            read += new
            fresh = DraftModel(model, model.vocabulary)
            fresh.begin(tokens[:1])
            expected = fresh.read(hidden, tokens[1:read])
            assert found[0].tolist() == expected[0].tolist()
            for wrong in (5, 6, 7):
                used.extend([0], [wrong])


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_draft_model_reads_again_what_its_weights_before_had_read(family: str) -> None:
    weights: Any = copy.deepcopy(model_of(family))
    draft = Target(weights)
    prompt = prompt_of(30)
    module = DraftModel(draft, draft.vocabulary)

    def ranked(module: DraftModel) -> tuple[np.ndarray[Any, Any], ...]:
        module.begin(prompt[:1])
        return module.read(torch.empty(0), prompt[1:])

    before = ranked(module)
    with torch.no_grad():
        weights.get_input_embeddings().weight.copy_(weights.get_input_embeddings().weight.flip(0))
    again, fresh = ranked(module), ranked(DraftModel(draft, draft.vocabulary))
    for here, expected in zip(again, fresh, strict=True):
        np.testing.assert_array_equal(here, expected)
    assert not np.array_equal(again[1], before[1])


@pytest.mark.parametrize("family", ["OPT", "Llama"])
def test_nothing_is_drafted_beyond_the_context_of_the_draft_model(family: str) -> None:
    """A model with learned positions has none after it. A later, shorter answer is drafted for again."""
    target = Target(model_of("llama"))
    shape: dict[str, Any] = {"ffn_dim": 48, "word_embed_proj_dim": 32} if family == "OPT" else {}
    drafter = alone(Target(random_model(family, max_position_embeddings=48, **shape)), target)
    for length in (30, 48, 60, 30):
        plain = answer_of(target, prompt_of(length), SamplingConfig(), max_new_tokens=30)
        steps = run(target, prompt_of(length), SamplingConfig(), max_new_tokens=30, drafter=drafter)
        assert output_tokens(steps) == plain
        context, drafted = length, list[int]()
        for step in steps:
            drafted += [context + depth for depth in step.tree.depths[1:].tolist()]
            context += len(step.tokens)
        assert max(drafted, default=0) <= 49 and bool(drafted) is (length == 30)


def test_the_drafters_of_a_batch_share_one_model() -> None:
    loaded = load(str(demo.MODEL))
    target, stores = loaded.target, StoreSet(tokenizer=TokenizerFingerprint.of(loaded.tokenizer))
    prompts = [prompt_of(length) for length in (4, 11, 7)]
    config = DecodeConfig("hd+drafter", draft_tokens=6, batch_size=3, drafter=str(demo.MODEL))
    drafters: list[Any] = list(drafters_for(config, target, stores))
    assert {id(drafter._trained.module._model) for drafter in drafters} == {
        id(LOADED_BY_TARGET[target][str(demo.MODEL)])
    }
    passes = target.log.passes
    found = answers_of(target, map(request, range(3), prompts, drafters), 2, 12)
    assert target.log.passes - passes < sum(map(len, found.values())) / 2  # it drafts for itself
    assert found == {number: answer_of(target, prompt, max_new_tokens=12) for number, prompt in enumerate(prompts)}


def test_models_that_cannot_draft_for_another_are_refused(tmp_path: Path) -> None:
    loaded = load(str(demo.MODEL))
    other = TokenizerFingerprint.of(loaded.tokenizer)
    target = Target(model_of("llama"))
    with pytest.raises(ModelError, match="has another tokenizer than the model"):
        draft_model_drafter(str(demo.HYBRID), target, changed(other))
    with pytest.raises(OptionError, match="drafter"):
        DecodeConfig("hd+drafter")
    with pytest.raises(ModelError):
        drafter_for(DecodeConfig("drafter", drafter=str(tmp_path / "none")), target, StoreSet())


@pytest.mark.parametrize("method", ["drafter", "hd+drafter"])
def test_another_tokenizer_is_noticed_where_no_store_is_opened(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(str(demo.MODEL))
    loaded.tokenizer.add_tokens(["<another>"])
    loaded.tokenizer.save_pretrained(tmp_path)
    loaded.target.model.save_pretrained(tmp_path)
    options = ["--method", method, "--drafter", str(tmp_path), "--model-db", "none", "--corpus-db", "none"]
    assert hdtool(["generate", "--prompt", "Hello", "--history", "none", *options]) == 1
    assert "has another tokenizer than the model" in capsys.readouterr().err


def test_tokens_that_a_draft_model_cannot_read_end_its_drafts() -> None:
    target, draft = Target(model_of("llama")), Target(random_model("Llama", vocab_size=50))
    for prompt in (prompt_of(20), [token % 50 for token in prompt_of(20)]):
        plain = answer_of(target, prompt, max_new_tokens=20)
        assert max(plain) >= 50
        assert answer_of(target, prompt, max_new_tokens=20, drafter=alone(draft, target)) == plain


def changed(tokenizer: TokenizerFingerprint) -> TokenizerFingerprint:
    return replace(tokenizer, vocab_size=tokenizer.vocab_size + 1)


def test_the_command_line_drafts_by_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-new-tokens", "12", "--prompt", "Hello", "--stats"]
    assert hdtool(["generate", *options]) == 0
    plain = capsys.readouterr().out
    for method in ("drafter", "hd+drafter"):
        assert hdtool(["generate", "--method", method, "--drafter", str(demo.MODEL), *options]) == 0
        assert capsys.readouterr().out == plain
    assert hdtool(["generate", "--method", "drafter", *options]) in (1, 2)
    assert "--drafter" in capsys.readouterr().err
    assert hdtool(["generate", "--method", "drafter", "--drafter", "./none", *options]) == 1
    assert capsys.readouterr().err.count("\n") == 1
