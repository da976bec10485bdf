"""hdtool in both model runners of vLLM, and what it relies on in vLLM's own classes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from hdtool.runtime.integrations.vllm import plugin
from hdtool.runtime.integrations.vllm.speculator import HierarchyProposer, HierarchySpeculator
from tests.vllm.engine import answer, drafting
from tests.vllm.requests import ENGINE, requests

ASKED = 6
CRAMPED = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "num_gpu_blocks_override": 20, "max_model_len": 512}


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM says without drafting, in its V1 runner."""
    plain = answer({"engine": ENGINE, "waves": [requests(ASKED)]}, tmp_path_factory.mktemp("plain"))
    assert plain["runner"] == "vllm.v1.worker.cpu_model_runner"
    ids: list[list[int]] = plain["ids"]
    return ids


def in_v2(folder: Path, **engine: Any) -> dict[str, Any]:
    found = answer({"engine": ENGINE | drafting() | engine, "v2": True, "waves": [requests(ASKED)]}, folder)
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
    return found


def test_v2_says_the_same_in_fewer_steps(greedy: list[list[int]], tmp_path: Path) -> None:
    """Asynchronously from vLLM 0.33 on."""
    found = in_v2(tmp_path)
    assert found["ids"] == greedy
    metrics = found["counted"][-1]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > metrics["vllm:spec_decode_num_drafts"] > 50


def test_v2_with_prompts_in_pieces_and_requests_that_wait(greedy: list[list[int]], tmp_path: Path) -> None:
    """Slots are given to other requests, and preempted requests come back."""
    found = in_v2(tmp_path, **CRAMPED)
    assert found["ids"] == greedy
    assert found["counted"][-1]["vllm:spec_decode_num_accepted_tokens"] > 50


def test_without_the_plugin_v2_is_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    with pytest.raises(AssertionError, match="Model Runner V2 does not yet support: speculative method"):
        in_v2(tmp_path)


def test_our_speculator_has_the_interface_of_vllms() -> None:
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    ours, theirs = (inspect.signature(found.propose).parameters for found in (HierarchySpeculator, BaseSpeculator))
    assert list(ours) == list(theirs)
    assert {name: each.default for name, each in ours.items()} == {name: each.default for name, each in theirs.items()}
    for name in BaseSpeculator.__abstractmethods__:
        assert callable(getattr(HierarchySpeculator, name))
    for name in ("num_query_per_req", "num_extra_query_per_req"):
        assert getattr(HierarchySpeculator, name) == getattr(BaseSpeculator, name)


def test_the_functions_that_the_plugin_wraps_are_as_it_expects() -> None:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.gpu import spec_decode

    factory = inspect.signature(getattr(spec_decode, plugin.FACTORY_FUNCTION))
    assert list(factory.parameters) == ["vllm_config", "device", "req_states"]
    check = inspect.signature(getattr(VllmConfig, plugin.CHECK_FUNCTION))
    assert list(check.parameters) == ["self"]


def test_our_proposer_takes_what_the_v1_runner_passes() -> None:
    from vllm.v1.worker import gpu_model_runner

    source = "".join(inspect.getsource(gpu_model_runner).split())
    assert (
        "propose(sampled_token_ids,self.input_batch.num_tokens_no_spec,self.input_batch.token_ids_cpu,"
        "slot_mappings=slot_mappings,)"
    ) in source
    parameters = list(inspect.signature(HierarchyProposer.propose).parameters)
    assert parameters == ["self", "sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu", "slot_mappings"]
