"""Drafting by multi-token-prediction layers: no token changes, and drafts are those of the library."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import MTPCandidateGenerator

from hdtool.data import demo
from hdtool.data.errors import HeadsError
from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import PassLog, Verified
from hdtool.runtime.drafters.drafter_factory import drafter_for, drafters_for
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter
from hdtool.runtime.drafters.trained.checkpoints import LOADED_BY_TARGET
from hdtool.runtime.drafters.trained.mtp import (
    MTP_CACHE_NAME,
    IteratedMtp,
    load_mtp,
    mtp_drafter,
    mtp_layers_of,
    patterns_of,
)
from hdtool.runtime.drafters.trained.proposal import PROB_BUCKETS
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.engines.reference.drafter_layers import DrafterLayers
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, assert_answers_of_batch, assert_drafts_change_nothing, output_tokens, run
from tests.support.families import model_of
from tests.support.library_drafts import best_chains, drafts_of_library
from tests.support.mtp import TYPES, WITH_STATES, with_mtp
from tests.support.oracle import prompt_of
from tests.support.published_drafters import few_words
from tests.support.rehearsed import Rehearsed, direct

SAMPLED = SamplingConfig(temperature=0.8, seed=3)
METHODS = ("mtp", "hd+mtp")


def drafter_of(method: str, target: Target, nodes: int = 12) -> Any:
    return drafter_for(DecodeConfig(method, draft_tokens=nodes), target, StoreSet())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.one_in(10)
def test_layers_of_each_type_change_no_token(kind: str, tmp_path: Path) -> None:
    target = Target(with_mtp(kind, tmp_path))
    for sampling in (SamplingConfig(), SAMPLED):
        for method in METHODS:
            assert_drafts_change_nothing(target, drafter_of(method, target), sampling, (20, 20), SourceId.HEADS)


@pytest.mark.each_value
@pytest.mark.parametrize(("kind", "layers"), [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 2), ("mellum", 1)])
def test_drafts_are_those_of_the_library(
    kind: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step for step, with tokens that are accepted and others that are not."""
    model = few_words(with_mtp(kind, tmp_path, layers))
    prompt = prompt_of(20)
    library = drafts_of_library(monkeypatch, MTPCandidateGenerator)
    # The library knows the place of the layers by the published sizes of a type alone.
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", patterns_of(model))
    ids: Any = torch.tensor([prompt])
    generated = model.generate(ids, max_new_tokens=60, do_sample=False, use_mtp=True)  # type: ignore[operator]

    target = Target(model)
    drafter = drafter_of("mtp", target, layers)
    ours = best_chains(drafter)
    steps = run(target, prompt, SamplingConfig(), max_new_tokens=60, drafter=drafter)
    accepted, answer = sum(len(step.tokens) - 1 for step in steps), output_tokens(steps)
    assert answer == generated[0, 20 : 20 + len(answer)].tolist() and len(answer) == 60
    shared = sorted(set(ours) & set(library))[:-1]
    assert accepted > 2 and len(shared) > 15
    assert [ours[place] for place in shared] == [library[place][: len(ours[place])] for place in shared]


@pytest.mark.parametrize(
    "capture", [never, lambda device: Rehearsed(), direct], ids=["as they come", "rehearsed", "fixed"]
)
def test_rankings_are_those_of_a_module_that_reads_everything_anew(capture: CaptureMaker, tmp_path: Path) -> None:
    """Whatever was drafted and rejected before."""
    target = Target(with_mtp("glm4_moe", tmp_path), capture)
    assert target.captures is (capture is not never)
    target.watch_hidden()
    layers = load_mtp(target.model)
    used = IteratedMtp(layers, target)
    torch.manual_seed(0)
    hidden, tokens = torch.randn(40, layers.width), torch.randint(97, (40,)).tolist()
    with torch.inference_mode():
        read = 0
        for new in (21, 1, 3, 9, 1, 5):
            before, chosen = hidden[read : read + new], tokens[read : read + new]
            read += new
            fresh = IteratedMtp(layers, target)
            same(used.read(before, chosen), fresh.read(hidden[:read], tokens[:read]))
            for parents, next_tokens in (([0, 0], [5, 6]), ([1, 2, 1], [7, 8, 9]), ([4], [10]), ([6, 3], [11, 12])):
                found = used.extend(parents, next_tokens)
            alone = IteratedMtp(layers, target)
            alone.read(hidden[:read], tokens[:read])
            for token in (6, 8, 10):
                path = alone.extend([0 if token == 6 else token // 2 - 3], [token])
            again = used.extend([6], [11])
            same(again, alone.extend([3], [11]))
            same((found[0][:1], found[1][:1]), again)
            assert path[0].shape == (1, 10)


@pytest.mark.parametrize(
    ("kind", "described"), [("glm4_moe", True), ("qwen3_5_text", True), ("deepseek_v3", True), ("mellum", False)]
)
def test_described_layers_are_computed_by_the_engines_program(kind: str, described: bool, tmp_path: Path) -> None:
    """And rank as the library's code does."""
    target = Target(with_mtp(kind, tmp_path))
    drafter: Any = mtp_drafter(target)
    layers, of_library = LOADED_BY_TARGET[target][MTP_CACHE_NAME], load_mtp(target.model)
    assert bool(layers._programs) is described and not of_library._programs
    other = IteratedMtp(of_library, target)
    torch.manual_seed(0)
    hidden, tokens = torch.randn(9, layers.width), torch.randint(97, (9,)).tolist()
    same(drafter.module.read(hidden, tokens), other.read(hidden, tokens))
    same(drafter.module.extend([0, 0], [5, 6]), other.extend([0, 0], [5, 6]))


def test_a_program_with_other_states_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = DrafterLayers.run
    monkeypatch.setattr(DrafterLayers, "run", lambda *given, **options: usual(*given, **options) * 1.1)
    target = Target(with_mtp("glm4_moe", tmp_path))
    mtp_drafter(target)
    assert not LOADED_BY_TARGET[target][MTP_CACHE_NAME]._programs


def test_captured_passes_of_layers_in_turn_draft_what_others_do(tmp_path: Path) -> None:
    model, capture = with_mtp("glm4_moe", tmp_path, 2), Rehearsed()
    usual, captured = Target(model), Target(model, lambda device: capture)
    used: list[Any] = [mtp_drafter(target) for target in (usual, captured)]
    recorded = capture.recorded
    torch.manual_seed(0)
    for new in (5, 1, 3, 16, 1):
        hidden, tokens = torch.randn(new, model.config.hidden_size), torch.randint(97, (new,)).tolist()
        same(*(drafter.module.read(hidden, tokens) for drafter in reversed(used)))
    assert capture.recorded > recorded and captured.captures


def same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-3, atol=1e-5)
    assert (found[0] == expected[0])[expected[1] > 1.01 * np.roll(expected[1], -1, 1)].all()


def test_several_answers_in_one_batch_keep_their_own_caches(tmp_path: Path) -> None:
    target = Target(with_mtp("qwen3_5_text", tmp_path))
    prompts = [prompt_of(length) for length in (4, 11, 7)]
    for method in METHODS:
        drafters = drafters_for(DecodeConfig(method, draft_tokens=6, batch_size=3), target, StoreSet())
        assert_answers_of_batch(target, prompts, drafters, 2, 9)


def test_the_trained_hybrid_drafts_far_ahead() -> None:
    """Its only layer was trained for the next token but one, and is applied again and again."""
    loaded = load(str(demo.HYBRID))
    prompt: Any = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Explain what a list is."}], add_generation_prompt=True, return_dict=False
    )
    plain = answer_of(loaded.target, list(prompt), SamplingConfig(), max_new_tokens=80)
    for method, fewest in (("mtp", 2.5), ("hd+mtp", 2.5)):
        steps = run(
            loaded.target, list(prompt), SamplingConfig(), max_new_tokens=80, drafter=drafter_of(method, loaded.target)
        )
        assert output_tokens(steps) == plain
        assert len(plain) / len(steps) > fewest


def test_checkpoints_without_usable_layers_are_refused(tmp_path: Path) -> None:
    target = Target(model_of("llama"))
    assert mtp_layers_of(target.model) == 0
    with pytest.raises(
        HeadsError, match=r"has no MTP layers: train one with hdtool train-heads --kind mtp .*, or use another method"
    ):
        drafter_of("mtp", target)
    with_states = with_mtp(WITH_STATES, tmp_path)
    assert mtp_layers_of(with_states) == 1
    with pytest.raises(HeadsError, match=r"cannot be used \(type 'inkling_text': layers that keep states\)"):
        load_mtp(with_states)


def test_a_configuration_that_says_more_layers_than_there_are(tmp_path: Path) -> None:
    model = with_mtp("deepseek_v3", tmp_path)
    model.config.num_mtp_layers = 3
    assert mtp_layers_of(model) == 1
    target = Target(model)
    plain = answer_of(target, prompt_of(20), max_new_tokens=12)
    assert answer_of(target, prompt_of(20), max_new_tokens=12, drafter=drafter_of("mtp", target)) == plain


def test_layers_that_do_not_pay_make_few_passes(tmp_path: Path) -> None:
    target = Target(with_mtp("glm4_moe", tmp_path))
    passes = list[int]()

    class Dear(TrainedDrafterGate):
        """Each pass takes the time of ten steps, but the drafter runs in each step."""

        def may_run(self, cost: float) -> bool:
            return True

        def note_pass(self, rows: int, seconds: float) -> None:
            super().note_pass(rows, 10.0)

        def observe(self, tokens: float, seconds: float, used: bool | None = None) -> None:
            super().observe(tokens, 1.0, used)

        def paths_to_extend(self, path_probs: Any, certainty: float) -> int:
            passes.append(super().paths_to_extend(path_probs, certainty))
            return passes[-1]

    gate = Dear(PassLog(last_seconds=1.0))
    gate.note_pass(1, 10.0)
    alone = StandaloneDrafter(mtp_drafter(target, gate), drafter_of("mtp", target).budget)
    steps = run(target, prompt_of(20), SamplingConfig(), max_new_tokens=20, drafter=alone)
    assert output_tokens(steps) == answer_of(target, prompt_of(20), SamplingConfig(), max_new_tokens=20)
    assert set(passes) == {0} and all(step.tree.depths.max() <= 1 for step in steps)


@pytest.mark.parametrize(("kind", "layers"), [("glm4_moe", 1), ("deepseek_v3", 3)])
def test_layers_that_overflow_change_no_token(kind: str, layers: int, tmp_path: Path) -> None:
    target = Target(with_mtp(kind, tmp_path, layers))
    plain = answer_of(target, prompt_of(20), SamplingConfig(), max_new_tokens=20)
    for method in METHODS:
        drafter = drafter_of(method, target)
        for parameter in LOADED_BY_TARGET[target][MTP_CACHE_NAME].own.parameters():
            parameter.fill_(torch.nan)
        assert answer_of(target, prompt_of(20), SamplingConfig(), max_new_tokens=20, drafter=drafter) == plain


def test_a_model_whose_hidden_states_are_watched_is_copied_and_saved(tmp_path: Path) -> None:
    """And passes of a copy are not recorded as those of the model."""
    target = Target(with_mtp("glm4_moe", tmp_path))
    drafter_of("mtp", target)
    for made in (copy.deepcopy(target.model), pickle.loads(pickle.dumps(target.model))):
        before = target.hidden.last_pass
        made(torch.tensor([prompt_of(9)]))
        assert target.hidden.last_pass is before
        copied = Target(made)
        plain = answer_of(target, prompt_of(20), max_new_tokens=20)
        assert answer_of(copied, prompt_of(20), max_new_tokens=20, drafter=drafter_of("mtp", copied)) == plain


def test_a_proposal_is_compared_once_with_what_was_accepted(tmp_path: Path) -> None:
    target = Target(with_mtp("glm4_moe", tmp_path))
    target.watch_hidden()
    drafter: Any = mtp_drafter(target)
    drafter.begin([3, 4])
    hidden = torch.randn(2, target.config.hidden_size)
    drafter.observe(Accepted([], [5]), Verified(torch.zeros(1, 97), hidden))
    proposal = drafter.propose(4)
    first = int(proposal.tokens[0, 0])
    observed = drafter.calibration._rates._observed.copy()
    drafter.observe(Accepted([0], [first, 6]), Verified(torch.zeros(2, 97), hidden))
    learned = (drafter.calibration._rates._observed != observed).reshape(-1, PROB_BUCKETS).any(axis=1)
    assert learned[:2].all() and not learned[2:].any()
