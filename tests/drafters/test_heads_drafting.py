"""Drafting by heads: no token changes, and the heads' memory is that of what was accepted alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hdtool.cli.app import run as hdtool
from hdtool.data.errors import HeadsError
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.measure_passes import MEASURED_NODES
from hdtool.runtime.budget.node_budget import Budget, FixedBudget, MeasuredBudget
from hdtool.runtime.budget.pass_costs import MeasuredCosts
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine_interface import TopTokens
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.drafters.heads.checkpoint import SavedHeads
from hdtool.runtime.drafters.heads.head_rankings import HeadsState
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.hierarchy.tree_growth import feed, grow
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter, StaticTree
from hdtool.runtime.drafters.trained.proposal import Proposal
from hdtool.runtime.drafters.trained_drafter_factory import drafter_of
from hdtool.runtime.engines import captured_functions
from hdtool.runtime.engines.captured.ranking_passes import RankingPasses
from hdtool.runtime.engines.captured_functions import CaptureMaker, Run, never
from hdtool.runtime.settings.building import HeadsConfig
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, answer_of, assert_answers_of_batch, output_tokens, run
from tests.support.families import FAMILIES, model_of
from tests.support.heads import SEQUENTIAL, VARIANTS, random_for, reference_logits
from tests.support.one_sequence import OneSequence
from tests.support.oracle import prompt_of
from tests.support.rehearsed import Rehearsed, direct


class Checked(StandaloneDrafter):
    """Compares all that the heads say with what the slow reference makes of the whole conversation."""

    def __init__(self, saved: SavedHeads, target: Target, budget: Budget) -> None:
        self.looked = 0
        self.heads = HeadsState(saved, target)
        super().__init__(self.heads, budget)
        self._model = target.model
        self.reference: OneSequence | None = None

    def draft(self, context):  # type: ignore[no-untyped-def]
        tree = super().draft(context)
        if not self.reference:
            self.reference = OneSequence(Target(self._model))
            self.reference.target.watch_hidden()
        self.reference.prefill(context[:-1])
        assert self.reference.verified.hidden is not None
        embedded = self._model.get_input_embeddings()(torch.tensor(context[1:])).detach()
        expected = reference_logits(self.heads.heads, self.reference.verified.hidden, embedded, last=True)[-1]
        best = np.sort(expected, axis=1)[:, ::-1]
        ids = self.heads.heads.token_ids
        indices = {int(token): index for index, token in enumerate(ids)} if ids is not None else None
        for head, tokens in enumerate(self.heads.tokens):
            places = [indices[token] if indices else token for token in tokens.tolist()]
            np.testing.assert_allclose(expected[head][places], best[head, : len(tokens)], rtol=1e-3, atol=1e-3)
        assert self.heads.reading.length in (0, len(context) - 1)
        self.looked += 1
        return tree


@pytest.mark.parametrize("capture", [never, lambda device: Rehearsed()], ids=["as they come", "recorded"])
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.one_in(6)
def test_the_cache_of_heads_holds_accepted_tokens_only(config: HeadsConfig, capture: CaptureMaker) -> None:
    target = Target(model_of("llama"), capture)
    assert target.captures is (capture is not never)
    drafter = Checked(random_for(target, config, size=0.1), target, FixedBudget(40))
    for length in (10, 3):
        run(target, prompt_of(length), SamplingConfig(), max_new_tokens=12, drafter=drafter)
    assert drafter.looked > 9


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", ["greedy", "T 1, top-k 5, penalised"])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_do_not_change_the_output(family: str, sampling: str) -> None:
    """Alone and among other sources; parallel ones with a static tree, too."""
    target, chosen = Target(model_of(family)), SAMPLINGS[sampling]
    plain = {length: answer_of(target, prompt_of(length), chosen, 20) for length in (20, 7)}
    for config in (HeadsConfig(rank=8), *(SEQUENTIAL[name] for name in ("hydra", "hydra++", "mtp"))):
        saved = random_for(target, config)
        trained = drafter_of(saved, target)
        drafters: list[Drafter] = [
            StandaloneDrafter(trained, FixedBudget(40)),
            Hierarchy(budget=FixedBudget(40), trained=trained, last=True, recycled=True),
        ]
        if isinstance(trained, HeadsState):
            drafters.append(StandaloneDrafter(trained, FixedBudget(64), StaticTree(saved)))
        for drafter in drafters:
            steps = {length: run(target, prompt_of(length), chosen, 20, drafter=drafter) for length in plain}
            assert {length: output_tokens(one) for length, one in steps.items()} == plain
            taken = {source for one in steps[20] for source in one.tree.sources.tolist()}
            assert SourceId.HEADS in taken and drafter.seconds.get(SourceId.HEADS, 1) > 0
            assert isinstance(drafter, StandaloneDrafter) or SourceId.CONTEXT in taken


def test_the_accepted_are_counted_as_theirs() -> None:
    """Of a vocabulary of 97, forty nodes of the heads' best ten hold the truth now and then."""
    target = Target(model_of("llama"))
    drafter = StandaloneDrafter(HeadsState(random_for(target, HeadsConfig(rank=8)), target), FixedBudget(40))
    steps = [
        step for length in range(5, 12) for step in run(target, prompt_of(length), SamplingConfig(), drafter=drafter)
    ]
    taken = [source for step in steps for source in step.sources if source is not SourceId.NONE]
    assert len(taken) > 5 and set(taken) == {SourceId.HEADS}
    assert drafter.seconds[SourceId.HEADS] > 0


def test_several_conversations_in_one_pass_keep_their_own_states() -> None:
    target = Target(model_of("qwen2"))
    saved = random_for(target, HeadsConfig(rank=8), size=0.1)
    prompts = [prompt_of(length) for length in (4, 11, 7)]
    drafters = [Checked(saved, target, FixedBudget(12)) for _ in prompts]
    assert_answers_of_batch(target, prompts, drafters, 2, 8)
    assert all(drafter.looked > 0 for drafter in drafters)


def test_steps_of_fixed_shape_show_their_hidden_states() -> None:
    """As on a GPU, where each step writes over what the last one left."""
    model = model_of("llama")
    target = Target(model, direct)
    assert target.captures
    drafter = Checked(random_for(target, HeadsConfig(rank=8), size=0.1), target, FixedBudget(12))
    for length in (9, 16):
        plain = answer_of(Target(model), prompt_of(length), max_new_tokens=12)
        assert answer_of(target, prompt_of(length), max_new_tokens=12, drafter=drafter) == plain
    assert target.captures and drafter.looked > 9


class Unlearning(MeasuredCosts):
    def update(self) -> None:
        pass


class Priced(MeasuredBudget):
    """Every pass of the target costs a second, and every draft ten."""

    def __init__(self, target: Target) -> None:
        super().__init__(
            target.log, Unlearning(target.log, CostCurve(MEASURED_NODES, ((1e3,) * len(MEASURED_NODES),), (0,)))
        )

    def set_draft_seconds(self, seconds: float) -> None:
        super().set_draft_seconds(10.0)


def test_heads_that_do_not_pay_rarely_run(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, propose = list[int](), HeadsState.propose

    def counted(drafter: HeadsState, max_nodes: int) -> Proposal:
        passes.append(max_nodes)
        return propose(drafter, max_nodes)

    monkeypatch.setattr(HeadsState, "propose", counted)
    target = Target(model_of("llama"))
    drafter = StandaloneDrafter(HeadsState(random_for(target, HeadsConfig(rank=8)), target), Priced(target))
    prompt = prompt_of(20)
    steps = run(target, prompt, SamplingConfig(), max_new_tokens=400, drafter=drafter)
    assert output_tokens(steps) == answer_of(target, prompt, SamplingConfig(), max_new_tokens=400)
    assert 0 < len(passes) < 20


def test_a_draft_after_a_pause_reads_all_tokens_of_the_pause() -> None:
    target = Target(model_of("llama"))
    budget = FixedBudget(0)
    drafter = Checked(random_for(target, HeadsConfig(rank=8), size=0.1), target, FixedBudget(8))
    prompt = prompt_of(20)
    resting = iter([False] * 9 + [True] + [False] * 5 + [True] * 30)
    draft = drafter.draft
    woken: list[int] = []

    def sometimes(context: Sequence[int]) -> DraftTree:
        if next(resting):
            woken.append(len(context))
            return draft(context)  # type: ignore[no-any-return, no-untyped-call]
        drafter.budget = budget
        tree = StandaloneDrafter.draft(drafter, context)
        drafter.budget = FixedBudget(8)
        return tree

    drafter.draft = sometimes  # type: ignore[method-assign]
    steps = run(target, prompt, SamplingConfig(), max_new_tokens=30, drafter=drafter)
    assert output_tokens(steps) == answer_of(target, prompt, SamplingConfig(), max_new_tokens=30)
    assert len(woken) > 2


def test_methods_take_the_heads_of_their_kind(tmp_path: Path) -> None:
    target = Target(model_of("llama"))
    folders = {name: tmp_path / name for name in ("amphista", "medusa")}
    for name, folder in folders.items():
        random_for(target, VARIANTS[name]).save(folder)
    both = tuple(map(str, folders.values()))
    for name in folders:
        drafter = drafter_for(DecodeConfig(name, draft_tokens=8, heads=both), target, StoreSet())
        assert isinstance(drafter, StandaloneDrafter) and isinstance(drafter.trained, HeadsState)
        config = drafter.trained.heads.config
        assert (config == config.plain) == (name == "medusa")
    with pytest.raises(HeadsError, match=r"medusa heads \(found: amphista heads in "):
        drafter_for(DecodeConfig("medusa", draft_tokens=8, heads=both[:1]), target, StoreSet())
    with pytest.raises(HeadsError, match="none are given: train some with hdtool train-heads --kind medusa"):
        drafter_for(DecodeConfig("medusa", draft_tokens=8), target, StoreSet())


def test_the_command_line_names_faults_of_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hdtool(["generate", "--prompt", "x", "--method", "medusa", "--heads", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "holds no heads" in error and error.count("\n") == 1
    assert hdtool(["generate", "--prompt", "x", "--method", "amphista", "--tree", "oak"]) == 2
    assert "--tree must be one of dynamic, static, got oak" in capsys.readouterr().err


def test_heads_observe_an_answer_of_one_token() -> None:
    target = Target(model_of("llama"))
    drafter = StandaloneDrafter(HeadsState(random_for(target, HeadsConfig(rank=8)), target), FixedBudget(8))
    prompt = prompt_of(6)
    for most in (1, 2):
        steps = list(decode(target, prompt, Sampler(SamplingConfig(), prompt), max_new_tokens=most, drafter=drafter))
        assert len(output_tokens(steps)) == most
    one = OneSequence(target)
    one.prefill(prompt)
    drafter.begin(prompt)
    drafter.observe(Accepted([], [5]), one.verified)
    assert len(drafter.draft([*prompt, 5])) > 0


def heads_alone() -> tuple[Hierarchy, HeadsState, list[int]]:
    """A hierarchy that has nothing but heads, about to draft."""
    target = Target(model_of("llama"))
    session = HeadsState(random_for(target, HeadsConfig(rank=8)), target)
    drafter = Hierarchy(context=False, budget=FixedBudget(30), trained=session)
    prompt = prompt_of(12)
    one = OneSequence(target)
    one.prefill(prompt)
    drafter.begin(prompt)
    drafter.observe(Accepted([], [5]), one.verified)
    return drafter, session, [*prompt, 5]


def test_a_heads_evidence_enters_the_estimate_at_its_depth() -> None:
    """With nothing else known, a node has its head's tokens as children, as likely as the head and its weight say."""
    drafter, session, context = heads_alone()
    tree = drafter.draft(context)
    assert len(tree) == 30 and set(tree.sources.tolist()) == {SourceId.HEADS}
    for node, parent in enumerate(tree.parents.tolist()):
        head = int(tree.depths[node + 1]) - 1
        (rank,) = np.flatnonzero(session.tokens[head] == tree.tokens[node])
        sure = min(7, int(8 * session.probs[head, 0]))
        weight = drafter.weights(SourceId.HEADS)[head, 3 * sure]
        above = drafter.probs[parent] if parent >= 0 else 1.0
        assert drafter.probs[node] == pytest.approx(above * weight * session.probs[head, rank], rel=1e-3)


@pytest.mark.long
def test_after_a_token_the_next_head_drafts_after_the_root() -> None:
    drafter, session, context = heads_alone()
    drafter.draft(context)
    memory = drafter._proposed
    for ahead in range(5):
        assert memory["root"][0] == (ahead if ahead < 4 else -1)
        tokens = set(session.tokens[ahead].tolist()) if ahead < 4 else set()
        grown = grow(drafter.address, 30)
        tree = drafter._tokens[:grown][drafter._parents[:grown] == ROOT]
        assert set(tree.tolist()) <= tokens and bool(grown) == bool(tokens)
        feed(drafter.address, np.array([7]))


def test_passes_that_lacked_memory_are_captured_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some passes, as steps of the target are."""
    monkeypatch.setattr(captured_functions, "RETRY_AFTER", 3)
    attempts = list[int]()
    runs = list[int]()

    class ShortAtFirst:
        def record(self, run: Run) -> Run:
            attempts.append(len(runs))
            return run if len(attempts) == 1 else lambda: run()

    def rank(words: torch.Tensor) -> TopTokens:
        runs.append(len(words))
        return words[None], words[None].float()

    passes = RankingPasses(ShortAtFirst(), torch.device("cpu"), 1, 10)
    for number in range(9):
        tokens, _ = passes.run(("read", 1, 0), [number, 7], 1, rank)
        assert tokens.tolist() == [[number, 7]]
    assert attempts == [0, 3]


def test_passes_are_captured_again_after_a_change_of_the_model() -> None:
    """The old ones would read the memory of weights that were replaced."""
    captured, changes = list[Run](), [0]

    class Direct:
        def record(self, run: Run) -> Run:
            captured.append(run)
            return lambda: run()

    passes = RankingPasses(Direct(), torch.device("cpu"), 1, 10, lambda: changes[0])
    for changes[0] in (0, 0, 1, 1):
        passes.run(("read", 1, 0), [5, 7], 1, lambda words: (words[None], words[None].float()))
    assert len(captured) == 2


def test_passes_that_cannot_be_captured_run_without() -> None:
    class Refusing:
        def record(self, run: Run) -> Run:
            raise RuntimeError("operation not permitted when stream is capturing")

    passes = RankingPasses(Refusing(), torch.device("cpu"), 1, 10)
    for _ in range(2):
        tokens, probs = passes.run(
            ("read", 1, 0), [5, 7], 1, lambda words: (words.view(2, 1), words.view(2, 1).float())
        )
        assert tokens.tolist() == [[5]] and probs.tolist() == [[5.0]]
    assert not passes.captures(1)
