"""The hybrid demo model: drafting inside a trained model with recurrent layers changes no answer."""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from transformers.cache_utils import DynamicCache

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import Prompt, interleave_categories, read_prompts
from hdtool.runtime.answering.answer_plan import sampler_for
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.prefix_cache import MIN_TAIL_PROMPT, TAIL_TOKENS, PrefixCache, PromptReader
from hdtool.runtime.core.session import decode
from hdtool.runtime.core.step import Step
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from tests.support.decoding import output_tokens
from tests.support.oracle import generated
from tests.support.trees import WrongDrafter

METHODS = ["ar", "pld", "hd", "hd+logitspec"]
GREEDY = SamplingConfig()
SAMPLINGS = {"greedy": GREEDY, "sampled": SamplingConfig(temperature=0.8, top_k=40, seed=5)}
STORES = StoresConfig(model_db="none", corpus_db=str(demo.CORPUS_INDEX))

pytestmark = pytest.mark.usefixtures("known_cost")


@pytest.fixture(scope="module")
def hybrid() -> Loaded:
    return load(ModelConfig(str(demo.HYBRID)))


@dataclass(frozen=True)
class Asked:
    """A prompt in tokens, and what the library says to it."""

    prompt: list[int]
    answer: list[int]


def prompts(limit: int) -> list[Prompt]:
    return interleave_categories(read_prompts(demo.PROMPTS), limit)


def encoded(loaded: Loaded, limit: int) -> list[list[int]]:
    return [encode_conversation(loaded.tokenizer, prompt.messages) for prompt in prompts(limit)]


@torch.inference_mode()
def by_the_library(loaded: Loaded, prompt: list[int], sampling: SamplingConfig, max_new_tokens: int) -> list[int]:
    """An answer token by token, by the library's passes and cache and hdtool's sampler."""
    model: Any = loaded.target.model
    used = DynamicCache(config=model.config)
    sampler, stops = sampler_for(loaded, sampling, prompt, max_new_tokens=max_new_tokens)
    answer: list[int] = []
    while len(answer) < max_new_tokens and not (answer and answer[-1] in stops):
        read = torch.tensor([answer[-1:] or prompt])
        logits = model(read, past_key_values=used, use_cache=True).logits[0, -1:]
        answer.append(sampler.chooser(logits)(0))
        sampler.context.append(answer[-1])
    return answer


def drafter(loaded: Loaded, method: str) -> Drafter:
    stores = StoreSet(corpus=CorpusIndex(demo.CORPUS_INDEX))
    return drafter_for(DecodeConfig(method), loaded.target, stores)


def answer(
    loaded: Loaded,
    prompt: list[int],
    max_new_tokens: int,
    drafts: Drafter | None = None,
    sampling: SamplingConfig = GREEDY,
    *,
    cached: bool = True,
) -> list[Step]:
    sampler, stops = sampler_for(loaded, sampling, prompt, max_new_tokens=max_new_tokens)
    return list(
        decode(
            loaded.target,
            prompt,
            sampler,
            max_new_tokens=max_new_tokens,
            stops=stops,
            drafter=drafts,
            prefix_caching=cached,
        )
    )


def check_methods(loaded: Loaded, number: int, max_new_tokens: int, sampling: SamplingConfig) -> None:
    expected = [by_the_library(loaded, prompt, sampling, max_new_tokens) for prompt in encoded(loaded, number)]
    if sampling.is_greedy:
        assert expected == [
            generated(loaded.target.model, prompt, max_new_tokens) for prompt in encoded(loaded, number)
        ]
    for method in METHODS:
        drafts, accepted = drafter(loaded, method), 0
        for prompt, wanted in zip(encoded(loaded, number), expected, strict=True):
            steps = answer(loaded, prompt, max_new_tokens, drafts, sampling)
            assert output_tokens(steps) == wanted
            accepted += len(wanted) - len(steps)
        assert bool(accepted) == (method != "ar")


def test_its_layers_compute_trees_in_closed_form(hybrid: Loaded) -> None:
    assert hybrid.target.facts.recurrent
    assert hybrid.target.facts.recurrent.can_be_captured and hybrid.target.facts.continues


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("number", "length"), [(2, 32), pytest.param(5, 80, marks=pytest.mark.long)])
def test_answers_are_those_of_the_library(number: int, length: int, hybrid: Loaded, sampling: SamplingConfig) -> None:
    check_methods(hybrid, number, length, sampling)


def test_the_next_turn_goes_on_from_the_states(hybrid: Loaded) -> None:
    first = encoded(hybrid, 1)[0]
    hybrid.target.cache.slots[0].cut(0)
    steps = answer(hybrid, first, 40, drafter(hybrid, "hd"))
    spoken = [*first, *output_tokens(steps)]
    assert steps[0].cached_tokens == 0
    later = [*spoken, *first]
    again = answer(hybrid, later, 40, drafter(hybrid, "hd"))
    assert again[0].cached_tokens == len(spoken) - 1, "the last token of the answer was not read yet"
    assert output_tokens(again) == by_the_library(hybrid, later, GREEDY, 40)
    other = [*later, *output_tokens(again)[:5], *first]
    branched = answer(hybrid, other, 40, drafter(hybrid, "hd"))
    assert branched[0].cached_tokens == len(later), "states are kept at the end of a prompt"
    assert output_tokens(branched) == by_the_library(hybrid, other, GREEDY, 40)


@pytest.mark.parametrize("is_later", [False, True])
def test_a_long_prompt_with_another_end_goes_on_from_before_it(hybrid: Loaded, is_later: bool) -> None:
    """Templates change the end of a prompt in the next turn, be it a first turn or a later one."""
    tokens = [token for prompt in encoded(hybrid, 16) for token in prompt]
    begun = is_later * tokens[: MIN_TAIL_PROMPT // 2]
    if begun:
        answer(hybrid, begun, 8)
    prompt = [*begun, *tokens[-MIN_TAIL_PROMPT - 50 :]]
    assert answer(hybrid, prompt, 8)[0].cached_tokens == len(begun)
    other = [*prompt[: -TAIL_TOKENS // 2], *tokens[:20]]
    steps = answer(hybrid, other, 30, drafter(hybrid, "hd"))
    assert steps[0].cached_tokens == len(prompt) - TAIL_TOKENS
    assert output_tokens(steps) == by_the_library(hybrid, other, GREEDY, 30)


def read(loaded: Loaded, cache: Any, prompt: list[int], prefixes: PrefixCache) -> int:
    reader = PromptReader(loaded.target, cache, 0, prompt, room=64)
    reader.begin(prefixes)
    reader.read()
    return reader.cached_tokens


def bits(cache: Any) -> list[torch.Tensor]:
    return [stack.clone() for stack in cache.slots[0].states.stacks.values()]


def test_kept_states_are_restored_bit_for_bit(hybrid: Loaded) -> None:
    """From where they were kept in the slot, and from a copy of a slot that another conversation took."""
    first, other, third = encoded(hybrid, 3)
    cache, prefixes = hybrid.target.allocate(), PrefixCache(2**30)
    read(hybrid, cache, first, prefixes)
    kept = bits(cache)
    for between in ([*first, *other], other, third):
        read(hybrid, cache, between, prefixes)
        assert not all(torch.equal(one, now) for one, now in zip(kept, bits(cache), strict=True))
        reader = PromptReader(hybrid.target, cache, 0, [*first, 7], room=64)
        reader.begin(prefixes)
        assert reader.cached_tokens == len(first)
        assert all(torch.equal(one, now) for one, now in zip(kept, bits(cache), strict=True))
        reader.read()


def test_answers_inside_generate_are_those_without_hdtool(hybrid: Loaded) -> None:
    model: Any = hybrid.target.model
    drafting = Generator.drafting(hybrid.tokenizer, DecodeConfig("hd"), STORES)
    prompt = encoded(hybrid, 1)[0]
    for _ in range(2):  # the second time from kept states
        assert generated(model, prompt, 20, custom_generate=drafting) == generated(model, prompt, 20)
        assert drafting.stats.steps < drafting.stats.tokens
    plain, drafted = (
        generated(model, prompt, 20, do_sample=True, seed=3, custom_generate=Generator(drafts))
        for drafts in (None, drafter(hybrid, "hd"))
    )
    assert plain == drafted


@pytest.mark.long
def test_memory_does_not_grow_from_answer_to_answer(hybrid: Loaded) -> None:
    """250 answers with rejected drafts; the medians of the first and the last 100 answers after a warm-up."""
    asked = [Asked(prompt, generated(hybrid.target.model, prompt, 16)) for prompt in encoded(hybrid, 10)]
    process, used, tensors, rejected = psutil.Process(), list[int](), list[int](), 0
    for number in range(300):
        one = asked[number % len(asked)]
        lies = WrongDrafter(len(one.prompt), one.answer, len(hybrid.tokenizer), number)
        assert output_tokens(answer(hybrid, one.prompt, 16, lies)) == one.answer
        rejected += lies.drafted - lies.accepted
        used.append(process.memory_info().rss)
        if number % 50 == 49:
            gc.collect()
            tensors.append(sum(type(held) is torch.Tensor for held in gc.get_objects()))
    assert rejected > 250
    before, after = (statistics.median(part) for part in (used[50:150], used[-100:]))
    assert after < 1.01 * before
    assert max(tensors[1:]) <= tensors[1], "tensors are held that nothing needs"
