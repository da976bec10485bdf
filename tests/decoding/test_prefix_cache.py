"""Prompts that begin as an earlier conversation did: answers as from an empty KV cache, with fewer tokens read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from transformers import AutoModelForCausalLM

from hdtool.runtime.caches.recurrent_states import MAX_SNAPSHOTS
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core import prefix_cache
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.prefix_cache import MIN_CACHED_PREFIX, PrefixCache, PromptReader, common_prefix_length
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.session import Session, decode
from hdtool.runtime.core.step import Step
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.engines.captured_functions import CaptureMaker, Run, never
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import all_answered, answer_of, answered, answers_of, output_tokens, request, run
from tests.support.families import FAMILIES, HYBRIDS, SHAPE, VOCABULARY, model_of
from tests.support.one_sequence import OneSequence
from tests.support.oracle import assert_same_logits, generated, plain_logits, prompt_of
from tests.support.rehearsed import Direct, Rehearsed
from tests.support.samplers import sampler_of
from tests.support.trees import WrongDrafter

GREEDY = SamplingConfig()
MAX_NEW_TOKENS = 12
CAPTURES: dict[str, CaptureMaker] = {"passes": never, "captured": lambda device: Rehearsed()}


def answer(
    target: Target, prompt: Sequence[int], drafter: Drafter | None = None, *, seed: int = 0, cached: bool = True
) -> list[Step]:
    sampler = sampler_of(SamplingConfig(temperature=0.8 if seed else 0.0, seed=seed), prompt)
    return list(
        decode(target, prompt, sampler, max_new_tokens=MAX_NEW_TOKENS, drafter=drafter, prefix_caching=cached),
    )


def read(
    target: Target,
    cache: Cache,
    prompt: Sequence[int],
    *,
    slot: int = 0,
    most: int | None = None,
    prefixes: PrefixCache | None = None,
) -> tuple[Verified, int]:
    """What follows a prompt, and the number of its tokens that were not read."""
    reader = PromptReader(target, cache, slot, prompt, room=64)
    reader.begin(prefixes or PrefixCache())
    while (verified := reader.read(most)) is None:
        pass
    return verified, reader.cached_tokens


TURN = st.tuples(
    st.integers(0, 90),  # tokens of the last conversation that the prompt begins with
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
    st.integers(0, 2),  # seed
    st.booleans(),  # whether the answer is given up after its first step
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_read_in_pieces_has_the_logits_of_one_read_at_once(family: str) -> None:
    target = Target(model_of(family))

    @settings(max_examples=8)
    @given(st.integers(1, 90), st.integers(1, 40), st.integers(0, 90), st.booleans())
    def check(length: int, most: int, known: int, is_running: bool) -> None:
        cache, prompt = target.allocate(2), prompt_of(length)
        verified, cached = read(target, cache, prompt, most=most)
        assert_same_logits(verified.logits[0], plain_logits(target.model, prompt))
        assert cached == 0
        other = [*prompt[:known], *prompt_of(23)]
        verified, cached = read(target, cache, other, slot=int(is_running))
        assert_same_logits(verified.logits[0], plain_logits(target.model, other))
        shared = common_prefix_length(prompt, other[:-1])
        if family in HYBRIDS:
            assert cached in states_after(length, most, shared) if target.facts.continues else not cached
        else:
            loses = length >= MIN_CACHED_PREFIX and length > shared
            assert cached == (shared - 1 if shared >= (MIN_CACHED_PREFIX if is_running or loses else 2) else 0)
        if is_running:  # what is copied from stays
            last = target.verify(cache, [DraftTree.bare(3), DraftTree.bare(4)])
            for found, context in zip(last, ([*prompt, 3], [*other, 4]), strict=True):
                assert_same_logits(found.logits[0], plain_logits(target.model, context))

    check()


def states_after(length: int, most: int, shared: int) -> list[int]:
    """Where a prompt may go on if its states were kept at the end of each piece: there, or at its start."""
    ends = [*range(most, length, most), length][-MAX_SNAPSHOTS:]
    found = max((end for end in ends if end <= shared), default=0)
    return [found] if found >= MIN_CACHED_PREFIX else [0, found]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_each_owner_has_contexts_of_its_own_in_slots_and_in_copies(family: str) -> None:
    target = Target(model_of(family))
    session = Session[int](target, target.allocate(2), max_new_tokens=20, prefixes=PrefixCache(2**30))
    prompt = prompt_of(40)
    answer, cached = answered(session, prompt)
    assert (answer, cached) == (answer_of(target, prompt, GREEDY, 20), 0)
    later = [*prompt, *answer, *prompt_of(9)]
    again, cached = answered(session, later)
    assert again == answer_of(target, later, GREEDY, 20)
    assert cached == len(prompt) + len(answer) - 2  # the last token was never read, the one before is read again
    assert answered(session, later, owner="another") == (again, 0)
    branch = [*prompt[:30], *prompt_of(12)]
    assert answered(session, branch) == (answer_of(target, branch, GREEDY, 20), 29)
    assert answered(session, later, owner="another")[1] == len(later) - 2
    assert answered(session, later, owner="a third")[1] == 0


def test_contexts_are_dropped_in_the_order_of_their_use() -> None:
    target = Target(model_of("llama"))
    cache = target.allocate()

    def keep(kept: PrefixCache, prompt: Sequence[int]) -> None:
        target.prefill(cache, 0, prompt)
        kept.keep(cache, 0)

    def has(prompt: Sequence[int], owner: str = "", version: int = 0) -> bool:
        return kept.to_copy((), owner, version, prompt) is not None

    prompts = [[number] * 40 for number in range(3)]
    target.prefill(cache, 0, prompts[0])
    size = cache.saved(0).kv.storage.bytes
    kept = PrefixCache(2 * size)
    for prompt in prompts[:2]:
        keep(kept, prompt)
    assert has(prompts[0]) and not has(prompts[0], owner="another")
    keep(kept, prompts[2])
    assert kept.bytes == 2 * size
    assert [has(prompt) for prompt in prompts] == [True, False, True]
    keep(kept, [*prompts[2], 1])
    assert kept.bytes == 2 * size and has(prompts[0]), "a context that begins another one is not kept beside it"
    keep(kept, prompt_of(MIN_CACHED_PREFIX - 1))
    assert not has(prompt_of(MIN_CACHED_PREFIX - 1)) and kept.bytes == 2 * size
    small = PrefixCache(size - 1)
    keep(small, prompts[0])
    assert small.bytes == 0
    assert not has(prompts[0], version=1) and kept.bytes == 0, "nothing is kept of a model that has changed since"


def test_a_copy_without_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go on."""

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    target = Target(model_of("llama"))
    cache, prefixes = target.allocate(), PrefixCache(2**30)
    target.prefill(cache, 0, prompt_of(40))
    monkeypatch.setattr(type(cache), "saved", no_memory)
    prefixes.keep(cache, 0)
    assert prefixes.bytes == 0


def test_a_context_is_not_lost_when_another_one_resumes_from_a_copy() -> None:
    """Two conversations alternate in one slot; the second is shorter than what the first resumes from."""
    target = Target(model_of("llama"))
    session = Session[int](target, target.allocate(), max_new_tokens=4, prefixes=PrefixCache(2**30))
    long, short = prompt_of(90), prompt_of(40)
    for _ in range(3):
        answers = [answered(session, prompt) for prompt in (long, short)]
        long, short = [*long, *answers[0][0], 1, 2], [*short, *answers[1][0], 3, 4]
    assert [cached for _, cached in answers] == [len(long) - 10, len(short) - 10]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_contexts_too_large_for_copies_stay_in_idle_slots(family: str) -> None:
    target = Target(model_of(family))
    session = Session[int](target, target.allocate(4), max_new_tokens=4, prefixes=PrefixCache(1))
    contexts = [prompt_of(50 + number) for number in range(4)]
    for turn in range(3):
        for number, prompt in enumerate(contexts):
            answer_ids, cached = answered(session, prompt)
            assert answer_ids == answer_of(target, prompt, GREEDY, 4)
            assert bool(turn) == bool(cached), "each conversation has a slot"
            contexts[number] = [*prompt, *answer_ids, 7, 8]
    others = [prompt_of(60 + number) for number in range(3)]
    for prompt in others:
        assert answered(session, prompt)[1] == 0
    assert answered(session, [*contexts[3], 1])[1], "the least recently used contexts made room"
    assert not answered(session, [*contexts[0], 1])[1]


def test_an_older_end_of_a_context_does_not_replace_another_context() -> None:
    """Chat templates change the last tokens of a turn, so that a context is continued before its end."""
    target = Target(model_of("llama"))
    session = Session[int](target, target.allocate(2), max_new_tokens=4, prefixes=PrefixCache(1))
    other, prompt = prompt_of(50), prompt_of(60)
    for turn in (other, prompt, [*prompt[:55], *prompt_of(20)]):
        answered(session, turn)
    assert answered(session, [*other, 1])[1]


def test_slots_trade_places_if_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(model_of("llama"))
    cache, prompts = target.allocate(2), [prompt_of(20), prompt_of(30)]

    def tokens() -> list[list[int]]:
        return [slot.tokens for slot in cache.slots]

    for slot, prompt in enumerate(prompts):
        target.prefill(cache, slot, prompt, room=8)
    cache.swap(0, 1)
    assert tokens() == prompts[::-1]
    after = target.verify(cache, [DraftTree.bare(3), DraftTree.bare(3)])
    for verified, prompt in zip(after, prompts[::-1], strict=True):
        assert_same_logits(verified.logits[0], plain_logits(target.model, [*prompt, 3]))

    def fail(slot: int) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(cache, "saved", fail)
    cache.swap(0, 1)
    assert tokens() == [prompts[0], prompts[0]]


def test_a_short_common_beginning_does_not_overwrite_a_context() -> None:
    target = Target(model_of("llama"))
    session = Session[int](target, target.allocate(2), max_new_tokens=4, prefixes=PrefixCache(1))
    prompt = prompt_of(60)
    first, _ = answered(session, prompt)
    assert answered(session, [*prompt[:3], *prompt_of(40)])[1] == 0
    assert answered(session, [*prompt, *first, 5])[1] == len(prompt) + 2


SHARED_TURN = st.tuples(
    st.integers(0, 2),  # the conversation
    st.integers(0, 90),  # tokens of it that the prompt begins with
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
    st.sampled_from(["", "another"]),
)


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "llama4"])
@pytest.mark.each_value
def test_answers_in_slots_that_copy_from_one_another_are_those_of_an_empty_cache(family: str, capture: str) -> None:
    model = model_of(family)
    target, fresh = Target(model, CAPTURES[capture]), Target(model, never)

    @settings(max_examples=4)
    @given(st.integers(1, 3), st.sampled_from([0, 2**16, 2**30]), st.lists(SHARED_TURN, min_size=3, max_size=7))
    def check(slots: int, max_bytes: int, turns: list[tuple[int, int, list[int], str]]) -> None:
        session = Session[int](
            target, target.allocate(slots), max_new_tokens=MAX_NEW_TOKENS, prefixes=PrefixCache(max_bytes)
        )
        before = [prompt_of(40 + number) for number in range(3)]
        requests: list[Request[int]] = []
        expected: list[list[int]] = []
        for number, (conversation, known, new, owner) in enumerate(turns):
            prompt = [*before[conversation][:known], *new]
            expected.append(output_tokens(answer(fresh, prompt, cached=False)))
            before[conversation] = [*prompt, *expected[-1]]
            drafter = WrongDrafter(len(prompt), expected[-1], VOCABULARY, number)
            requests.append(request(number, prompt, drafter, owner=owner))
        assert all_answered(session, requests) == expected

    check()


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.each_value
def test_conversations_with_common_beginnings_get_the_answers_of_an_empty_cache(family: str, capture: str) -> None:
    model = model_of(family)
    kept, fresh = Target(model, CAPTURES[capture]), Target(model, never)

    @settings(max_examples=4, deadline=None)
    @given(turns=st.lists(TURN, min_size=2, max_size=4))
    def check(turns: list[tuple[int, list[int], int, bool]]) -> None:
        before: list[int] = []
        for known, new, seed, given_up in turns:
            prompt = [*before[:known], *new]
            expected = output_tokens(answer(fresh, prompt, seed=seed, cached=False))
            drafter = WrongDrafter(len(prompt), expected, VOCABULARY, seed)
            sampler = sampler_of(SamplingConfig(temperature=0.8 if seed else 0.0, seed=seed), prompt)
            found: list[int] = []
            for step in decode(kept, prompt, sampler, max_new_tokens=MAX_NEW_TOKENS, drafter=drafter):
                found += step.tokens
                if given_up and len(found) > 1:
                    break
            assert found == expected[: len(found)]
            assert given_up or len(found) == MAX_NEW_TOKENS
            before = [*prompt, *found]

    check()


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4", "deepseek_v3"])
def test_a_prompt_in_pieces_after_an_accepted_path_has_the_logits_of_the_model(
    family: str, capture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "PREFILL_CHUNK", 7)
    model = model_of(family)
    one = OneSequence(Target(model, CAPTURES[capture]))
    context = prompt_of(50)
    one.prefill(context)
    one.verify(DraftTree.of(5, [8, 9, 10, 11], [ROOT, ROOT, 1, 2]))
    one.commit([1, 2, 3])  # these positions have to move
    longer = [*context, 5, 9, 10, 11, *prompt_of(40)]
    verified, cached = read(one.target, one.cache, longer)
    assert_same_logits(verified.logits[0], plain_logits(model, longer))
    assert cached == len(context) + 4 - 1
    assert_same_logits(one.verify(DraftTree.bare(3))[0], plain_logits(model, [*longer, 3]))


@pytest.mark.parametrize("has_moved", [False, True])
def test_an_interrupt_while_a_captured_step_moves_a_path_keeps_what_is_in_place(has_moved: bool) -> None:
    """The positions of an accepted path are moved by the next step: if that is interrupted, they may not hold it."""
    interrupted = False

    class Interrupting(Direct):
        def record(self, run: Run) -> Run:
            run()

            def replay() -> None:
                if has_moved or not interrupted:
                    run()
                if interrupted:
                    raise KeyboardInterrupt

            return replay

    model = model_of("llama")
    one = OneSequence(Target(model, lambda device: Interrupting()))
    context, tree = prompt_of(50), DraftTree.of(5, [8, 9, 10, 11], [ROOT, ROOT, 1, 2])

    def accept_a_path() -> None:
        one.prefill(context)
        one.verify(tree)
        one.commit([1, 2, 3])

    accept_a_path()
    one.verify(tree)  # captures the step that moves
    accept_a_path()
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        one.verify(tree)
    interrupted = False
    longer = [*context, 5, 9, 10, 11, *prompt_of(20)]
    prefixes = PrefixCache(2**30)
    prefixes.keep(one.cache, 0)
    for cache in (one.cache, one.target.allocate()):
        verified, cached = read(one.target, cache, longer, prefixes=prefixes)
        assert_same_logits(verified.logits[0], plain_logits(model, longer))
        assert 0 < cached <= len(context)


def test_only_what_follows_the_common_beginning_is_read_and_the_switch_reads_all() -> None:
    target = Target(model_of("llama"))
    prompt = prompt_of(60)
    first = answer(target, prompt)
    longer = [*prompt, *output_tokens(first), *prompt_of(9)]
    assert [step.cached_tokens for step in first] == [0] * len(first)
    # The last answered token was never read, and the one before it is read again.
    assert answer(target, longer)[0].cached_tokens == len(prompt) + MAX_NEW_TOKENS - 2
    assert answer(target, [*prompt[:30], 1, 2])[0].cached_tokens == 29
    assert answer(target, longer, cached=False)[0].cached_tokens == 0
    assert answer(target, longer)[0].cached_tokens == len(longer) - 2
    assert answer(target, prompt_of(61))[0].cached_tokens == 0


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_5"])
@pytest.mark.parametrize("passes", range(4))
@pytest.mark.one_in(3)
def test_after_an_interrupt_inside_a_pass_answers_are_right(name: str, capture: str, layer: int, passes: int) -> None:
    """Layers before the one that is interrupted have written their keys, values and states."""
    model: Any = model_of(name)
    left: list[int] = []
    """Passes until the interrupt; empty where there is none."""

    def interrupt(module: torch.nn.Module, *_: Any) -> None:
        if left:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

    # A hook that came or went between two answers would be another model.
    hook = model.model.layers[layer].register_forward_hook(interrupt)
    try:
        target, fresh = Target(model, CAPTURES[capture]), Target(model, never)
        prompt = prompt_of(40)
        expected = output_tokens(answer(fresh, prompt, cached=False))
        answer(target, prompt)
        longer = [*prompt, *expected[:5], *prompt_of(30)]
        wanted = output_tokens(answer(fresh, longer, cached=False))
        left.append(passes)
        with pytest.raises(KeyboardInterrupt):
            answer(target, longer, WrongDrafter(len(longer), wanted, VOCABULARY, seed=passes))
        left.clear()
        again = answer(target, [*longer, *wanted[:3]])
        assert output_tokens(again) == output_tokens(answer(fresh, [*longer, *wanted[:3]], cached=False))
        assert again[0].cached_tokens > 0
    finally:
        hook.remove()


def test_watched_hidden_states_are_those_of_the_whole_prompt() -> None:
    model = model_of("qwen3")
    kept, fresh = Target(model), Target(model)
    for target in (kept, fresh):
        target.watch_hidden()
    prompt = prompt_of(40)
    drafter = WrongDrafter(len(prompt), output_tokens(answer(fresh, prompt, cached=False)), VOCABULARY, seed=5)
    longer = [*prompt, *output_tokens(answer(kept, prompt, drafter)), *prompt_of(20)]
    (found, cached), (expected, _) = (read(target, target.cache, longer) for target in (kept, fresh))
    assert cached > len(prompt)
    assert found.hidden is not None and expected.hidden is not None
    assert len(found.hidden) == len(longer)
    assert torch.allclose(found.hidden, expected.hidden, atol=1e-4)


def longrope() -> Any:
    """A model that computes all positions differently in contexts of more than 64 tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    shape = {**SHAPE, "max_position_embeddings": 256, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(transformers.Phi3Config(**shape, rope_parameters=rope))


def test_a_longrope_model_beyond_its_original_length_reads_prompts_as_a_whole() -> None:
    model = longrope()
    target = Target(model)
    for length in (30, 50, 80, 100, 40):
        prompt = prompt_of(100)[:length]
        found = answer(target, prompt)
        assert output_tokens(found) == generated(model, prompt, MAX_NEW_TOKENS)
        assert (found[0].cached_tokens > 0) is (length == 50)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_batch_on_both_sides_of_the_switch_of_a_longrope_model(prefix_caching: bool) -> None:
    model = longrope()
    prompts = [prompt_of(100)[:length] for length in (30, 80, 100, 40, 35, 90)]
    asked = map(request, range(len(prompts)), prompts)
    found = answers_of(Target(model), asked, 3, MAX_NEW_TOKENS, prefix_caching=prefix_caching)
    assert found == {place: generated(model, ids, MAX_NEW_TOKENS) for place, ids in enumerate(prompts)}


def test_a_generator_reads_the_second_turn_from_where_it_differs() -> None:
    model: Any = model_of("llama")
    kept, off = Generator(), Generator(prefix_caching=False)
    prompt = prompt_of(60)
    for generator, expected in ((kept, 60 - 2), (off, 0)):
        for _ in range(2):
            output = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_NEW_TOKENS, custom_generate=generator
            )
            assert output[0, 60:].tolist() == generated(model, prompt, MAX_NEW_TOKENS)
        assert generator.stats.cached_tokens == expected


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "lfm2", "mamba2"])
def test_weights_that_are_written_unseen_are_noticed_before_a_prompt_goes_on(family: str) -> None:
    """States are not computed again as keys and values are: another token tells that the model is another one."""
    torch.manual_seed(1)
    model: Any = FAMILIES[family]().eval()
    model.generation_config.eos_token_id = None
    target, prompt = Target(model), prompt_of(30)
    first = answer_of(target, prompt, GREEDY, 20)
    same = run(target, [*prompt, *first, *prompt_of(5)], GREEDY, 20)
    assert same[0].cached_tokens > 40
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(1.05)
    longer = [*prompt, *first, *prompt_of(7)]
    steps = run(target, longer, GREEDY, 20)
    assert steps[0].cached_tokens == 0 and output_tokens(steps) == answer_of(Target(model), longer, GREEDY, 20)
