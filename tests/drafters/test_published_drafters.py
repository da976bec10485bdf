"""Published drafters: EAGLE-3, DFlash and Gemma 4's assistant change no token, and draft what the library drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.generation.candidate_generator import (
    DFlashTokenCandidateGenerator,
    SinglePositionMultiTokenCandidateGenerator,
)

from hdtool.data.errors import FamilyError, HeadsError, ModelError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.engine_interface import Ranked
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.drafter_factory import drafter_for, drafters_for
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter
from hdtool.runtime.drafters.trained.block_drafter import BlockDrafter
from hdtool.runtime.drafters.trained.checkpoints import PublishedDrafter
from hdtool.runtime.drafters.trained.dflash_checkpoints import without_norm
from hdtool.runtime.drafters.trained.eagle3_model import EagleModule, load_eagle3
from hdtool.runtime.drafters.trained.gemma4_assistant import AssistantModule, load_assistant
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING, Proposal
from hdtool.runtime.drafters.trained_drafter_factory import published_drafter
from hdtool.runtime.engines.captured.ranking_passes import RankingPasses
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target
from tests.support.decoding import assert_answers_of_batch, assert_drafts_change_nothing, run
from tests.support.families import random_model
from tests.support.library_drafts import best_chains, drafts_of_library
from tests.support.oracle import prompt_of
from tests.support.published_drafters import (
    assistant,
    block_drafter,
    dflash,
    eagle3,
    few_words,
    let_all_layers_share,
    normed,
    six_layers,
    turned,
)
from tests.support.rankings import assert_as_in_turn
from tests.support.rehearsed import Rehearsed, Replayed, direct
from tests.sweep.models import tiny_model

SAMPLED = SamplingConfig(temperature=0.8, seed=3)
Maker = Callable[..., Path]


@pytest.fixture(autouse=True)
def _all_layers_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    let_all_layers_share(monkeypatch)


def gemma() -> PreTrainedModel:
    return tiny_model("gemma4_text")


PAIRS: dict[str, tuple[Callable[[], PreTrainedModel], Maker]] = {
    "eagle3": (partial(six_layers, "Llama"), eagle3),
    "eagle3 of speculators": (partial(six_layers, "Qwen3"), partial(eagle3, speculators=True)),
    "dflash": (partial(six_layers, "Llama"), dflash),
    "dflash of its authors": (partial(six_layers, "Qwen3"), block_drafter),
    "dflash of speculators": (partial(six_layers, "Llama"), partial(block_drafter, speculators=True, drafted=40)),
    "dspark": (partial(six_layers, "Qwen3"), partial(block_drafter, markov="gated")),
    "dspark of speculators": (partial(six_layers, "Llama"), partial(block_drafter, markov="rnn", speculators=True)),
    "assistant": (gemma, assistant),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.one_in(2)
def test_drafts_change_no_token(pair: str, tmp_path: Path) -> None:
    made, make = PAIRS[pair]
    model = made()
    folder = str(make(tmp_path, model))
    target = Target(model)
    for sampling in (SamplingConfig(), SAMPLED):
        for method in ("drafter", "hd+drafter"):
            drafter = drafter_for(DecodeConfig(method, draft_tokens=12, drafter=folder), target, StoreSet())
            assert_drafts_change_nothing(target, drafter, sampling, (20, 5), SourceId.DRAFTER)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.one_in(2)
def test_answers_of_a_batch_are_drafted_apart(pair: str, tmp_path: Path) -> None:
    """Though they move from slot to slot when others end."""
    made, make = PAIRS[pair]
    model = made()
    config = DecodeConfig("hd+drafter", draft_tokens=6, batch_size=4, drafter=str(make(tmp_path, model)))
    target = Target(model)
    prompts = [prompt_of(length) for length in (4, 11, 7, 30)]
    drafters = drafters_for(config, target, StoreSet())
    assert_answers_of_batch(target, prompts, drafters, 3, 5, more=4)


@pytest.mark.parametrize("capture", [Rehearsed(), Replayed()], ids=["rehearsed", "replayed"])
def test_an_assistant_drafts_in_one_run_what_it_drafts_in_turn(
    capture: Rehearsed | Replayed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while an accepted path is still to be moved into place, and after more tokens than its window has."""
    model = few_words(gemma())
    target, folder = Target(model, lambda device: capture), str(assistant(tmp_path, model))
    drafter, usual, moves = published_drafter(folder, target), AssistantModule.start, list[bool]()
    assert isinstance(drafter, BlockDrafter)

    def compared(self: AssistantModule, hidden: torch.Tensor, tokens: list[int]) -> Callable[[], Ranked]:
        results = usual(self, hidden, tokens)
        if self._slot is None:
            return results
        ranked, proposal = results(), Proposal.in_tree(*results())
        moves.append(self._slot.kv.pending_move is not None)
        in_turn = AssistantModule(self._assistant, target)
        in_turn._passes = RankingPasses(None, target.device, 1, TOKENS_PER_RANKING)
        in_turn._slot = copy = target.cache.saved(0)
        in_turn._tokens, in_turn._length = copy.tokens, copy.length - len(tokens)
        assert_as_in_turn(in_turn, usual(in_turn, hidden, tokens)(), proposal)
        return lambda: ranked

    monkeypatch.setattr(AssistantModule, "start", compared)
    alone = StandaloneDrafter(drafter, FixedBudget(12))
    assert_drafts_change_nothing(target, alone, SAMPLED, (20, 5), SourceId.DRAFTER)
    assert any(moves) and not all(moves)


def test_an_assistant_with_clusters_of_tokens_ranks_as_the_library_does(tmp_path: Path) -> None:
    model = gemma()
    folder = assistant(tmp_path, model, use_ordered_embeddings=True, num_centroids=97, centroid_intermediate_top_k=12)
    target = Target(model)
    library = load_assistant(PublishedDrafter.named(str(folder)), target)
    library.masked_embedding.token_ordering.copy_(torch.randperm(library.vocab_size))
    for rows in (1, 4):
        states = torch.randn(rows, library.hidden_size)
        with torch.inference_mode():
            expected = library.masked_embedding(states[:, None], library.lm_head.weight)[:, 0]
            torch.testing.assert_close(AssistantModule(library, target)._logits(states), expected)


@pytest.mark.parametrize("length", [5, 20, 41])
@pytest.mark.parametrize("pair", ["dflash", "assistant"])
@pytest.mark.each_value
def test_drafts_are_those_of_the_library(
    pair: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an assistant, the first one: later ones of the library read the keys of a token that was rejected."""
    made, make = PAIRS[pair]
    model = few_words(made())
    folder, prompt = make(tmp_path, model), prompt_of(length)
    kind: Any = DFlashTokenCandidateGenerator if pair == "dflash" else SinglePositionMultiTokenCandidateGenerator
    library = drafts_of_library(monkeypatch, kind)
    auto: Any = AutoModel if pair == "dflash" else AutoModelForCausalLM
    other = auto.from_pretrained(folder).eval()
    if pair == "assistant":
        other.generation_config.num_assistant_tokens = 5
    ids: Any = torch.tensor([prompt])
    given = {"speculation_type": "dflash"} if pair == "dflash" else {}
    model.generate(ids, max_new_tokens=50, do_sample=False, assistant_model=other, **given)  # type: ignore[operator]

    target = Target(model)
    drafter: Any = drafter_for(DecodeConfig("drafter", draft_tokens=4, drafter=str(folder)), target, StoreSet())
    ours = best_chains(drafter)
    accepted = sum(
        len(step.tokens) - 1 for step in run(target, prompt, SamplingConfig(), max_new_tokens=50, drafter=drafter)
    )
    assert accepted > 0
    shared = sorted(set(ours) & set(library))[:-1]
    assert len(shared) > 10 and shared[0] == length + 1
    for place in shared if pair == "dflash" else shared[:1]:
        common = min(len(ours[place]), len(library[place]))
        assert common >= 2 and ours[place][:common] == library[place][:common]


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 8}], ids=["full", "sliding"])
def test_captured_blocks_are_those_of_other_passes(changes: dict[str, Any], tmp_path: Path) -> None:
    model, capture = six_layers("Llama"), Rehearsed()
    folder = str(dflash(tmp_path, model, **changes))
    targets = Target(model), Target(model, lambda device: capture)
    usual, captured = (published_drafter(folder, target) for target in targets)
    recorded = capture.recorded
    torch.manual_seed(0)
    for new in (21, 1, 3, 14, 1):
        hidden, tokens = torch.randn(new, 64), torch.randint(97, (new,)).tolist()
        (expected, sure), (found, close) = (drafter.module.read(hidden, tokens) for drafter in (usual, captured))
        assert (found == expected).all()
        torch.testing.assert_close(torch.tensor(close), torch.tensor(sure), rtol=1e-4, atol=1e-6)
    assert capture.recorded > recorded


@pytest.mark.parametrize("capture", [never, lambda device: Rehearsed(), direct], ids=["eager", "rehearsed", "fixed"])
@pytest.mark.parametrize("speculators", [False, True])
def test_an_eagle_ranks_as_a_slow_one_does(speculators: bool, capture: CaptureMaker, tmp_path: Path) -> None:
    """The same layer over the whole conversation at once, with hidden states of its own on the drafted path."""
    model = six_layers("Llama")
    target = Target(model, capture)
    published = PublishedDrafter.named(str(eagle3(tmp_path, model, speculators=speculators)))
    eagle, layers = load_eagle3(published, target)
    module = EagleModule(eagle, target)
    assert layers == ([0, 1, 2] if speculators else [1, 2, 2])
    torch.manual_seed(0)
    hidden, tokens = torch.randn(24, 3 * 32), torch.randint(97, (24,)).tolist()
    tensors, settings = published.tensors(), published.settings
    with torch.inference_mode():
        for start, stop in ((0, 15), (15, 16), (16, 20)):
            found = module.read(hidden[start:stop], tokens[start:stop])
            for path in ([5], [5, 6], [5, 6, 7]):
                drafted = module.extend([len(path) - 1], path[-1:])
            states = slow_eagle(tensors, settings, model, hidden[:stop], tokens[:stop], [5, 6, 7])
            for row, ranked in ((stop - 1, found), (stop + 2, drafted)):
                expected = torch.softmax(states[row], dim=-1)
                ids = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()
                for token, prob in zip(ranked[0][0].tolist(), ranked[1][0].tolist(), strict=True):
                    assert prob == pytest.approx(float(expected[ids.index(token)]), rel=1e-3, abs=1e-6)
                assert ranked[1][0, 0] == pytest.approx(float(expected.max()), rel=1e-3)


def slow_eagle(
    tensors: dict[str, torch.Tensor],
    settings: dict[str, Any],
    model: Any,
    hidden: Any,
    tokens: list[int],
    path: list[int],
) -> torch.Tensor:
    """Logits after each token and each token of a drafted path, by a pass over all for each token of the path."""
    prefix = "layers.0" if "transformer_layer_config" in settings else "midlayer"
    weight = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}
    states = hidden @ weight["fc.weight"].T
    for number in range(len(path) + 1):
        embedded = model.get_input_embeddings().weight[torch.tensor([*tokens, *path[:number]])]
        out = eagle_layer(weight, embedded, states, adds_normed=prefix != "midlayer")
        states = torch.cat([states, out[-1:]])
    return normed(out, weight["norm.weight"]) @ weight["lm_head.weight"].T


def eagle_layer(weight: dict[str, Any], embedded: Any, hidden: Any, *, adds_normed: bool) -> torch.Tensor:
    context = normed(hidden, weight["hidden_norm.weight"])
    joined = torch.cat([normed(embedded, weight["input_layernorm.weight"]), context], dim=-1)
    parts = [(joined @ weight[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 8)) for name in "qkv"]
    queries, keys = (turned(part, range(len(part))) for part in parts[:2])
    queries, keys, values = (part.transpose(0, 1) for part in (queries, keys, parts[2]))
    keys, values = keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)
    scores = queries @ keys.transpose(-1, -2) * 8**-0.5
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1) @ weight["self_attn.o_proj.weight"].T
    hidden = (context if adds_normed else hidden) + mixed
    read = normed(hidden, weight["post_attention_layernorm.weight"])
    gate, up = (read @ weight[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    found: torch.Tensor = hidden + (torch.nn.functional.silu(gate) * up) @ weight["mlp.down_proj.weight"].T
    return found


def test_drafters_of_other_models_are_refused_in_a_line(tmp_path: Path) -> None:
    small, wide = six_layers("Llama"), random_model("Llama", hidden_size=64, head_dim=16)
    target, wider = Target(small), Target(wide.eval())
    for make in (eagle3, dflash):
        folder = str(make(tmp_path / make.__name__, small))
        with pytest.raises(HeadsError, match="for a model of width 32, and this one has 64: name a drafter of this"):
            drafter_for(DecodeConfig("drafter", drafter=folder), wider, StoreSet())
    with pytest.raises(HeadsError, match="for a model of width 64, and this one has 32"):
        drafter_for(DecodeConfig("drafter", drafter=str(assistant(tmp_path / "own", gemma()))), target, StoreSet())
    with pytest.raises(HeadsError, match=r"reads layers \[0, 9\], and this model has 6"):
        folder = str(dflash(tmp_path / "deep", small, target_layer_ids=[0, 9]))
        drafter_for(DecodeConfig("drafter", drafter=folder), target, StoreSet())
    with pytest.raises(HeadsError, match="reads token 97 in place of drafts, and this model has tokens 0 to 96"):
        folder = str(dflash(tmp_path / "mask", small, mask_token_id=97, vocab_size=98))
        drafter_for(DecodeConfig("drafter", drafter=folder), target, StoreSet())
    same_width = Target(random_model("Llama", hidden_size=64, head_dim=16).eval())
    with pytest.raises(FamilyError, match="reads layers of kinds full_attention, sliding_attention"):
        drafter_for(DecodeConfig("drafter", drafter=str(tmp_path / "own")), same_width, StoreSet())


def test_damaged_drafters_are_refused_in_a_line(tmp_path: Path) -> None:
    model = six_layers("Llama")
    target = Target(model)

    def refused(match: str, folder: Path, kind: type[Exception] = HeadsError) -> None:
        with pytest.raises(kind, match=match) as error:
            drafter_for(DecodeConfig("drafter", drafter=str(folder)), target, StoreSet())
        assert "\n" not in str(error.value)

    folder = eagle3(tmp_path / "a", model)
    weights, settings = folder / "pytorch_model.bin", folder / "config.json"
    whole, known = weights.read_bytes(), json.loads(settings.read_text(encoding="utf-8"))
    weights.write_bytes(whole[: len(whole) // 2])
    refused(r"cannot be read \(pytorch_model.bin: ", folder)
    weights.unlink()
    refused("has no weights in", folder)
    weights.write_bytes(whole)
    settings.write_text(json.dumps(known | {"intermediate_size": 47}), encoding="utf-8")
    refused("has another shape of layer.mlp.down_proj.weight", folder)
    settings.write_text(json.dumps(known | {"architectures": ["EagleLlamaForCausalLM"]}), encoding="utf-8")
    refused("is an EAGLE drafter of an earlier kind, which is not supported", folder)
    settings.write_text("{", encoding="utf-8")
    refused(r"cannot be read \(config.json", folder)
    refused("does not exist|holds no|is a folder", tmp_path / "none", ModelError)


@pytest.mark.parametrize("capture", [never, direct], ids=["eager", "fixed"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_outputs_of_layers_are_those_of_the_library(family: str, capture: CaptureMaker) -> None:
    """In passes of the library and in hdtool's own, beside the input of the output layer."""
    model = six_layers(family)
    target = Target(model, capture)
    assert target.is_fused is (capture is direct)
    columns = [target.watch_hidden(), target.watch_hidden([3, 1]), target.watch_hidden([4])]
    assert columns == [slice(0, 32), slice(32, 96), slice(96, 128)]
    assert target.watch_hidden([3, 1]) == columns[1]
    assert target.is_fused is (capture is direct)
    prompt, chain = prompt_of(12), prompt_of(5)
    found: Any = model(torch.tensor([[*prompt, *chain]]), output_hidden_states=True).hidden_states
    expected = torch.cat([found[6], found[4], found[2], found[5]], dim=-1)[0]
    cache = target.allocate()
    read = target.prefill(cache, 0, prompt).hidden
    (verified,) = target.verify(cache, [DraftTree.of(chain[0], chain[1:], range(-1, 3))])
    for part, rows in ((read, expected[:12]), (verified.hidden, expected[12:])):
        assert part is not None
        torch.testing.assert_close(part, rows.detach(), rtol=1e-4, atol=1e-4)


def test_blocks_read_embeddings_without_their_norm() -> None:
    """And go on reading the model's weight, which keeps its norm."""

    class Normed(torch.nn.Embedding):
        def __init__(self) -> None:
            super().__init__(5, 4)
            self.embed_norm = torch.nn.LayerNorm(4)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            normed: torch.Tensor = self.embed_norm(super().forward(input))
            return normed

    embedding, token = Normed(), torch.tensor([1])
    bare = without_norm(embedding)
    embedding.weight = torch.nn.Parameter(torch.randn(5, 4))
    assert torch.equal(bare(token), embedding.weight[token])
    assert torch.equal(embedding(token), embedding.embed_norm(embedding.weight[token]))
