"""The speculator of vLLM's Model Runner V2, on states as V2 keeps them, and the plug-in that has V2 build it."""

from __future__ import annotations

import logging
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hdtool.data.errors import OptionError
from hdtool.runtime.config.measuring import VllmConfig
from hdtool.runtime.integrations.vllm import plugin
from hdtool.runtime.integrations.vllm.speculator import HierarchySpeculator, open_drafter, without_min_prob
from tests.support.vllm_batch import worker_config

SLOTS, MAX_MODEL_LENGTH, DRAFT_TOKENS = 4, 256, 4
SAID = [11, 12, 13, 14, 15, 16, 17, 18]
NO_STORES = {"hdtool": {"model_db": "none", "corpus_db": "none", "history": "none"}}


class Runner:
    """What a V2 runner keeps and passes: requests have slots, and batches name slots in any order."""

    def __init__(self) -> None:
        tokens, lengths = (
            torch.zeros((SLOTS, MAX_MODEL_LENGTH), dtype=torch.int32),
            torch.zeros(SLOTS, dtype=torch.int32),
        )
        self.copied: list[int] = []
        self._states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=tokens), total_len=SimpleNamespace(gpu=lengths)
        )
        self.speculator = HierarchySpeculator(worker_config(NO_STORES), torch.device("cpu"), self._states)
        self._put = self.speculator._slots.put
        self.speculator._slots.put = self._note  # type: ignore[method-assign]

    def _note(self, slot: int, request: str, tokens: npt.NDArray[np.int32]) -> None:
        self.copied.append(slot)
        self._put(slot, request, tokens)

    def write(self, slot: int, tokens: list[int]) -> None:
        self._states.all_token_ids.gpu[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self._states.total_len.gpu[slot] = len(tokens)

    def propose(self, batch: list[tuple[str, int, int]], **options: Any) -> list[list[int]]:
        """The drafts for requests, each with its slot and the number of tokens that were sampled."""
        slots = np.array([slot for _, slot, _ in batch], np.int32)
        described = SimpleNamespace(
            num_reqs=len(batch),
            req_ids=[name for name, _, _ in batch],
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
        )
        sampled: Any = torch.tensor([count for _, _, count in batch], dtype=torch.int32)
        unused: Any = None
        drafts = self.speculator.propose(described, unused, unused, unused, unused, sampled, *[unused] * 5, **options)
        assert drafts.dtype == torch.int64 and drafts.shape == (len(batch), DRAFT_TOKENS)
        return drafts.tolist()


def test_rows_are_drafted_for_from_their_own_slots_and_short_drafts_are_filled_up() -> None:
    runner = Runner()
    again, new = SAID * 2 + SAID[:3], [1, 2, 3]
    runner.write(2, again)
    runner.write(0, new)
    assert runner.propose([("again", 2, 1), ("new", 0, 1)]) == [SAID[3:7], [3] * DRAFT_TOKENS]


def test_requests_grow_change_slots_and_are_drafted_for_as_in_v1() -> None:
    """A hundred steps of requests that come and go, against the same drafter with V1's tokens on the host."""
    chance, runner, v1 = random.Random(7), Runner(), open_drafter(worker_config(NO_STORES), without_min_prob)
    states = runner._states
    running: dict[str, tuple[int, list[int]]] = {}
    drafted: set[str] = set()
    right = 0
    for step in range(100):
        free = [slot for slot in range(SLOTS) if slot not in {slot for slot, _ in running.values()}]
        if free and chance.random() < 0.4:
            start = chance.randrange(8)
            running[f"request {step}"] = chance.choice(free), (SAID * 3)[start : start + chance.randrange(4, 14)]
        if running and chance.random() < 0.15:
            del running[chance.choice(list(running))]
        batch = []
        counts = [range(0)] * SLOTS
        for name, (slot, tokens) in chance.sample(list(running.items()), len(running)):
            counts[slot] = range(chance.randrange(1, DRAFT_TOKENS + 2))
            for _ in counts[slot]:
                tokens.append(SAID[(SAID.index(tokens[-1]) + 1) % len(SAID)] if chance.random() < 0.9 else SAID[0])
            runner.write(slot, tokens)
            batch.append((name, slot, len(counts[slot])))
        if batch:
            expected = v1.draft(counts, states.total_len.gpu.numpy(), states.all_token_ids.gpu.numpy())
            for (name, slot, _), draft in zip(batch, runner.propose(batch), strict=True):
                last = running[name][1][-1]
                assert draft == (expected[slot] + [last] * DRAFT_TOKENS)[:DRAFT_TOKENS]
                right += len(expected[slot])
            drafted |= {name for name, _, _ in batch}
    assert right > 200
    assert len(runner.copied) == len(drafted) > 10, "a context is copied whole when its request begins, and only then"


def test_another_request_in_a_slot_does_not_inherit_its_tokens() -> None:
    runner = Runner()
    runner.write(1, SAID * 2)
    assert runner.propose([("first", 1, 1)]) == [SAID[:4]]
    runner.write(1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8])
    assert runner.propose([("second", 1, 1)]) == [[9, 1, 2, 3]]
    assert runner.copied == [1, 1]


def test_prompts_in_pieces_get_no_drafts() -> None:
    runner = Runner()
    runner.write(3, SAID * 2)
    assert runner.propose([("reads its prompt", 3, 0)]) == [[SAID[-1]] * DRAFT_TOKENS]


def test_a_dummy_run_touches_nothing() -> None:
    runner = Runner()
    assert runner.propose([("", 0, 1)], dummy_run=True) == [[0] * DRAFT_TOKENS]
    assert runner.copied == []


def test_v2_sends_each_probable_draft_unless_a_minimum_is_given() -> None:
    assert without_min_prob(VllmConfig(DRAFT_TOKENS)).min_draft_prob == pytest.approx(0.02)
    assert without_min_prob(VllmConfig(DRAFT_TOKENS, 0.5)).min_draft_prob == 0.5


def test_split_prompts_are_refused() -> None:
    config = worker_config(NO_STORES, prefill_context_parallel_size=2)
    with pytest.raises(OptionError, match="--prefill-context-parallel-size"):
        HierarchySpeculator(config, torch.device("cpu"), None)


def configured(method: str, model: str) -> Any:
    return SimpleNamespace(speculative_config=SimpleNamespace(method=method, model=model))


OURS, THEIRS = (
    configured(plugin.CUSTOM_CLASS_METHOD, plugin.PROPOSER),
    configured(plugin.CUSTOM_CLASS_METHOD, "their.Drafter"),
)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules of vLLM that the plug-in imports, with what it wraps in them."""

    class Config:
        def _get_v2_model_runner_unsupported_features(self) -> list[str]:
            return [plugin.REFUSED_FEATURE, "dual batch overlap"]

    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_USE_V2_MODEL_RUNNER": True},
        "vllm.config": {},
        "vllm.config.vllm": {"VllmConfig": Config},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu": {},
        "vllm.v1.worker.gpu.spec_decode": {"init_speculator": lambda *arguments: "theirs"},
    }
    made = {name: ModuleType(name) for name in modules}
    for name, content in modules.items():
        vars(made[name]).update(content)
        monkeypatch.setitem(sys.modules, name, made[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, made[name])
    return {name: made[name] for name in modules}


def test_the_plugin_changes_nothing_unless_v2_is_requested(vllm: dict[str, Any]) -> None:
    config, factories = vllm["vllm.config.vllm"].VllmConfig, vllm["vllm.v1.worker.gpu.spec_decode"]
    before = config._get_v2_model_runner_unsupported_features, factories.init_speculator
    for value in (None, False):
        vllm["vllm.envs"].VLLM_USE_V2_MODEL_RUNNER = value
        plugin.register()
    assert before == (config._get_v2_model_runner_unsupported_features, factories.init_speculator)


def test_the_plugin_admits_our_drafter_alone(vllm: dict[str, Any]) -> None:
    plugin.register()
    plugin.register()
    unsupported = vllm["vllm.config.vllm"].VllmConfig._get_v2_model_runner_unsupported_features
    build = vllm["vllm.v1.worker.gpu.spec_decode"].init_speculator
    assert unsupported(OURS) == ["dual batch overlap"]
    assert unsupported(THEIRS) == [plugin.REFUSED_FEATURE, "dual batch overlap"]
    assert build(THEIRS, None, None) == "theirs"
    assert isinstance(build(worker_config(NO_STORES), torch.device("cpu"), None), HierarchySpeculator)


def test_a_vllm_without_these_functions_is_named(vllm: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    del vllm["vllm.v1.worker.gpu.spec_decode"].init_speculator
    with caplog.at_level(logging.ERROR, "vllm.hdtool"):
        plugin.register()
    (said,) = caplog.messages
    assert "init_speculator" in said and "unset VLLM_USE_V2_MODEL_RUNNER" in said
