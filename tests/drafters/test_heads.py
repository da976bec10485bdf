"""Drafting heads: what they compute, by a slow reference; folders of them; the trees made of their guesses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hdtool.builders.head_training.loss import LabelPositions, draft_labels, head_logits
from hdtool.builders.head_training.train_heads import best_tree
from hdtool.builders.head_training.training_examples import Example, draft_vocabulary, frequent_tokens
from hdtool.data.errors import FamilyError, HeadsError
from hdtool.runtime.caches.kv_cache import KVTensors, StaticKVCache
from hdtool.runtime.caches.transformers_views import SlotKVCache
from hdtool.runtime.drafters.heads.checkpoint import load_heads, new_heads
from hdtool.runtime.drafters.heads.head_rankings import HeadsState
from hdtool.runtime.drafters.heads.modules import HeadsShape, ParallelHeads
from hdtool.runtime.drafters.trained.module_parts import topk_tokens
from hdtool.runtime.drafters.trained.proposal import (
    PROB_BUCKETS,
    Calibration,
    Proposal,
    best_paths,
    bucket_center,
    prob_bucket,
)
from hdtool.runtime.model import hidden_states as hidden
from hdtool.runtime.model.pass_inputs import FULL, AttentionMasks, AttentionWindow
from hdtool.runtime.settings.building import HeadsConfig
from hdtool.runtime.target.target import Target
from tests.support.families import FAMILIES, VOCABULARY, model_of
from tests.support.heads import SEQUENTIAL, SHAPE, VARIANTS, random_for, random_heads, reference_logits
from tests.support.one_sequence import OneSequence
from tests.support.oracle import prompt_of
from tests.support.rehearsed import Rehearsed


def conversation(rows: int, shape: HeadsShape = SHAPE) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, shape.width), torch.randn(rows, shape.embedding)


class Reader:
    """Reads hidden states and embedded tokens into a KV cache, without any of the passes that are made for it."""

    def __init__(self, heads: ParallelHeads, capacity: int) -> None:
        self._heads, self.kv = heads, StaticKVCache(KVTensors.for_layers(heads.shapes(), capacity))
        self._masks = AttentionMasks([AttentionWindow(FULL)], heads.like.dtype, heads.like.device)

    def ahead(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[heads, draft vocabulary]`` after the last token."""
        new, first = len(hidden), self.kv.length
        mask: Any = self._masks.continuation_mask(new, first)
        positions = torch.arange(first, first + new)[None]
        stages = self._heads.stages(hidden[None], tokens[None], positions, SlotKVCache(self.kv.storage, [first]), mask)
        self.kv.length += new
        return self._heads.logits(self._heads.states([stage[0, -1:] for stage in stages]))[:, 0]


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_heads_compute_what_the_slow_reference_does(config: HeadsConfig) -> None:
    heads = random_heads(config)
    hidden, tokens = conversation(9)
    expected = reference_logits(heads, hidden, tokens)
    every = LabelPositions(
        torch.zeros(9, dtype=torch.int64), torch.arange(9), torch.ones(config.heads, 9, dtype=torch.bool)
    )
    trained = head_logits(heads, hidden[None], tokens[None], every)
    np.testing.assert_allclose(trained.numpy().transpose(1, 0, 2), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("parts", [[9], [1] * 9, [4, 1, 3, 1], [2, 7]])
def test_a_conversation_may_come_in_parts(config: HeadsConfig, parts: list[int]) -> None:
    heads = random_heads(config)
    hidden, tokens = conversation(9)
    expected = reference_logits(heads, hidden, tokens)
    reader, done = Reader(heads, 9), 0
    for part in parts:
        found = reader.ahead(hidden[done : done + part], tokens[done : done + part])
        done += part
        np.testing.assert_allclose(found.numpy(), expected[done - 1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.one_in(2)
def test_captured_passes_equal_others(config: HeadsConfig) -> None:
    """Two conversations in turn, of the same heads, past the end of their first memory."""
    torch.manual_seed(1)
    recorder = Rehearsed()
    targets = Target(model_of("llama")), Target(model_of("llama"), lambda device: recorder)
    saved = random_for(targets[0], config)
    heads, table = saved.heads, targets[0].model.get_input_embeddings().weight.detach()
    assert isinstance(heads, ParallelHeads)
    captured, others = ([HeadsState(saved, target).reading for _ in range(2)] for target in reversed(targets))
    readers = [Reader(heads, 2500) for _ in range(2)]
    recorder.recorded, sizes = 0, [500, 1, 3, 16, 2, 8, 1, 200, 5, 600]
    for number, new in enumerate(sizes * 2):
        hidden, tokens = torch.randn(new, heads.shape.width), torch.randint(VOCABULARY, (new,))
        mine = number % 2 if number < len(sizes) else number // 2 % 2
        every = topk_tokens(readers[mine].ahead(hidden, table[tokens]), VOCABULARY, heads.token_ids)
        share_of = torch.zeros(len(every[0]), VOCABULARY).scatter(1, *every).numpy()
        for passes in (captured[mine], others[mine]):
            best, shares = passes.read(hidden, tokens.tolist())
            np.testing.assert_allclose(shares, every[1][:, :10], rtol=1e-3, atol=1e-6)
            # Tokens with equal shares may change places, so each token's own share is compared.
            np.testing.assert_allclose(np.take_along_axis(share_of, best, 1), shares, rtol=1e-3, atol=1e-6)
            assert all(len(set(row)) == 10 for row in best.tolist())
            assert passes.length == (readers[mine].kv.length if heads.layers else 0)
    assert 0 < recorder.recorded < len(sizes) * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hidden_states_are_those_that_the_output_layer_reads(family: str) -> None:
    """The logits are the output layer's product, up to what the family scales, caps or adds after it."""
    model = model_of(family)
    target = Target(model)
    one = OneSequence(target)
    for _ in range(2):
        target.watch_hidden()
    read: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: read.append(given[0]))
    try:
        for length in (1, 7, 40):
            one.prefill(prompt_of(length))
            hidden = one.verified.hidden
            assert hidden is not None and len(hidden) == length
            torch.testing.assert_close(hidden[-1:], read[-1][0, -1:])
    finally:
        handle.remove()


def test_a_model_without_visible_hidden_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(model_of("llama"))
    monkeypatch.setattr(hidden, "hidden_in", lambda returned: None)
    with pytest.raises(FamilyError, match="does not return the hidden states"):
        target.watch_hidden()
    one = OneSequence(target)
    one.prefill(prompt_of(5))
    assert one.verified.hidden is None


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2"])
@pytest.mark.parametrize("rank", [0, 1000])
def test_new_heads_give_the_targets_logits(family: str, rank: int) -> None:
    model = model_of(family)
    target = Target(model)
    target.watch_hidden()
    one = OneSequence(target)
    one.prefill(prompt_of(30))
    assert one.verified.hidden is not None
    states = one.verified.hidden.clone()
    heads = new_heads(model, states.shape[-1], VOCABULARY, HeadsConfig(rank=rank, sampled_token=False))
    assert isinstance(heads, ParallelHeads)
    with torch.inference_mode():
        found = Reader(heads, 30).ahead(states, states)
        weight = model.get_output_embeddings().weight
    for said in found:
        torch.testing.assert_close(said, states[-1] @ weight.T, rtol=1e-3, atol=1e-3)


def test_low_rank_factors_are_the_best_approximation() -> None:
    model = model_of("llama")
    weight = model.get_output_embeddings().weight.detach()
    heads = new_heads(model, 32, VOCABULARY, HeadsConfig(rank=5))
    sizes = torch.linalg.svdvals(weight)
    for output in heads.outputs:
        found = output.up.weight.detach() @ output.down.weight.detach()  # type: ignore[union-attr, operator]
        torch.testing.assert_close(torch.linalg.norm(weight - found), sizes[5:].norm(), rtol=1e-3, atol=1e-3)


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_saved_heads_load_unchanged(tmp_path: Path) -> None:
    target = Target(model_of("llama"))
    for name, config in (VARIANTS | SEQUENTIAL).items():
        saved = random_for(target, config)
        saved.save(tmp_path / name)
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / name).iterdir()} == {0o666 & ~umask()}
        found = load_heads(tmp_path / name, target.model)
        assert found.heads.config == config and found.evaluation == saved.evaluation
        assert found.heads.state_dict().keys() == saved.heads.state_dict().keys()
        for key, weight in saved.heads.state_dict().items():
            kept = weight.half().float() if weight.is_floating_point() else weight
            torch.testing.assert_close(found.heads.state_dict()[key], kept, rtol=0, atol=0)
    shared = load_heads(tmp_path / "mtp", target.model).heads
    assert shared.output(0).up is target.model.get_output_embeddings()
    assert not any("output" in name for name in shared.state_dict()), "the target's own layer is not saved"


@pytest.mark.parametrize("config", [HeadsConfig(rank=8), *SEQUENTIAL.values()], ids=["amphista", *SEQUENTIAL])
def test_heads_of_another_model_are_refused(config: HeadsConfig, tmp_path: Path) -> None:
    random_for(Target(model_of("llama")), config).save(tmp_path)
    with pytest.raises(HeadsError, match=r"trained on another model \(random, .* hdtool train-heads"):
        load_heads(tmp_path, model_of("mistral"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_is_the_same_in_every_type(tmp_path: Path, dtype: torch.dtype) -> None:
    random_for(Target(model_of("llama")), HeadsConfig(rank=8)).save(tmp_path)
    assert load_heads(tmp_path, model_of("llama", dtype)).heads.like.dtype == dtype


def change_settings(**changed: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        saved = json.loads((folder / "config.json").read_text())
        saved["heads"].update(changed)
        (folder / "config.json").write_text(json.dumps(saved))

    return change


@pytest.mark.parametrize(
    ("kind", "damage", "said"),
    [
        ("amphista", lambda folder: (folder / "heads.safetensors").unlink(), "is missing"),
        ("amphista", lambda folder: (folder / "heads.safetensors").write_bytes(b"nonsense"), "cannot be read"),
        ("amphista", lambda folder: (folder / "config.json").unlink(), "holds no heads"),
        ("amphista", lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        ("amphista", lambda folder: (folder / "config.json").write_text("{}"), "has a format that"),
        ("amphista", lambda folder: (folder / "config.json").write_text("[1]"), "has a format that"),
        ("amphista", change_settings(rank=9), "cannot be read"),
        ("hydra", change_settings(kind="medusa"), "cannot be read"),
        ("hydra", change_settings(kind="eagle"), "cannot be read"),
        ("hydra", change_settings(head_layers=3), "cannot be read"),
        ("hydra", change_settings(heads=3), "cannot be read"),
    ],
)
def test_damaged_heads_give_one_line(kind: str, damage: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    """Also heads whose settings do not fit their weights."""
    target = Target(model_of("llama"))
    random_for(target, (VARIANTS | SEQUENTIAL)[kind]).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(HeadsError, match=said) as refusal:
        load_heads(tmp_path, target.model)
    assert "\n" not in str(refusal.value)


def test_token_ids_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    target = Target(model_of("llama"))
    saved = random_for(target, HeadsConfig(rank=8, draft_vocabulary=20))
    assert saved.heads.token_ids is not None
    saved.heads.token_ids[3] = VOCABULARY
    saved.save(tmp_path)
    with pytest.raises(HeadsError, match="the draft vocabulary has token ids that the model does not have"):
        load_heads(tmp_path, target.model)


def test_checkpoints_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Their architecture has no draft vocabulary."""
    target = Target(model_of("llama"))
    random_for(target, HeadsConfig(rank=8)).save(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["heads"]["draft_vocabulary"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert load_heads(tmp_path, target.model).heads.token_ids is None


def test_a_draft_vocabulary_holds_the_most_frequent_tokens_of_answers() -> None:
    text = Example(np.array([1, 1, 1, 5, 7, 7, 3, 5]), np.array([False] * 3 + [True] * 5))
    assert frequent_tokens([text], 2, 10).tolist() == [5, 7]
    assert frequent_tokens([text], 5, 10).tolist() == [0, 1, 3, 5, 7]  # lower ids where none are left
    config, ids = draft_vocabulary(HeadsConfig(draft_vocabulary=16), [text], 16)
    assert ids is None and config.draft_vocabulary is None


def test_labels_outside_of_the_draft_vocabulary_are_never_found() -> None:
    heads = random_heads(HeadsConfig(rank=8, draft_vocabulary=20))
    assert heads.token_ids is not None
    indices = draft_labels(heads, torch.arange(SHAPE.vocabulary))
    assert (indices >= 0).sum() == 20
    assert torch.equal(heads.token_ids[indices[indices >= 0]], (indices >= 0).nonzero()[:, 0])


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 64))
def test_the_most_probable_paths_are_found_in_order(seed: int, heads: int, best: int, most: int) -> None:
    probs = -np.sort(-np.random.default_rng(seed).random((heads, best)), axis=1)
    after = np.ascontiguousarray(Proposal.in_parallel(np.zeros_like(probs, np.int64), probs).after)
    parents, ranks, rankings, chances = best_paths(probs, after, most)
    size, depths = len(parents), rankings + 1
    every = sorted(
        (float(np.prod([probs[depth, rank] for depth, rank in enumerate(path)])) for depth in range(1, heads + 1)
         for path in product(range(best), repeat=depth)), reverse=True,
    )  # fmt: skip
    assert size == min(most, len(every))
    np.testing.assert_allclose(chances[:size], every[:size])
    for node in range(size):
        above = parents[node]
        assert above < node and depths[node] == (1 if above < 0 else depths[above] + 1)
        np.testing.assert_allclose(
            chances[node], (1.0 if above < 0 else chances[above]) * probs[depths[node] - 1, ranks[node]]
        )


def test_the_static_tree_holds_the_commonest_paths() -> None:
    ranks = np.array([[0, 0, 0, 1, 0, -1], [0, 0, 3, 0, 11, -1]])
    tree, gains = best_tree(ranks, max_nodes=4)
    assert tree == [[0], [0, 0], [1], [0, 3]]
    assert gains == [0.8, 0.4, 0.2, 0.2]


def test_buckets_follow_the_probabilities() -> None:
    likely = np.array([1.0, 0.97, 0.9, 0.6, 0.5, 0.2, 0.01, 1e-9])
    buckets = prob_bucket(likely)
    assert (np.diff(buckets) > 0).all() and buckets[0] == 0 and buckets[-1] < PROB_BUCKETS
    middle = likely[1:-1]
    assert (np.abs(np.log2(bucket_center(prob_bucket(middle)) / middle)) < 0.6).all()


def test_calibration_follows_the_acceptance_rate() -> None:
    calibration = Calibration(None, 1)
    boastful = prob_bucket(np.array([0.9, 0.05]))
    for turn in range(400):
        proposal = Proposal.in_parallel(np.array([[0, 1]]), np.zeros((1, 2)))
        calibration.learn(proposal, boastful[None], [turn % 10])
    found = calibration(0, boastful[None])[0]
    assert 0.05 < found[0] < 0.15 and found[1] <= found[0]
