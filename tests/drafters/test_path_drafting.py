"""Drafts whose passes are made in one run rank the tokens that passes one after another rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.engine_interface import Ranked
from hdtool.runtime.drafters.heads.head_rankings import HeadsState, HydraModule, TrainedMtp, sequential_drafter
from hdtool.runtime.drafters.heads.modules import HydraHeads, MtpHeads
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter
from hdtool.runtime.drafters.trained import draft_passes
from hdtool.runtime.drafters.trained.block_drafter import BlockDrafter
from hdtool.runtime.drafters.trained.checkpoints import PublishedDrafter
from hdtool.runtime.drafters.trained.dflash import DFlashPasses
from hdtool.runtime.drafters.trained.dflash_checkpoints import load_dflash
from hdtool.runtime.drafters.trained.draft_model import DraftModel
from hdtool.runtime.drafters.trained.draft_module import DraftModule
from hdtool.runtime.drafters.trained.draft_passes import ReadingPasses
from hdtool.runtime.drafters.trained.eagle3_model import EagleModule, load_eagle3
from hdtool.runtime.drafters.trained.gemma4_assistant import AssistantModule, load_assistant
from hdtool.runtime.drafters.trained.mtp import IteratedMtp, MtpLayersInTurn, load_mtp, mtp_drafter
from hdtool.runtime.drafters.trained.path_drafting import DEPTHS, PathsInOneRun, path_drafter, rankings_for
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING, Calibration, Proposal
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.drafters.trained.sequential_drafter import SequentialDrafter
from hdtool.runtime.drafters.trained_drafter_factory import published_drafter
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.settings.building import HeadsConfig
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, assert_answers_of_batch
from tests.support.families import model_of
from tests.support.heads import SEQUENTIAL, random_for
from tests.support.mtp import with_mtp
from tests.support.oracle import prompt_of
from tests.support.published_drafters import (
    assistant,
    block_drafter,
    eagle3,
    few_words,
    let_all_layers_share,
    six_layers,
)
from tests.support.rankings import assert_as_in_turn
from tests.support.rehearsed import Rehearsed, Replayed, direct
from tests.sweep.models import tiny_model

READ = 500, 1, 3, 16, 2
"""Numbers of accepted tokens that runs read, past the end of the first memory."""


@dataclass(frozen=True)
class Made:
    """A module of a target, and what makes drafters of it."""

    target: Target
    module: DraftModule
    drafter: Callable[[], TrainedProposer]


def eagle(folder: Path, capture: CaptureMaker) -> Made:
    target = Target(six_layers("Llama"), capture)
    name = str(eagle3(folder, target.model))
    loaded, _ = load_eagle3(PublishedDrafter.named(name), target)
    return Made(target, EagleModule(loaded, target), lambda: published_drafter(name, target))


def mtp(folder: Path, capture: CaptureMaker) -> Made:
    target = Target(with_mtp("glm4_moe", folder), capture)
    target.watch_hidden()
    return Made(target, IteratedMtp(load_mtp(target.model), target), lambda: mtp_drafter(target))


def heads(name: str, folder: Path, capture: CaptureMaker) -> Made:
    target = Target(model_of("llama"), capture)
    target.watch_hidden()
    saved = random_for(target, SEQUENTIAL[name], size=0.1)
    assert isinstance(saved.heads, HydraHeads | MtpHeads)
    module = (
        HydraModule(saved.heads, target) if isinstance(saved.heads, HydraHeads) else TrainedMtp(saved.heads, target)
    )
    return Made(target, module, lambda: sequential_drafter(saved, target))


def small_model(folder: Path, capture: CaptureMaker) -> Made:
    target, draft = (Target(model_of("llama"), capture) for _ in range(2))

    def drafter() -> TrainedProposer:
        module = DraftModel(draft, target.vocabulary)
        return path_drafter(module, module.drafts_in_one_run, None, None)

    return Made(target, DraftModel(draft, target.vocabulary), drafter)


def gemma_assistant(folder: Path, capture: CaptureMaker) -> Made:
    target = Target(few_words(tiny_model("gemma4_text")), capture)
    name = str(assistant(folder, target.model))
    loaded = load_assistant(PublishedDrafter.named(name), target)
    return Made(target, AssistantModule(loaded, target), lambda: published_drafter(name, target))


Make = Callable[[Path, CaptureMaker], Made]
KINDS: dict[str, Make] = {"eagle3": eagle, "mtp": mtp, **{name: partial(heads, name) for name in SEQUENTIAL}}
DRAFTERS: dict[str, Make] = {**KINDS, "draft model": small_model, "assistant": gemma_assistant}
CAPTURES: dict[str, CaptureMaker] = {
    "eager": never,
    "rehearsed": lambda device: Rehearsed(),
    "replayed": lambda device: Replayed(),
    "fixed": direct,
}


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(2)
def test_one_run_ranks_what_passes_in_turn_do(kind: str, capture: CaptureMaker, tmp_path: Path) -> None:
    in_turn, in_one = KINDS[kind](tmp_path / "a", never).module, KINDS[kind](tmp_path / "b", capture).module
    assert isinstance(in_one, ReadingPasses)
    width = in_one._new_hidden.shape[-1]
    torch.manual_seed(0)
    for module in (in_turn, in_one):
        module.begin([1])
    for number, new in enumerate(READ):
        depth = min(DEPTHS[number % len(DEPTHS)], in_one.passes)
        hidden, tokens = torch.randn(new, width), torch.randint(97, (new,)).tolist()
        in_one.draft_within_reading(depth)
        ranked = in_one.start(hidden, tokens)()
        assert len(ranked[0]) == rankings_for(depth)
        assert_as_in_turn(in_turn, in_turn.read(hidden, tokens), Proposal.in_tree(*ranked))


def in_turn(folder: Path) -> ReadingPasses:
    target = Target(with_mtp("glm4_moe", folder, 2))
    target.watch_hidden()
    return MtpLayersInTurn(load_mtp(target.model), target)


def blocks(folder: Path, markov: str = "") -> ReadingPasses:
    target = Target(six_layers("Llama"))
    name = str(block_drafter(folder, target.model, markov=markov))
    target.watch_hidden([0, 2])
    return DFlashPasses(load_dflash(PublishedDrafter.named(name), target), target)


def parallel(folder: Path) -> ReadingPasses:
    target = Target(model_of("llama"))
    return HeadsState(random_for(target, HeadsConfig(rank=8)), target).reading


def paths(make: Make, folder: Path) -> ReadingPasses:
    module = make(folder, never).module
    assert isinstance(module, ReadingPasses)
    module.draft_within_reading(2)
    return module


MODULES: dict[str, Callable[[Path], ReadingPasses]] = {
    "layers in turn": in_turn, "dflash": blocks, "dspark": partial(blocks, markov="gated"), "heads": parallel,
    **{name: partial(paths, make) for name, make in KINDS.items()},
}  # fmt: skip


class CountedRankings(TorchDispatchMode):
    """Counts rankings of tokens; mixtures of experts rank, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.topk.default and args[1] == TOKENS_PER_RANKING
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.one_in(2)
def test_only_the_last_piece_of_a_prompt_drafts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier pieces rank nothing, and what is ranked after them is what is ranked after the whole prompt."""
    module = MODULES[kind](tmp_path)
    torch.manual_seed(0)
    hidden, tokens = torch.randn(100, module._new_hidden.shape[-1]), torch.randint(97, (100,)).tolist()
    ranked, counts = list[Ranked](), list[int]()
    for piece in (512, 16):
        monkeypatch.setattr(draft_passes, "READ_CHUNK", piece)
        module.begin([1])
        with CountedRankings() as rankings:
            ranked.append(module.start(hidden, tokens)())
        counts.append(rankings.number)
    assert counts[0] == counts[1] > 0
    np.testing.assert_allclose(ranked[1][1], ranked[0][1], rtol=2e-3, atol=1e-6)
    assert (ranked[1][0] == ranked[0][0]).mean() > 0.9


@pytest.fixture
def _layers_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    let_all_layers_share(monkeypatch)


@pytest.mark.usefixtures("_layers_may_share")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_are_one_run_where_passes_are_captured(kind: str, tmp_path: Path) -> None:
    in_turn = DRAFTERS[kind](tmp_path / "a", never).drafter()
    in_one = DRAFTERS[kind](tmp_path / "b", CAPTURES["rehearsed"]).drafter()
    assert isinstance(in_turn, SequentialDrafter) and isinstance(in_one, BlockDrafter)
    assert in_one.starts_before_learning


@pytest.mark.usefixtures("_layers_may_share")
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.one_in(4)
def test_drafts_change_no_token(kind: str, tmp_path: Path) -> None:
    """Alone or in a batch."""
    made = DRAFTERS[kind](tmp_path, CAPTURES["rehearsed"])
    target, trained = made.target, [made.drafter() for _ in range(3)]
    drafters = [StandaloneDrafter(each, FixedBudget(12)) for each in trained]
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8, seed=3)):
        for length in (250, 3):
            prompt = prompt_of(length)
            expected = answer_of(target, prompt, sampling, max_new_tokens=20)
            assert answer_of(target, prompt, sampling, max_new_tokens=20, drafter=drafters[0]) == expected
    assert_answers_of_batch(target, [prompt_of(length) for length in (4, 11, 7)], drafters, 2, 6)
    assert all(each.seconds > 0 for each in trained)


def test_steps_that_accept_more_draft_deeper(tmp_path: Path) -> None:
    module = mtp(tmp_path, never).module
    assert isinstance(module, IteratedMtp)
    run, depths = PathsInOneRun(module, Calibration(None, 8), None), list[int]()
    run.begin([1])
    for tokens in (*[40], *[1] * 30, *[4] * 30, *[9] * 30):
        run._start(torch.randn(tokens, module._new_hidden.shape[-1]), [5] * tokens)()
        depths.append(module.depth)
    assert depths[0] in DEPTHS  # a prompt says nothing about drafts
    assert depths[30] == DEPTHS[0] and depths[60] == depths[90] == DEPTHS[-1]
    assert sorted(depths[1:31], reverse=True) == depths[1:31] and sorted(depths[31:]) == depths[31:]
