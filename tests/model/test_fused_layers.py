"""Decoder layers in compiled code: the numbers of the library's layers, and the same answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config import METHODS, NEED_HEADS, DecodeConfig, SamplingConfig
from hdtool.runtime.decode import decode_batch
from hdtool.runtime.drafters.methods import drafter_within
from hdtool.runtime.kernels.fused import layers
from hdtool.runtime.kernels.small_batch_linear import ProductChoice, use_small_batch_products
from hdtool.runtime.loop import Request
from hdtool.runtime.model.fused import proof
from hdtool.runtime.model.fused.proof import fuse_layers
from hdtool.runtime.model.target import Target
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.tree import DraftTree
from tests.support.decoding import SAMPLINGS, run, said
from tests.support.families import VOCABULARY
from tests.support.fused import KINDS, TREE, after, both, logits_of, model_of, stack, widen
from tests.support.oracle import assert_same_logits, generated, plain_logits, prompt_of
from tests.support.trees import LyingDrafter, tokens_to


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    widen(monkeypatch)


@pytest.fixture(params=["own products", "products of torch"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    own = request.param == "own products"
    monkeypatch.setattr(ProductChoice, "own", lambda choice, rows: own and rows <= 64)


class _NotOwn(ProductChoice):
    """Takes the products of torch."""

    def __init__(self) -> None:
        super().__init__(0, fixed=False)


@pytest.fixture
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProductChoice, "own", lambda choice, rows: rows <= 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("products")
def test_the_logits_are_those_of_the_library(kind: str) -> None:
    usual, fused = both(kind)
    for length in (1, 2, 31, 64, 130):
        for tree in (TREE, DraftTree.bare(7), DraftTree.of(4, list(range(40)), [-1] * 40)):
            before = stack(fused).passes
            found = logits_of(fused, prompt_of(length), tree)
            assert stack(fused).passes > before
            assert_same_logits(found, logits_of(usual, prompt_of(length), tree))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("products")
def test_weights_in_16_bits_give_the_bits_of_float32(dtype: torch.dtype) -> None:
    wide = model_of("qwen3", dtype)
    use_small_batch_products(wide)
    target = Target(wide)
    assert fuse_layers(target)
    _, compact = both("qwen3", dtype)
    for tree in (TREE, DraftTree.bare(7)):
        assert torch.equal(logits_of(compact, prompt_of(30), tree), logits_of(target, prompt_of(30), tree))


@pytest.mark.usefixtures("own_products")
def test_compiled_products_and_those_of_the_modules_give_the_same_bits() -> None:
    _, fused = both("llama with biases")
    found = logits_of(fused, prompt_of(30))
    stack(fused)._choices.append(_NotOwn())
    assert torch.equal(logits_of(fused, prompt_of(30)), found)


@pytest.mark.usefixtures("own_products")
def test_a_row_has_the_same_bits_beside_any_other_rows() -> None:
    _, fused = both("qwen3")
    context = prompt_of(40)
    whole = logits_of(fused, context)
    for node in range(len(TREE)):
        tokens = tokens_to(TREE, node)
        path = DraftTree.of(tokens[0], tokens[1:], list(range(-1, len(tokens) - 2)))
        assert torch.equal(logits_of(fused, context, path)[-1], whole[node + 1])
        one = after(fused, context)
        for token in tokens:
            alone = one.verify(DraftTree.bare(token))
            one.commit([])
        assert torch.equal(alone[0], whole[node + 1]), "one token in each pass"


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.usefixtures("own_products")
def test_several_threads_share_attention_and_give_the_same_bits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused = both("qwen3")
    large = DraftTree.of(4, list(range(40)), [-1] * 40)
    cases = [(length, tree) for length in (9, 130) for tree in (TREE, large)]
    expected, batch = [logits_of(fused, prompt_of(length), tree) for length, tree in cases], batch_logits(fused)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for (length, tree), one in zip(cases, expected, strict=True):
        assert torch.equal(logits_of(fused, prompt_of(length), tree), one)
    assert all(torch.equal(*pair) for pair in zip(batch_logits(fused), batch, strict=True))


def batch_logits(target: Target) -> list[torch.Tensor]:
    """Of two sequences of different lengths."""
    cache = target.allocate(2)
    for slot, length in enumerate((20, 90)):
        target.prefill(cache, slot, prompt_of(length), room=9)
    return [verified.logits.clone() for verified in target.verify(cache, [TREE, DraftTree.bare(7)])]


@pytest.mark.usefixtures("own_products")
def test_the_capacity_of_the_cache_changes_no_bit() -> None:
    _, fused = both()
    small = logits_of(fused, prompt_of(40))
    one = after(fused, prompt_of(40), room=1000)
    assert one.cache.capacity > 1000
    with torch.inference_mode():
        one.cache.storage.tensors[0][:, :, :, 47:] = float("nan")
    assert torch.equal(one.verify(TREE), small)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.each_value
def test_drafts_do_not_change_the_answer(kind: str, sampling: SamplingConfig) -> None:
    usual, fused = both(kind)
    prompt = prompt_of(20)
    plain = said(run(fused, prompt, sampling))
    assert plain == said(run(usual, prompt, sampling))
    liar = LyingDrafter(len(prompt), plain, VOCABULARY, seed=1)
    assert said(run(fused, prompt, sampling, drafter=liar)) == plain
    assert liar.accepted > 0
    if sampling == SamplingConfig():
        assert plain == generated(fused.model, prompt, 48)


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(NEED_HEADS) - {"rest"}))
def test_every_method_gives_the_answer_of_plain_decoding(method: str) -> None:
    _, fused = both("qwen3")
    prompt = prompt_of(12) * 3
    plain = said(run(fused, prompt, SamplingConfig()))
    drafter = drafter_within(lambda *_: FixedBudget(9), DecodeConfig(method), StoreSet(), fused)
    assert said(run(fused, prompt, SamplingConfig(), drafter=drafter)) == plain


def test_an_answer_longer_than_the_cache_at_first() -> None:
    usual, fused = both()
    cache = fused.allocate(2)
    for slot, length in enumerate((3, 9)):
        fused.prefill(cache, slot, prompt_of(length), room=1)
    at_first = cache.capacity
    contexts = [prompt_of(3), prompt_of(9)]
    for token in range(90):
        verified = fused.verify(cache, [DraftTree.bare(token), DraftTree.bare(token)])
        for slot in range(2):
            fused.commit(cache, slot, [])
            contexts[slot].append(token)
    assert cache.capacity > at_first
    for slot in range(2):
        assert_same_logits(verified[slot].logits[0], plain_logits(usual.model, contexts[slot]))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["T 0.7"]])
def test_answers_of_a_batch_are_those_given_alone(size: int, sampling: SamplingConfig) -> None:
    _, fused = both("qwen2")
    lengths = (1, 40, 7, 23)
    alone = {length: said(run(fused, prompt_of(length), sampling, 24)) for length in lengths}

    def requests() -> Iterator[Request[int]]:
        for length in lengths:
            liar = LyingDrafter(length, alone[length], VOCABULARY, seed=length)
            yield Request(length, prompt_of(length), Sampler(sampling, prompt_of(length)), liar)

    asked, answers = requests(), dict[int, list[int]]()
    before = stack(fused).passes
    for request, step in decode_batch(fused, lambda: next(asked, None), size, max_new_tokens=24):
        answers.setdefault(request.key, []).extend(step.tokens)
    assert answers == alone
    assert stack(fused).passes > before


def test_a_later_turn_continues_the_cache_of_the_first() -> None:
    usual, fused = (after(target, prompt_of(30)) for target in both())
    for one in (usual, fused):
        one.verify(TREE)
        one.commit([0, 1])
    context = [*prompt_of(30), 3, 5, 8, 60, 61]
    found, expected = (one.read_on(context) for one in (fused, usual))
    assert fused.cached_tokens == usual.cached_tokens == 32
    assert_same_logits(found, expected)


def test_the_proof_passes_with_a_tenth_of_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    usual = proof.distance

    def noted(*given: torch.Tensor) -> float:
        seen.append(usual(*given))
        return seen[-1]

    monkeypatch.setattr(proof, "distance", noted)
    for kind in KINDS:
        both(kind)
    assert seen and max(seen) < proof.TOLERANCE / 10


def test_no_pass_compiles_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading has compiled whole layers as well as their parts, whichever products a pass takes."""
    monkeypatch.setattr(ProductChoice, "own", lambda choice, rows: True)
    _, fused = both()

    def compiled() -> list[int]:
        return [len(one.signatures) for one in vars(layers).values() if hasattr(one, "signatures")]

    before = compiled()
    for others in ([], [_NotOwn()]):
        stack(fused)._choices += others
        for tree in (TREE, DraftTree.bare(1)):
            logits_of(fused, prompt_of(30), tree)
    assert compiled() == before and before
