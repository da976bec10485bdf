"""Verification: silent where nothing is wrong, and finds what is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hdtool.builders.evaluation import contenders
from hdtool.builders.evaluation.contenders import generate_ids
from hdtool.builders.evaluation.verify import Check, Difference, Explanation, Oracle, Verifier
from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.errors import ModelError
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answering.answer_plan import plan_answer
from hdtool.runtime.caches.kv_cache import StaticKVCache
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode, decode_request
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.model.reference_logits import logits_after, more_precise
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded
from hdtool.runtime.target.target import Target
from tests.support.families import VOCABULARY, model_of
from tests.support.oracle import plain_logits, prompt_of
from tests.support.samplers import sampler_of
from tests.support.trees import WrongDrafter

PROMPT = prompt_of(20)
MAX_NEW_TOKENS = 40
GREEDY = SamplingConfig()
DRAWN = SamplingConfig(temperature=1.0, seed=3)


@pytest.fixture
def small(embedded: Loaded) -> Loaded:
    """A model that may be spoiled; its tokenizer plays no part."""
    model: Any = copy.deepcopy(model_of("llama"))
    return Loaded("small", Target(model), stopless(embedded.tokenizer))


def stopless(tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = None
    return tokenizer


def said(loaded: Loaded, sampling: SamplingConfig = GREEDY) -> list[int]:
    steps = decode(loaded.target, PROMPT, sampler_of(sampling, PROMPT), max_new_tokens=MAX_NEW_TOKENS)
    return [token for step in steps for token in step.tokens]


def verified(loaded: Loaded, sampling: SamplingConfig = GREEDY) -> tuple[Check, list[Explanation]]:
    """A small model under drafts that are partly true."""
    wrong_drafter = WrongDrafter(len(PROMPT), said(loaded, sampling), VOCABULARY, seed=1)
    verifier = Verifier(loaded, sampling, wrong_drafter, MAX_NEW_TOKENS)
    check = verifier.check("it", PROMPT)
    return check, verifier.explain(check.differences)


def test_the_history_holds_no_answer_of_the_oracles(small: Loaded) -> None:
    """Else tokens per step would be too high; a second check of a prompt does draft from the first one."""
    request = plan_answer(small, GREEDY, PROMPT, MAX_NEW_TOKENS).request(None, Hierarchy(history=History()))
    alone = len(list(decode_request(small.target, request)))
    verifier = Verifier(small, GREEDY, Hierarchy(history=History()), MAX_NEW_TOKENS)
    assert verifier.check("it", PROMPT).steps == alone > verifier.check("it again", PROMPT).steps


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=str)
def test_a_prediction_is_drafted_from(small: Loaded, sampling: SamplingConfig) -> None:
    verifier = Verifier(small, sampling, Hierarchy(), MAX_NEW_TOKENS)
    check = verifier.check("it", PROMPT, prediction=said(small, sampling))
    assert check.differences == []
    assert check.steps < verifier.check("it", PROMPT).steps


# Where nothing is wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, SamplingConfig(repetition_penalty=1.2)], ids=str)
def test_the_hierarchy_over_the_demos_stores_loses_nothing(embedded: Loaded, sampling: SamplingConfig) -> None:
    store_set = StoreSet.for_tokenizer(embedded.tokenizer, StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX)))
    verifier = Verifier(embedded, sampling, Hierarchy(store_set.model, store_set.corpus), 24)
    for prompt in read_prompts(demo.PROMPTS)[:2]:
        check = verifier.check(prompt.id, encode_conversation(embedded.tokenizer, prompt.messages))
        assert check.differences == []
        assert all(check.equals(oracle) for oracle in verifier.oracles)
        assert check.steps < check.tokens, "nothing was drafted"
    assert verifier.explain([]) == []


def test_generate_has_no_say_where_tokens_are_drawn(small: Loaded) -> None:
    assert Verifier(small, GREEDY, NoDraft(), MAX_NEW_TOKENS).oracles == [Oracle.PLAIN, Oracle.GENERATE]
    assert Verifier(small, DRAWN, NoDraft(), MAX_NEW_TOKENS).oracles == [Oracle.PLAIN]


# What is wrong is found ------------------------------------------------------------------------


def credulous(
    tree: DraftTree, verified: Verified, sampler: Sampler, *, stops: object = (), max_tokens: int
) -> Accepted:
    """An acceptance that believes any first child."""
    choose = sampler.chooser(verified.logits)
    first = tree.parents.tolist().index(ROOT) if len(tree) and max_tokens > 1 else None
    tokens = [choose(0)] if first is None else [int(tree.tokens[first]), choose(first + 1)]
    sampler.context += tokens
    return Accepted([] if first is None else [first], tokens)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_an_acceptance_that_takes_wrong_tokens_is_found(
    small: Loaded, sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hdtool.runtime.core.sequence_state.accept", credulous)
    check, (explanation,) = verified(small, sampling)
    difference = explanation.difference
    assert not check.equals(Oracle.PLAIN)
    assert difference.oracle is Oracle.PLAIN
    assert not explanation.near_tie
    plain = said(small, sampling)
    assert difference.shared_ids == plain[: difference.position]
    assert difference.expected == explanation.chosen == plain[difference.position] != difference.actual
    assert explanation.working and explanation.precise and explanation.rounding is not None
    assert (explanation.working.dtype, explanation.precise.dtype) == ("float32", "float64")
    assert explanation.precise.gap > 100 * explanation.rounding
    if sampling is GREEDY:
        logits = plain_logits(small.target.model, PROMPT + difference.shared_ids)
        assert explanation.working.expected == pytest.approx(logits[difference.expected].item(), rel=1e-4)
        assert explanation.working.gap == pytest.approx((logits.max() - logits[difference.actual]).item(), rel=1e-3)


def test_a_cache_that_keeps_wrong_rows_is_found(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: StaticKVCache, fixed: int, path: Sequence[int], *, deferred: bool = False) -> None:
        self.length += fixed + len(path)  # the rows of the path stay where they are, among rejected ones

    monkeypatch.setattr(StaticKVCache, "commit", commit)
    check, explained = verified(small)
    assert [difference.oracle for difference in check.differences] == [Oracle.PLAIN]
    assert not explained[0].near_tie


def test_plain_decoding_that_is_not_generates_is_found(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that ignores a setting of the model."""
    model: Any = small.target.model
    model.generation_config.suppress_tokens = [said(small)[5]]
    monkeypatch.setattr("hdtool.runtime.answering.answer_plan._processors_and_criteria", lambda *_: ((), ()))
    check, (explanation,) = verified(small)
    assert check.equals(Oracle.PLAIN)
    assert not check.equals(Oracle.GENERATE)
    assert explanation.difference.oracle is Oracle.GENERATE
    assert explanation.difference.position <= 5
    assert not explanation.near_tie


def test_an_answer_that_ends_early_is_found(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "generate_ids", lambda *given, **options: generate_ids(*given, **options)[:7])
    _, (explanation,) = verified(small)
    assert (explanation.difference.position, explanation.difference.expected) == (7, None)
    assert explanation.reason == "one of the answers ends here"
    assert not explanation.near_tie


# What rounding explains ------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=1.0, top_k=2)], ids=["greedy", "drawn"])
def test_a_near_tie_is_told_from_a_mistake(embedded: Loaded, sampling: SamplingConfig) -> None:
    model: Any = copy.deepcopy(model_of("llama"))
    model.to(torch.bfloat16)
    likeliest, second, *_, last = plain_logits(model, PROMPT).argsort(descending=True).tolist()
    with torch.no_grad():  # twins but for a nudge that is far below bfloat16's step
        model.lm_head.weight[second] = model.lm_head.weight[likeliest]
        model.lm_head.weight[second, 0] *= 1 + 2**-7
    loaded = Loaded("twins", Target(model), stopless(embedded.tokenizer))
    if not sampling.is_greedy:
        sampling = between_the_twins(sampling, (likeliest, second))
    tie = Difference("it", Oracle.PLAIN, PROMPT, [], likeliest, second)
    mistake = Difference("it", Oracle.PLAIN, PROMPT, [], likeliest, last)
    near, far = Verifier(loaded, sampling, NoDraft(), MAX_NEW_TOKENS).explain([tie, mistake])
    assert near.near_tie
    assert not far.near_tie
    assert near.working and near.precise and near.rounding
    assert (near.working.dtype, near.precise.dtype) == ("bfloat16", "float32")
    assert near.precise.gap <= 2 * near.rounding
    assert near.chosen in (likeliest, second)
    assert model.dtype == torch.bfloat16


def between_the_twins(sampling: SamplingConfig, pair: tuple[int, int]) -> SamplingConfig:
    """With a seed that gives the two tokens that are left next to the same noise."""

    def apart(seed: int) -> float:
        noise = Sampler(SamplingConfig(1.0, seed=seed), PROMPT).perturbed_scores(torch.zeros(VOCABULARY))
        return abs(float(noise[pair[0]] - noise[pair[1]]))

    return SamplingConfig(sampling.temperature, top_k=sampling.top_k, seed=min(range(2000), key=apart))


def test_what_cannot_be_recomputed_is_no_near_tie(small: Loaded) -> None:
    model: Any = small.target.model
    model.to(torch.float64)
    difference = Difference("it", Oracle.PLAIN, PROMPT, [], 5, 6)
    (explanation,) = Verifier(small, GREEDY, NoDraft(), MAX_NEW_TOKENS).explain([difference])
    assert "there is no higher precision than torch.float64" in explanation.reason
    assert not explanation.near_tie


def test_a_device_without_room_leaves_it_to_the_cpu(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []

    def cramped(model: Any, device: torch.device) -> Any:
        tried.append(device)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no room")
        return more_precise(model, device)

    monkeypatch.setattr("hdtool.builders.evaluation.verify.more_precise", cramped)
    difference = Difference("it", Oracle.PLAIN, PROMPT, [], 5, 6)
    (explanation,) = Verifier(small, GREEDY, NoDraft(), MAX_NEW_TOKENS).explain([difference])
    assert (explanation.reason, len(tried), tried[-1].type) == ("", 2, "cpu")


def test_a_model_is_given_back_bit_by_bit(small: Loaded) -> None:
    model: Any = small.target.model
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    plain = logits_after(model, PROMPT)
    with pytest.raises(ZeroDivisionError), more_precise(model, torch.device("cpu")):
        fine = logits_after(model, PROMPT)
        raise ZeroDivisionError
    assert fine.dtype == torch.float64
    assert 0 < (fine - plain).abs().max() < 1e-3 * plain.std()
    for name, tensor in model.state_dict().items():
        address, value = before[name]
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, value)
    assert torch.equal(logits_after(model, PROMPT), plain)
    model.to(torch.float64)
    with pytest.raises(ModelError), more_precise(model, torch.device("cpu")):
        pass
