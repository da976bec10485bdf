"""DFlash and DSpark drafters in the formats of their authors and of speculators draft what a slow reading does."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hdtool.data.errors import HeadsError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter
from hdtool.runtime.drafters.trained import path_drafting
from hdtool.runtime.drafters.trained.checkpoints import PublishedDrafter
from hdtool.runtime.drafters.trained.dflash import DFlashPasses
from hdtool.runtime.drafters.trained.dflash_checkpoints import DFlashModel, load_dflash
from hdtool.runtime.drafters.trained.proposal import Proposal, best_paths
from hdtool.runtime.drafters.trained_drafter_factory import published_drafter
from hdtool.runtime.engines.captured.ranking_passes import RankingPasses
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.model.pass_inputs import TransferBuffer
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, assert_answers_of_batch
from tests.support.interleaving import Interleaving
from tests.support.oracle import prompt_of
from tests.support.published_drafters import KEY_HEADS, block_drafter, normed, six_layers, turned
from tests.support.rehearsed import Rehearsed, Replayed, direct

MASK, BLOCK, HEAD = 2, 5, 8
READ = (0, 15), (15, 16), (16, 20)
"""Accepted tokens that passes read one after another."""
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "use_sliding_window": True}
DFLASH: dict[str, dict[str, Any]] = {
    "authors": {},
    "authors, sliding": SLIDING,
    "authors, sliding, not causal": SLIDING | {"is_causal": False},
    "speculators": {"speculators": True},
    "speculators, few tokens": {"speculators": True, "drafted": 40},
    "speculators, sliding": SLIDING | {"speculators": True},
    "speculators, from the anchor": {"speculators": True, "sample_from_anchor": True},
}
DSPARK: dict[str, dict[str, Any]] = {
    "vanilla": {"markov": "vanilla"},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "without confidence": {"markov": "vanilla", "confidence": False},
    "speculators": {"markov": "vanilla", "speculators": True},
    "speculators, few tokens": {"markov": "gated", "speculators": True, "drafted": 40},
    "speculators, after the anchor": {"markov": "rnn", "speculators": True, "sample_from_anchor": False},
}


class Slow:
    """A drafter by its published formulas alone, which computes a block from the whole conversation."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights = load_file(folder / "model.safetensors")
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self.embedding, self.head = embedding.detach(), self.weights.get("lm_head.weight", head).detach()
        ids = torch.arange(len(self.head))
        self.ids = (ids + self.weights.get("d2t", 0 * ids)).tolist()
        is_dspark = "markov_rank" in self.settings
        self.first = 0 if self.settings.get("sample_from_anchor", is_dspark) else 1
        """Token of the block at which the first draft is predicted."""

    def block(self, hidden: torch.Tensor, anchor: int) -> torch.Tensor:
        """Return the states of the block that begins with ``anchor``, after tokens with these hidden states."""
        context = normed(hidden @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"])
        states = self.embedding[torch.tensor([anchor, *[MASK] * (BLOCK - 1)])]
        for layer in range(2):
            weight = {
                name.removeprefix(f"layers.{layer}."): tensor
                for name, tensor in self.weights.items()
                if name.startswith(f"layers.{layer}.")
            }
            read = normed(states, weight["input_layernorm.weight"])
            states = states + self.attention(weight, context, read, layer)
            read = normed(states, weight["post_attention_layernorm.weight"])
            gate, up = (read @ weight[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            states = states + (gate * gate.sigmoid() * up) @ weight["mlp.down_proj.weight"].T
        return normed(states, self.weights["norm.weight"])

    def attention(self, weight: dict[str, Any], context: Any, read: Any, layer: int) -> torch.Tensor:
        start, end = len(context), len(context) + BLOCK
        all_read = torch.cat([context, read])
        queries, keys, values = (
            (part @ weight[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, HEAD))
            for name, part in (("q", read), ("k", all_read), ("v", all_read))
        )
        queries = turned(normed(queries, weight["self_attn.q_norm.weight"]), range(start, end))
        keys = turned(normed(keys, weight["self_attn.k_norm.weight"]), range(end))
        groups = queries.shape[1] // KEY_HEADS
        keys, values = (part.repeat_interleave(groups, 1).transpose(0, 1) for part in (keys, values))
        scores = queries.transpose(0, 1) @ keys.transpose(-1, -2) * HEAD**-0.5
        if self.settings.get("layer_types", [""])[0].startswith("sliding") and layer == 0:
            is_causal = self.settings.get("is_causal", True)
            for row, query in enumerate(range(start, end)):
                for key in range(end):
                    if query - key >= self.settings["sliding_window"] or (is_causal and key > query):
                        scores[:, row, key] = -torch.inf
        mixed = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
        found: torch.Tensor = mixed @ weight["self_attn.o_proj.weight"].T
        return found

    def probs_along(self, block: torch.Tensor, anchor: int, path: list[int]) -> list[dict[int, float]]:
        """Return, for each prefix of a path, the probability of each token after it."""
        memory, found, before = torch.zeros(6), list[dict[int, float]](), [anchor, *path]
        if self.first:
            before.insert(0, anchor)
        for states, token in zip(block, before, strict=False):
            bias, memory, confidence = self.markov(states, token, memory)
            probs = (states @ self.head.T + bias).softmax(-1) * confidence
            found.append(dict(zip(self.ids, probs.tolist(), strict=True)))
        return found[self.first :]

    def markov(self, states: Any, token: int, memory: Any) -> tuple[Any, Any, Any]:
        """Return the bias of a position's logits, the memory after it and the confidence in it."""
        if "markov_rank" not in self.settings:
            return 0.0, memory, 1.0
        named, confidence = partial(self._named, "markov_head."), torch.ones(())
        embedded = named("markov_w1.weight")[token]
        if "confidence_head.proj.weight" in self.weights:
            scores = self._named("confidence_head.", "proj.weight")[0] @ torch.cat([states, embedded])
            confidence = torch.sigmoid(scores + self._named("confidence_head.", "proj.bias")[0])
        kind, factor = self.settings["markov_head_type"], embedded
        if kind == "gated":
            factor = embedded * torch.sigmoid(
                named("gate_proj.weight") @ torch.cat([states, embedded]) + named("gate_proj.bias")
            )
        elif kind == "rnn":
            joint = named("joint_proj.weight") @ torch.cat([memory, embedded, states]) + named("joint_proj.bias")
            gate, candidate, output = joint[:6].sigmoid(), joint[6:12].tanh(), joint[12:].tanh()
            memory, factor = gate * memory + (1 - gate) * candidate, output
        return named("markov_w2.weight") @ factor, memory, confidence

    def _named(self, prefix: str, name: str) -> torch.Tensor:
        return self.weights[prefix + name]


def loaded(folder: Path, target: Target) -> DFlashModel:
    return load_dflash(PublishedDrafter.named(str(folder)), target)


def read_by(passes: DFlashPasses, number: int = len(READ)) -> list[tuple[Any, int, tuple[Any, Any]]]:
    """Return, for each pass, the hidden states of all tokens so far, the last token and the rankings after it."""
    torch.manual_seed(0)
    hidden, tokens = torch.randn(20, 64), torch.randint(97, (20,)).tolist()
    return [
        (hidden[:stop], tokens[stop - 1], passes.read(hidden[start:stop], tokens[start:stop]))
        for start, stop in READ[:number]
    ]


def paths_of(proposal: Proposal) -> list[list[int]]:
    """Return the path that leads to each ranking."""
    paths: list[list[int]] = [[] for _ in proposal.tokens]
    for ranking, tokens in enumerate(proposal.tokens):
        for token, after in zip(tokens.tolist(), proposal.after[ranking].tolist(), strict=True):
            if after >= 0:
                paths[after] = [*paths[ranking], token]
    return paths


CAPTURES = pytest.mark.parametrize(
    "capture", [never, lambda device: Rehearsed(), direct], ids=["eager", "rehearsed", "fixed"]
)


@CAPTURES
@pytest.mark.parametrize("kind", DFLASH)
@pytest.mark.one_in(2)
def test_a_block_ranks_as_a_slow_one_does(kind: str, capture: CaptureMaker, tmp_path: Path) -> None:
    model = six_layers()
    target, slow = Target(model, capture), Slow(block_drafter(tmp_path, model, **DFLASH[kind]), model)
    passes = DFlashPasses(loaded(tmp_path, target), target)
    assert passes.positions == BLOCK - slow.first
    for hidden, anchor, (tokens, probs) in read_by(passes):
        expected = slow.probs_along(slow.block(hidden, anchor), anchor, [0] * BLOCK)
        assert len(tokens) == len(expected) == passes.positions
        for position, of_position in enumerate(expected):
            assert_best(tokens[position], probs[position], of_position)


def assert_best(tokens: Any, probs: Any, expected: dict[int, float]) -> None:
    """Assert that these are the best tokens by their expected probabilities."""
    best = sorted(expected.values(), reverse=True)[: len(tokens)]
    assert probs.tolist() == pytest.approx(best, rel=1e-3, abs=1e-6)
    assert [expected[token] for token in tokens.tolist()] == pytest.approx(best, rel=1e-3, abs=1e-6)


@CAPTURES
@pytest.mark.parametrize("kind", DSPARK)
@pytest.mark.one_in(2)
def test_each_path_has_the_scores_of_the_published_algorithm(kind: str, capture: CaptureMaker, tmp_path: Path) -> None:
    model = six_layers()
    target, slow = Target(model, capture), Slow(block_drafter(tmp_path, model, **DSPARK[kind]), model)
    passes = DFlashPasses(loaded(tmp_path, target), target)
    for hidden, anchor, ranked in read_by(passes):
        block, proposal = slow.block(hidden, anchor), Proposal.in_tree(*ranked)
        paths = paths_of(proposal)
        assert len({tuple(path) for path in paths}) == len(paths) == 1 + 4 * (passes.positions - 1)
        assert [len(path) for path in paths] == proposal.depths.tolist() and max(
            map(len, paths)
        ) == BLOCK - 1 - slow.first
        for ranking, path in enumerate(paths):
            expected = slow.probs_along(block, anchor, path)[len(path)]
            assert_best(proposal.tokens[ranking], proposal.probs[ranking], expected)
        assert_nodes(slow, block, anchor, proposal, paths)


def assert_nodes(slow: Slow, block: Any, anchor: int, proposal: Proposal, paths: list[list[int]]) -> None:
    """Assert that the nodes of a tree are the best paths among those that were ranked, each with its probability."""
    parents, ranks, rankings, found = best_paths(proposal.probs, np.ascontiguousarray(proposal.after), 12)
    for node, (ranking, rank) in enumerate(zip(rankings, ranks, strict=True)):
        path = [*paths[ranking], int(proposal.tokens[ranking, rank])]
        probs = slow.probs_along(block, anchor, path)
        expected = np.prod([of_position[token] for of_position, token in zip(probs, path, strict=False)])
        assert found[node] == pytest.approx(expected, rel=1e-3)
        assert parents[node] < node
    every = [slow.probs_along(block, anchor, path) for path in paths]
    scores = [
        np.prod([of_position[token] for of_position, token in zip(probs, path, strict=False)]) * probs[len(path)][token]
        for probs, path, ranked in zip(every, paths, proposal.tokens, strict=True)
        for token in ranked.tolist()
    ]
    assert found.tolist() == pytest.approx(sorted(scores, reverse=True)[:12], rel=1e-3)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_single_path_is_drafted_as_the_authors_do(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From left to right, the best token after the one before."""
    monkeypatch.setattr(path_drafting, "ROWS_PER_PASS", 1)
    model = six_layers()
    target, slow = Target(model), Slow(block_drafter(tmp_path, model, markov=kind), model)
    for hidden, anchor, ranked in read_by(DFlashPasses(loaded(tmp_path, target), target)):
        block, path = slow.block(hidden, anchor), list[int]()
        for _ in range(BLOCK):
            probs = slow.probs_along(block, anchor, path)[len(path)]
            path.append(max(probs, key=probs.__getitem__))
        assert Proposal.in_tree(*ranked).tokens[:, 0].tolist() == path


def test_long_blocks_rank_their_first_positions(tmp_path: Path) -> None:
    model = six_layers()
    target = Target(model)
    for number, (markov, positions) in enumerate([("rnn", 16), ("", 64)]):
        folder = block_drafter(tmp_path / str(number), model, block_size=80, markov=markov)
        drafter = published_drafter(str(folder), target)
        drafter.begin(prompt_of(6))
        passes: Any = drafter.module
        assert passes.positions == positions and passes.rankings <= 64
        assert len(passes.read(torch.randn(3, 64), [5, 6, 7])[0]) == passes.rankings


def test_a_draft_is_one_captured_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one copy to the device and one from it."""
    model, capture, copies = six_layers(), Replayed(), list[str]()
    target = Target(model, lambda device: capture)
    passes = DFlashPasses(loaded(block_drafter(tmp_path, model, markov="rnn"), target), target)
    read_by(passes)
    recorded = capture.recorded
    for name in ("send", "fetch"):
        usual = getattr(TransferBuffer, name)

        def counted(buffer: TransferBuffer, words: int, name: str = name, usual: Any = usual) -> None:
            copies.append(name)
            usual(buffer, words)

        monkeypatch.setattr(TransferBuffer, name, counted)
    passes.begin([])
    assert copies == ["send", "fetch"] * len(read_by(passes))
    assert capture.recorded == recorded


def test_starting_a_pass_and_waiting_for_it_both_cost_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ticks, told = six_layers(), count(), list[float]()
    target = Target(model)
    drafter = drafter_of(block_drafter(tmp_path, model, markov="vanilla"), target)
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("hdtool.runtime.drafters.trained.block_drafter.time", clock)
    monkeypatch.setattr(FixedBudget, "set_draft_seconds", lambda budget, seconds: told.append(seconds))
    answer_of(target, prompt_of(20), max_new_tokens=4, drafter=drafter)
    assert told and set(told) == {2.0}, "one tick to start it, and one to wait for it"


def test_weights_of_the_target_are_shared(tmp_path: Path) -> None:
    model = six_layers()
    target = Target(model)
    found = loaded(block_drafter(tmp_path, model, markov="vanilla"), target)
    assert found.embed is model.get_input_embeddings() and found.head is model.get_output_embeddings()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": tensors["embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    other = loaded(tmp_path, target)
    assert other.head is found.head and torch.equal(other.embed(torch.tensor([3])), found.embed(torch.tensor([3])) + 1)


def test_the_host_learns_while_all_blocks_of_a_batch_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = six_layers()
    target = Target(model, lambda device: Replayed())
    folder = block_drafter(tmp_path, model, markov="vanilla")
    drafters = [Hierarchy(budget=FixedBudget(8), trained=published_drafter(str(folder), target)) for _ in range(3)]
    target.prepare(target.allocate(3))
    events = list[str]()

    def noted(kind: Any, name: str) -> None:
        usual = getattr(kind, name)

        def run(*given: Any) -> Any:
            events.append(f"{name} {bool(given[0]._pending)}" if kind is Hierarchy else name)
            return usual(*given)

        monkeypatch.setattr(kind, name, run)

    prompts = [prompt_of(length) for length in (4, 11, 7)]
    for kind, name in ((DFlashPasses, "start"), (RankingPasses, "_wait"), (Hierarchy, "_catch_up")):
        noted(kind, name)
    assert_answers_of_batch(target, prompts, drafters, 3, 12)
    text = " ".join(events)
    assert text.count("start _catch_up True start _catch_up True start _catch_up True _wait _wait _wait") > 2


def drafter_of(folder: Path, target: Target) -> Drafter:
    return StandaloneDrafter(published_drafter(str(folder), target), FixedBudget(12))


@pytest.mark.long
def test_answers_that_take_turns_are_those_alone(tmp_path: Path) -> None:
    model = six_layers()
    target = Target(model, lambda device: Replayed())
    folder = block_drafter(tmp_path, model, markov="gated")
    interleaving = Interleaving(target, {"dspark": partial(drafter_of, folder)})
    for seed in range(2):
        interleaving.play(seed)
    assert {"stream", "batch", "abandoned"} <= interleaving.played.keys()


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.one_in(2)
def test_a_drafter_that_overflows_changes_no_token(kind: str, value: float, tmp_path: Path) -> None:
    model = six_layers()
    target = Target(model)
    plain = answer_of(target, prompt_of(20), max_new_tokens=20)
    block_drafter(tmp_path, model, markov=kind)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("markov_head.markov_w1.weight", "confidence_head.proj.weight", "norm.weight"):
        spoiled = tensors | {name: torch.full_like(tensors[name], value)}
        save_file(spoiled, tmp_path / "model.safetensors")
        fresh = Target(model)
        assert answer_of(fresh, prompt_of(20), max_new_tokens=20, drafter=drafter_of(tmp_path, fresh)) == plain


def test_other_checkpoints_are_refused_in_a_line(tmp_path: Path) -> None:
    model = six_layers()
    target = Target(model)

    def refused(match: str, changes: dict[str, Any], more: dict[str, Any] | None = None, **options: Any) -> None:
        folder = block_drafter(tmp_path, model, **{"markov": "vanilla", **options}, **changes)
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {name: tensor for name, tensor in (tensors | (more or {})).items() if tensor is not None},
            folder / "model.safetensors",
        )
        with pytest.raises(HeadsError, match=match) as error:
            published_drafter(str(folder), target)
        assert "\n" not in str(error.value)

    w1, w2 = (f"markov_head.markov_w{number}.weight" for number in (1, 2))
    head = torch.randn(98, 32)
    for changes in ({}, {"speculators": True}):
        refused("is for a model of 98 tokens, and this one has 97", {}, {w1: torch.randn(98, 6)}, **changes)
        refused(f"has another shape of {w2}", {}, {w2: torch.randn(96, 6)}, **changes)
        refused(f"lacks {w2}", {}, {w2: None}, **changes)
    refused("is for a model of 98 tokens", {}, {"lm_head.weight": head, w2: torch.randn(98, 6)})
    refused("is for a model of 98 tokens", {}, {"embed_tokens.weight": head})
    refused(
        "drafts tokens that this model does not have", {}, {"d2t": torch.full((40,), 90)}, speculators=True, drafted=40
    )
    refused("drafts tokens that this model does not have", {}, {"lm_head.weight": None}, speculators=True, drafted=40)
    refused("lacks layers.1.mlp.up_proj.weight", {}, {"layers.1.mlp.up_proj.weight": None})
    refused(r"has layers.0.self_attn.q_proj.bias", {}, {"layers.0.self_attn.q_proj.bias": torch.ones(32)})
    refused("lacks markov_head.gate_proj.bias", {"markov_head_type": "gated"})
    refused("has a Markov head of kind 'cubic'", {"markov_head_type": "cubic"})
    refused("no 'target_layer_ids' in its settings", {"target_layer_ids": None})
    refused("no 'mask_token_id' in its settings", {"mask_token_id": None}, speculators=True)
    refused("no 'target_layer_ids' in its settings", {"aux_hidden_state_layer_ids": []}, speculators=True)
    refused("drafts blocks of 0", {"block_size": 0})
    refused("drafts blocks of 1", {"block_size": 1, "sample_from_anchor": False}, speculators=True)
    refused(r"reads layers \[-1, 2\], and this model has 6", {"aux_hidden_state_layer_ids": [0, 3]}, speculators=True)
    refused(r"reads layers \[0, 6\], and this model has 6", {"target_layer_ids": [0, 6]})
    refused("reads token 97 in place of drafts", {"mask_token_id": 97})
    refused("layers of type 'unheard-of'", {"model_type": "unheard-of"})
    for name in ("num_attention_heads", "block_size", "markov_rank", "dflash_config", "target_layer_ids"):
        refused(r"cannot be loaded \(", {name: "many"})
    refused("for a model of width 64, and this one has 32", {"hidden_size": 64})
    refused("for a model of width 48, and this one has 32", {}, {"embed_tokens.weight": torch.randn(97, 48)})
    refused("another shape of confidence_head.proj.weight", {}, {"confidence_head.proj.weight": torch.randn(1, 99)})
    refused("a Markov head of rank -1", {"markov_rank": -1})


def test_settings_that_are_null_are_those_left_out(tmp_path: Path) -> None:
    model = six_layers()
    target = Target(model)
    nulls: dict[str, Any] = dict.fromkeys(("markov_head_type", "sample_from_anchor", "input_embedding_scale"))
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"markov": "vanilla"}, {}),
        ({}, {"markov_rank": None}),
        ({"speculators": True}, {"head_dim": None}),
    ]
    for options, more in cases:
        left_out = loaded(block_drafter(tmp_path / "without", model, **options), target)
        found = loaded(block_drafter(tmp_path / "null", model, **options, **nulls, **more), target)
        assert (found.first, found.heads is None) == (left_out.first, left_out.heads is None)


def test_truncated_files_are_refused_in_a_line(tmp_path: Path) -> None:
    model = six_layers()
    target, weights = Target(model), tmp_path / "model.safetensors"
    block_drafter(tmp_path, model, markov="vanilla")
    whole = weights.read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:length])
        with pytest.raises(HeadsError, match=r"cannot be read \(model.safetensors: .*download it again") as error:
            published_drafter(str(tmp_path), target)
        assert "\n" not in str(error.value)
