"""Checks that an engine has the tokens and logits of transformers, whatever is drafted, rolled back or batched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings, strategies as st

from hdtool.runtime.core.engine_interface import PassOptions
from hdtool.runtime.core.prefix_cache import PrefixCache
from hdtool.runtime.core.session import Session
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.engines.cpu.tree_pass import PROMPT_CHUNK
from tests.support.decoding import (
    GREEDY,
    SAMPLINGS,
    answer_of,
    answered,
    answers_of,
    assert_lossless,
    output_tokens,
    request,
    run,
)
from tests.support.engines import Engine
from tests.support.families import VOCABULARY
from tests.support.fused import after
from tests.support.one_sequence import OneSequence
from tests.support.oracle import assert_same_logits, generated, plain_logits, prompt_of
from tests.support.trees import WrongDrafter, path_to, tokens_to, trees

MAX_NEW_TOKENS = 20
BUSH = DraftTree.of(3, [5, 8, 13, 21, 34, 55, 2, 9, 11], [ROOT, 0, 0, 2, ROOT, 4, 2, 3, ROOT])
"""Tree in which several nodes have several children, not all of them adjacent."""


def prompts_of_any_length(engine: Engine) -> None:
    for length in (1, 2, 31, 64, PROMPT_CHUNK, PROMPT_CHUNK + 1, 3 * PROMPT_CHUNK + 9):
        found = engine.target.prefill(engine.target.allocate(), 0, prompt_of(length))
        assert_same_logits(found.logits[0], plain_logits(engine.model, prompt_of(length)))


def plain_decoding(engine: Engine) -> None:
    for length in (1, 7, 150, 300):
        expected = generated(engine.model, prompt_of(length), MAX_NEW_TOKENS)
        assert answer_of(engine.target, prompt_of(length), max_new_tokens=MAX_NEW_TOKENS) == expected


def drafts_that_lie(engine: Engine) -> None:
    for seed, sampling in enumerate(SAMPLINGS.values()):
        prompt = prompt_of(5 + 9 * seed)
        plain = assert_lossless(engine.target, prompt, sampling, seeds=range(seed, seed + 2))
        if sampling.is_greedy and not engine.is_rounded:
            options = {"repetition_penalty": sampling.repetition_penalty} if sampling != GREEDY else {}
            assert plain == generated(engine.model, prompt, len(plain), **options)


def nodes_of_trees(engine: Engine) -> None:
    """Check that each node has the logits of its path, also in the next tree, after any path was accepted."""
    one = OneSequence(engine.target)

    @settings(max_examples=6, deadline=None)
    @given(length=st.integers(1, 60), data=st.data())
    def check(length: int, data: st.DataObject) -> None:
        context = prompt_of(length)
        one.prefill(context, room=128)
        for _ in range(2):
            tree = _tree(engine, data.draw(trees(VOCABULARY)))
            logits = one.verify(tree, PassOptions(walk=True, wants_maxima=True))
            assert logits.shape == (len(tree) + 1, engine.target.config.vocab_size)
            for node in range(ROOT, len(tree)):
                assert_same_logits(logits[node + 1], plain_logits(engine.model, [*context, *tokens_to(tree, node)]))
            assert one.verified.best().tolist() == logits.argmax(-1).tolist()
            node = data.draw(st.integers(ROOT, len(tree) - 1))
            one.commit(path_to(tree, node))
            context += tokens_to(tree, node)
            assert one.cache.slots[0].tokens == context and one.length == len(context)

    check()


def slots(engine: Engine) -> None:
    """Check trees of several slots, one of which takes over the context of another."""

    @settings(max_examples=4, deadline=None)
    @given(st.lists(st.tuples(trees(VOCABULARY, max_nodes=8), st.integers(1, 60)), min_size=1, max_size=4), st.data())
    def check(drawn: list[tuple[DraftTree, int]], data: st.DataObject) -> None:
        cache, contexts = engine.target.allocate(4), [prompt_of(length) for _, length in drawn]
        drafted = [_tree(engine, tree) for tree, _ in drawn]
        for slot, context in enumerate(contexts):
            engine.target.prefill(cache, slot, context, room=20)
        for _ in range(2):
            for slot, (tree, found) in enumerate(zip(drafted, engine.target.verify(cache, drafted), strict=True)):
                node = data.draw(st.integers(ROOT, len(tree) - 1))
                contexts[slot] = [*contexts[slot], *tokens_to(tree, node)]
                assert_same_logits(found.logits[node + 1], plain_logits(engine.model, contexts[slot]))
                engine.target.commit(cache, slot, path_to(tree, node))
        if len(drafted) > 1:
            cache.copy(len(drafted) - 1, to=0)
            contexts[0] = contexts.pop()
        last = engine.target.verify(cache, [DraftTree.bare(5)] * len(contexts))
        for found, context in zip(last, contexts, strict=True):
            assert_same_logits(found.logits[0], plain_logits(engine.model, [*context, 5]))

    check()


def requests(engine: Engine) -> None:
    """Check a batch whose answers have different lengths, and in which waiting requests take the slots freed."""
    prompts = [prompt_of(length) for length in (9, 31, 4, 17, 60, 2, 25)]
    for sampling in (GREEDY, SAMPLINGS["T 0.7"]):
        expected = {n: answer_of(engine.target, prompt, sampling, 3 + 4 * n) for n, prompt in enumerate(prompts)}
        if sampling == GREEDY and not engine.is_rounded:
            assert expected == {n: generated(engine.model, prompts[n], len(found)) for n, found in expected.items()}
        drafters = [WrongDrafter(len(prompt), expected[n], VOCABULARY, n) for n, prompt in enumerate(prompts)]
        asked = [
            request(n, prompt, drafters[n], sampling, max_new_tokens=len(expected[n]))
            for n, prompt in enumerate(prompts)
        ]
        assert answers_of(engine.target, asked, 3) == expected


def turns(engine: Engine) -> None:
    """Check that a later turn continues from the first one, in a slot that other conversations also use."""
    target, prompt = engine.target, prompt_of(45)
    first = answer_of(target, prompt)
    again = [*prompt, *first, *prompt_of(9)]
    expected = generated(engine.model, again, MAX_NEW_TOKENS)
    drafter = WrongDrafter(len(again), expected, VOCABULARY, 5)
    steps = run(target, again, max_new_tokens=MAX_NEW_TOKENS, drafter=drafter)
    assert output_tokens(steps) == expected and len(steps) < MAX_NEW_TOKENS
    assert steps[0].cached_tokens > 45 if target.facts.continues else steps[0].cached_tokens == 0
    one = Session[int](target, target.allocate(1), max_new_tokens=MAX_NEW_TOKENS, prefixes=PrefixCache(1 << 24))
    for other in (prompt, prompt_of(9), prompt_of(1), prompt_of(50)):
        assert answered(one, other)[0] == generated(engine.model, other, MAX_NEW_TOKENS)
    found, cached = answered(one, again)
    assert found == expected and (cached >= 45) == target.facts.continues


def reading_on(engine: Engine) -> None:
    target, cache, context = engine.target, engine.target.allocate(), prompt_of(90)
    target.prefill(cache, 0, prompt_of(70))
    for start in (0, 1, 37, 89) if target.facts.continues else (0,):
        if start:
            target.prefill(cache, 0, context[:start])
        read = target.prefill(cache, 0, context[start:], start)
        assert cache.slots[0].tokens == context
        assert_same_logits(read.logits[0], plain_logits(engine.model, context))


def overflows(engine: Engine) -> None:
    """Check that ``recompute`` gives correct logits without drafts although NaN is left in the KV cache."""
    for count, slot in ((1, 0), (3, 1)):
        cache, context = engine.target.allocate(count), prompt_of(15)
        for each in range(count):
            engine.target.prefill(cache, each, context)
        engine.target.verify(cache, [DraftTree.of(5, [8, 9], [ROOT, 0])] * count)
        with torch.inference_mode():
            for tensor in cache.slots[slot].kv.storage.tensors:
                tensor.narrow(3, 16, 2).fill_(torch.nan)
        again = engine.target.recompute(cache, slot, 5)
        assert_same_logits(again.logits[0], plain_logits(engine.model, [*context, 5]))
        engine.target.commit(cache, slot, [])
        assert cache.slots[slot].tokens == [*context, 5]


def growth(engine: Engine) -> None:
    """Check that a cache grows without losing what it holds."""
    target, cache, context = engine.target, engine.target.allocate(2), prompt_of(20)
    target.prefill(cache, 0, context)
    target.prefill(cache, 1, prompt_of(6))
    before = cache.capacity
    while cache.capacity == before:
        target.verify(cache, [DraftTree.of(5, [8, 9], [ROOT, 0]), DraftTree.bare(3)])
        target.commit(cache, 0, [0, 1])
        target.commit(cache, 1, [])
        context += [5, 8, 9]
    verified = target.verify(cache, [DraftTree.bare(2), DraftTree.bare(2)])
    assert_same_logits(verified[0].logits[0], plain_logits(engine.model, [*context, 2]))


def same_bits(engine: Engine) -> None:
    """Check that a row has the same bits in a tree, alone, in a prompt, in a batch, and after an accepted path."""
    target, context = engine.target, prompt_of(40)
    of_tree = after(engine.target, context).verify(BUSH).clone()
    for node in range(len(BUSH)):
        tokens, alone = tokens_to(BUSH, node), after(engine.target, context)
        for token in tokens:
            found = alone.verify(DraftTree.bare(token)).clone()
            alone.commit()
        assert torch.equal(found[0], of_tree[node + 1])
        assert torch.equal(after(engine.target, [*context, *tokens]).verified.logits[0], of_tree[node + 1])
        drafted, again = after(engine.target, [*context, *tokens]), after(engine.target, context)
        again.verify(BUSH)
        again.commit(path_to(BUSH, node))
        assert torch.equal(again.verify(BUSH), drafted.verify(BUSH).clone())
    cache = target.allocate(3)
    for slot, length in enumerate((90, 40, 3)):
        target.prefill(cache, slot, prompt_of(length), room=64)
    both = target.verify(cache, [DraftTree.bare(7), BUSH, DraftTree.of(4, range(40), [ROOT] * 40)])
    assert torch.equal(both[1].logits, of_tree)


def same_bits_of_prompts(engine: Engine) -> None:
    """Check that logits have the same bits however a prompt is cut, and with any number of threads."""
    prompt, threads = prompt_of(PROMPT_CHUNK + 40), torch.get_num_threads()
    whole = after(engine.target, prompt)
    expected = whole.verified.logits.clone(), whole.verify(BUSH).clone()
    if engine.target.facts.continues:
        for first in (1, 2, 77, PROMPT_CHUNK, PROMPT_CHUNK + 1):
            cut = after(engine.target, prompt[:first], room=250)
            assert torch.equal(cut.prefill(prompt[first:], first), expected[0])
            assert torch.equal(cut.verify(BUSH), expected[1])
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            other = after(engine.target, prompt)
            assert torch.equal(other.verified.logits, expected[0]) and torch.equal(other.verify(BUSH), expected[1])
    finally:
        torch.set_num_threads(threads)


def _tree(engine: Engine, tree: DraftTree) -> DraftTree:
    return tree if engine.target.takes_trees else tree.first_chain()


Check = Callable[[Engine], None]
CHECKS: tuple[Check, ...] = (
    plain_decoding,
    drafts_that_lie,
    nodes_of_trees,
    slots,
    requests,
    turns,
    same_bits,
    same_bits_of_prompts,
)
FURTHER_CHECKS: tuple[Check, ...] = prompts_of_any_length, reading_on, overflows, growth
"""Checks whose results hardly depend on the model family."""


OF_BITS: tuple[Check, ...] = same_bits, same_bits_of_prompts
"""Checks of engines whose rows have the same bits in every pass."""


def assert_conforms(engine: Engine, check: Check) -> None:
    """Run a check, in which the engine must compute each pass and never leave one to transformers' code."""
    before, logged = engine.passes(engine.target), engine.target.log.passes
    check(engine)
    assert engine.is_in_use(engine.target)
    assert engine.passes(engine.target) - before == engine.target.log.passes - logged > 0
