"""Heads that draft token by token: what they compute, by a slow reference; their folders; that no token changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hdtool.cli.app import run as hdtool
from hdtool.data.errors import HeadsError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate
from hdtool.runtime.core.engine_interface import Ranked
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.drafters.heads.checkpoint import EvalResult
from hdtool.runtime.drafters.heads.head_rankings import HeadsState, HydraModule, TrainedMtp, sequential_drafter
from hdtool.runtime.drafters.heads.modules import Heads, HydraHeads, MtpHeads
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter
from hdtool.runtime.drafters.trained.draft_module import DraftModule
from hdtool.runtime.drafters.trained.proposal import PROB_BUCKETS
from hdtool.runtime.drafters.trained.sequential_drafter import SequentialDrafter
from hdtool.runtime.drafters.trained_drafter_factory import methods_with_drafters, trained_drafter
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.settings.building import HeadsConfig
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, assert_answers_of_batch, run
from tests.support.families import VOCABULARY, model_of
from tests.support.heads import SEQUENTIAL, SHAPE, VARIANTS, random_for, random_kind, reference_logits_after
from tests.support.one_sequence import OneSequence
from tests.support.oracle import prompt_of
from tests.support.rehearsed import Rehearsed, Replayed

DEEPEST_COMPARED = 3
"""Longer paths take the slow reference too long."""

each_kind = pytest.mark.parametrize("config", SEQUENTIAL.values(), ids=SEQUENTIAL)


def random_with_output(config: HeadsConfig) -> Heads:
    heads = random_kind(config)
    if isinstance(heads, MtpHeads) and not config.draft_vocabulary:
        heads.share(torch.nn.Linear(SHAPE.width, SHAPE.vocabulary, bias=False).requires_grad_(False))
    return heads


def module_of(heads: Heads, target: Target) -> HydraModule | TrainedMtp:
    target.watch_hidden()
    if isinstance(heads, HydraHeads):
        return HydraModule(heads, target)
    assert isinstance(heads, MtpHeads)
    return TrainedMtp(heads, target)


@each_kind
def test_training_computes_what_the_slow_reference_does(config: HeadsConfig) -> None:
    """Each head, or step of the layer, after each start in the text."""
    heads, length = random_with_output(config), 9
    torch.manual_seed(1)
    hidden, tokens = torch.randn(2, length, SHAPE.width), torch.randn(2, length, SHAPE.embedding)
    rows, columns = (part.flatten() for part in torch.meshgrid(torch.arange(2), torch.arange(length), indexing="ij"))
    found = heads.logits(heads.along(hidden, tokens, rows, columns))
    for head in range(config.heads):
        for place, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            if column + head < length:
                seen = slice(column + 1)
                path = tokens[row, column + 1 : column + 1 + head]
                expected = reference_logits_after(heads, hidden[row, seen], tokens[row, seen], path)
                np.testing.assert_allclose(found[head, place].numpy(), expected, rtol=5e-4, atol=5e-4)


class Checked(DraftModule):
    """Compares all that a module says with what the slow reference makes of the whole conversation."""

    def __init__(self, module: HydraModule | TrainedMtp, heads: Heads, target: Target) -> None:
        self._module, self._heads, self.passes = module, heads, module.passes
        self._model, self.looked = target.model, 0
        self._reference = OneSequence(Target(target.model))
        self._reference.target.watch_hidden()

    def begin(self, prompt: list[int]) -> None:
        self._context = prompt[:1]
        self._module.begin(prompt)

    def skip(self, tokens: int) -> None:
        raise AssertionError("no answer here has a pause")

    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        self._context += tokens
        self._paths: list[list[int]] = [[]]
        self._reference.prefill(self._context[:-1])
        found = self._module.read(hidden, tokens)
        self._compare(found, self._paths)
        return found

    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        paths = [[*self._paths[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        self._paths += paths
        found = self._module.extend(parents, tokens)
        self._compare(found, paths)
        return found

    def _compare(self, found: Ranked, paths: list[list[int]]) -> None:
        hidden, embed = self._reference.verified.hidden, self._model.get_input_embeddings()
        assert hidden is not None and len(found[0]) == len(paths)
        ids = self._heads.token_ids
        indices = {int(token): index for index, token in enumerate(ids)} if ids is not None else None
        for tokens, probs, path in zip(*found, paths, strict=True):
            with torch.no_grad():
                read, ahead = (embed(torch.tensor(part, dtype=torch.int64)) for part in (self._context[1:], path))
            if len(path) > DEEPEST_COMPARED:
                continue
            logits = reference_logits_after(self._heads, hidden, read, ahead)
            expected = np.exp(logits - np.logaddexp.reduce(logits))
            places = [indices[token] if indices else token for token in tokens.tolist()]
            np.testing.assert_allclose(probs, expected[places], rtol=2e-3, atol=1e-5)
            np.testing.assert_allclose(probs, np.sort(expected)[::-1][: len(probs)], rtol=2e-3, atol=1e-5)
            self.looked += 1


@pytest.mark.parametrize("capture", [never, lambda device: Rehearsed()], ids=["as they come", "recorded"])
@each_kind
@pytest.mark.one_in(3)
def test_rankings_are_those_of_the_whole_conversation(config: HeadsConfig, capture: CaptureMaker) -> None:
    target = Target(model_of("llama"), capture)
    assert target.captures is (capture is not never)
    heads = random_for(target, config).heads
    checked = Checked(module_of(heads, target), heads, target)
    drafter = StandaloneDrafter(SequentialDrafter(checked, columns=target.watch_hidden()), FixedBudget(24))
    for length in (10, 3):
        prompt = prompt_of(length)
        assert answer_of(target, prompt, max_new_tokens=8, drafter=drafter) == answer_of(
            target, prompt, max_new_tokens=8
        )
    assert checked.looked > 60


@each_kind
def test_captured_passes_equal_others(config: HeadsConfig) -> None:
    """Past the end of the first memory, and over several answers."""
    model, recorders = model_of("llama"), list[Replayed]()

    def recorder(device: torch.device) -> Replayed:
        recorders.append(Replayed())
        return recorders[-1]

    targets = Target(model), Target(model, recorder)
    heads = random_for(targets[0], config, size=0.1).heads
    usual, captured = (module_of(heads, target) for target in targets)
    torch.manual_seed(2)
    passes = 0
    for sizes in ([500, 1, 3, 16], [2, 8, 1, 600, 5]):
        for module in (usual, captured):
            module.begin([1])
        for new in sizes:
            hidden, tokens = torch.randn(new, heads.shape.width), torch.randint(VOCABULARY, (new,)).tolist()
            with torch.inference_mode():
                equal(usual.read(hidden, tokens), captured.read(hidden, tokens))
                parents, first = [0], 0
                for rows in (1, 4, 3)[: usual.passes]:
                    drafted = torch.randint(VOCABULARY, (rows,)).tolist()
                    chosen = [parents[number % len(parents)] for number in range(rows)]
                    equal(usual.extend(chosen, drafted), captured.extend(chosen, drafted))
                    parents, first = list(range(first + 1, first + 1 + rows)), first + rows
                    passes += 1
                equal(usual.extend([0], [5]), captured.extend([0], [5]))  # padding has left the first row as it was
    assert 0 < sum(one.recorded for one in recorders) < passes


def equal(found: Ranked, expected: Ranked) -> None:
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-3, atol=1e-6)
    assert (found[0] == expected[0]).mean() > 0.9  # equals may stand in another order


@each_kind
@pytest.mark.one_in(2)
def test_several_conversations_in_one_pass_keep_their_own_states(config: HeadsConfig) -> None:
    target = Target(model_of("qwen2"))
    heads = random_for(target, config, size=0.1).heads
    prompts = [prompt_of(length) for length in (4, 11, 7)]
    checks = [Checked(module_of(heads, target), heads, target) for _ in prompts]
    drafters = [
        StandaloneDrafter(SequentialDrafter(check, columns=target.watch_hidden()), FixedBudget(12)) for check in checks
    ]
    assert_answers_of_batch(target, prompts, drafters, 2, 6)
    assert all(check.looked > 0 for check in checks)


def test_odds_of_the_evaluation_calibrate_the_first_draft() -> None:
    """Rankings deeper than the evaluation knows are calibrated like its last head."""
    target = Target(model_of("llama"))
    saved = random_for(target, SEQUENTIAL["mtp with a draft vocabulary"])
    odds = [[share] * PROB_BUCKETS for share in (0.09, 0.05, 0.02)]
    evaluation = EvalResult(odds=odds)
    for gate in (None, TrainedDrafterGate(target.log)):
        drafter = sequential_drafter(replace(saved, evaluation=evaluation), target, gate)
        run(
            target,
            prompt_of(8),
            SamplingConfig(),
            max_new_tokens=1,
            drafter=StandaloneDrafter(drafter, FixedBudget(20)),
        )
        proposal = drafter.propose(1000)
        assert gate or proposal.depths.max() > 3
        for depth, probs in zip(proposal.depths.tolist(), proposal.probs, strict=True):
            np.testing.assert_allclose(probs, (0.09, 0.05, 0.02)[min(depth, 2)], rtol=1e-6)


def test_methods_take_the_heads_of_their_kind(tmp_path: Path) -> None:
    target = Target(model_of("llama"))
    for name in ("hydra", "hydra++", "mtp"):
        random_for(target, SEQUENTIAL[name]).save(tmp_path / name)
    random_for(target, VARIANTS["medusa"]).save(tmp_path / "medusa")
    every = tuple(str(tmp_path / name) for name in ("medusa", "hydra++", "mtp"))
    for method, kind in (("hydra", "hydra++"), ("hd+hydra", "hydra++"), ("mtp", "mtp"), ("hd+mtp", "mtp")):
        config = DecodeConfig(method, draft_tokens=8, heads=every)
        trained = trained_drafter(config, target)
        assert isinstance(trained, SequentialDrafter)
        assert isinstance(trained.module, TrainedMtp if kind == "mtp" else HydraModule)
        assert drafter_for(config, target, StoreSet())
    assert isinstance(trained_drafter(DecodeConfig("medusa", heads=every), target), HeadsState)
    assert methods_with_drafters(DecodeConfig("hydra", heads=every), target.model) == {
        "medusa", "hydra", "hd+hydra", "mtp", "hd+mtp",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "heads", "told"),
    [
        ("hydra", True, r"method hydra needs hydra or hydra\+\+ heads \(found: medusa heads in "),
        ("hd+hydra", False, "method hd.hydra needs trained heads, .* hdtool train-heads --kind hydra and name"),
        ("mtp", False, "has no MTP layers: train one with hdtool train-heads --kind mtp and name its folder"),
        ("mtp", True, "has no MTP layers: train one with hdtool train-heads --kind mtp and name its folder"),
    ],
)
def test_a_method_without_its_heads_says_what_to_do(method: str, heads: bool, told: str, tmp_path: Path) -> None:
    target = Target(model_of("llama"))
    random_for(target, VARIANTS["medusa"]).save(tmp_path)
    config = DecodeConfig(method, draft_tokens=8, heads=(str(tmp_path),) if heads else ())
    with pytest.raises(HeadsError, match=told) as refusal:
        drafter_for(config, target, StoreSet())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--kind", "eagle"], "--kind must be one of amphista, medusa, hydra, hydra++, mtp, got eagle"),
        (["--kind", "hydra", "--medusa"], "--medusa has no effect with another --kind"),
        (["--kind", "hydra", "--adaptation", "1"], "--adaptation has no effect with --kind hydra"),
        (["--kind", "hydra", "--mlp", "8"], "--mlp has no effect with --kind hydra"),
        (["--kind", "hydra++", "--no-sampled-token"], "--sampled-token has no effect with --kind hydra++"),
        (["--kind", "mtp", "--lm-head-rank", "8"], "--lm-head-rank has no effect with --kind mtp"),
        (["--kind", "mtp", "--head-layers", "2"], "--head-layers has no effect with --kind mtp"),
        (["--kind", "medusa", "--positions"], "--positions has no effect with --kind medusa"),
        (["--head-layers", "2"], "--head-layers has no effect with --kind amphista"),
        (["--kind", "hydra", "--head-layers", "0"], "--head-layers must be 1 or more, got 0"),
        (["--kind", "mtp", "--num-heads", "9"], "--num-heads must be between 1 and 8, got 9"),
    ],
)
def test_options_that_a_kind_does_not_take_are_refused(options: list[str], told: str, capfd: object) -> None:
    assert hdtool(["train-heads", "--from", "nowhere", "--out", "nowhere", *options]) == 2
    assert told in capfd.readouterr().err  # type: ignore[attr-defined]


def test_the_static_tree_is_refused_for_them(capfd: object) -> None:
    assert hdtool(["generate", "--prompt", "x", "--method", "hydra", "--tree", "static"]) == 2
    assert "--tree has no effect with method hydra" in capfd.readouterr().err  # type: ignore[attr-defined]
