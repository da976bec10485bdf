"""The capture of CUDA graphs without a GPU: what is called around it, in which order, and after a failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hdtool.runtime.caches.kv_cache import KVTensors
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines import captured_functions
from hdtool.runtime.engines.captured import static_steps
from hdtool.runtime.engines.captured_functions import Run
from hdtool.runtime.engines.cuda import cuda_graphs
from hdtool.runtime.engines.cuda.cuda_graphs import WARM_UPS, CudaGraphs
from hdtool.runtime.model.devices import use_planless_attention
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, answers_of, request
from tests.support.families import model_of
from tests.support.oracle import prompt_of
from tests.support.rehearsed import Direct, captured_of, direct

CPU = torch.device("cpu")


class FakeCuda:
    """The part of ``torch.cuda`` that records graphs, as a list of events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = "main"
        self.failures: list[Exception] = []
        """Errors with which the next captures end."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        streams = self

        class Stream:
            def __init__(self, device: torch.device) -> None: ...

            def wait_stream(self, other: object) -> None: ...

        class Main(Stream): ...

        self.main, side = Main(CPU), Stream

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, streams.current = streams.current, "side"
            yield
            streams.current = before

        class Graph:
            def replay(self) -> None:
                streams.events.append("replay")

        @contextmanager
        def graph(made: Graph, *, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
            streams.current = "side"
            streams.events.append(f"begin {capture_error_mode}{' in inference' * torch.is_inference_mode_enabled()}")
            yield
            if streams.failures:
                raise streams.failures.pop(0)
            streams.events.append("end")
            streams.current = "main"

        def set_stream(chosen: Stream) -> None:
            streams.current = "main" if chosen is streams.main else "side"

        @contextmanager
        def device(chosen: torch.device) -> Iterator[None]:
            yield

        for name, double in {
            "Stream": side,
            "current_stream": lambda: self.main,
            "stream": stream,
            "CUDAGraph": Graph,
            "graph": graph,
            "graph_pool_handle": object,
            "set_stream": set_stream,
            "device": device,
            "empty_cache": lambda: streams.events.append("empty the cache"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, double)
        monkeypatch.setattr(cuda_graphs, "clear_cublas_workspaces", lambda: self.events.append("clear"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_workspaces_of_the_warm_up_are_not_in_a_graph(cuda: FakeCuda) -> None:
    graphs = CudaGraphs(CPU)
    cuda.events.clear()
    replay = graphs.record(lambda: cuda.events.append("run"))
    assert cuda.events == [*["run"] * WARM_UPS, "clear", "begin thread_local", "run", "end", "clear"]
    replay()
    assert cuda.events[-1] == "replay"


def test_the_first_capture_is_outside_of_inference_mode(cuda: FakeCuda) -> None:
    with torch.inference_mode():
        graphs = CudaGraphs(CPU)
        assert "begin thread_local" in cuda.events
        graphs.record(lambda: None)
    assert cuda.events[-3:] == ["begin thread_local in inference", "end", "clear"]


def test_a_capture_that_fails_leaves_the_main_stream_current(cuda: FakeCuda) -> None:
    graphs = CudaGraphs(CPU)
    cuda.failures = [RuntimeError("the capture failed")] * 2
    with pytest.raises(RuntimeError, match="the capture failed"):
        graphs.record(lambda: None)
    assert cuda.current == "main" and cuda.events[-1] == "clear"


SHORT = torch.OutOfMemoryError("CUDA out of memory")


def ended_by(error: Exception) -> RuntimeError:
    """What torch raises at the end of a capture that another error has broken."""
    ended = RuntimeError("operation failed due to a previous error during capture")
    ended.__context__ = error
    return ended


@pytest.mark.parametrize("failure", [SHORT, ended_by(SHORT), RuntimeError("another thread was in the way")])
def test_a_capture_that_fails_once_is_tried_again(failure: Exception, cuda: FakeCuda) -> None:
    graphs = CudaGraphs(CPU)
    cuda.failures = [failure]
    cuda.events.clear()
    graphs.record(lambda: None)()
    assert cuda.events.count("begin thread_local") == 2 and "empty the cache" in cuda.events
    assert cuda.events[-1] == "replay"


@pytest.mark.parametrize("recovers", [True, False])
def test_what_does_not_fit_into_memory_runs_uncaptured(
    recovers: bool, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a second attempt if torch cannot capture after a failure, and with one note in all."""
    monkeypatch.setattr(cuda_graphs, "can_capture_after_failure", lambda: recovers)
    captured_functions.note_uncaptured.cache_clear()
    graphs = CudaGraphs(CPU)
    cuda.events.clear()
    for _ in range(2):
        cuda.failures = [SHORT, ended_by(SHORT)]

        def run() -> None:
            cuda.events.append("run")

        assert graphs.record(run) is run
    assert cuda.events.count("begin thread_local") == (4 if recovers else 1)
    assert capsys.readouterr().err.count("not enough GPU memory") == 1


class Memory(Direct):
    """Recorder that is short of memory the next ``failures`` times."""

    def __init__(self) -> None:
        self.failures, self.recorded = 0, 0

    def record(self, run: Run) -> Run:
        self.failures -= 1
        if self.failures >= 0:
            raise SHORT
        self.recorded += 1
        return lambda: run()


def test_a_step_that_does_not_fit_gives_up_its_shape_and_is_captured_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(captured_functions, "RETRY_AFTER", 4)
    captured_functions.note_uncaptured.cache_clear()
    memory = Memory()
    target, prompts = Target(model_of("llama"), lambda device: memory), [prompt_of(length) for length in (9, 20, 30)]
    captured = list(captured_of(target)._passes)
    expected = [answer_of(target, prompt, SamplingConfig(), 12) for prompt in prompts]
    memory.failures, memory.recorded = 2, 0
    assert answered_together(target, prompts) == expected
    assert memory.recorded == 1, "at the third attempt, within these 11 steps"
    assert target.captures and captured_of(target)._passes == captured
    assert capsys.readouterr().err.count("not enough GPU memory") == 1


@pytest.mark.parametrize("place", ["buffers", "a move of accepted positions"])
def test_other_work_before_a_step_may_lack_memory_too(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without buffers, another pass computes the step; after half a move, none can."""
    target = Target(model_of("llama"), direct)
    captured, cache = list(captured_of(target)._passes), target.allocate(1, 64)
    target.prefill(cache, 0, prompt_of(9))
    tree = DraftTree.of(1, [2, 3], [-1, -1])
    expected = target.verify(cache, [tree])[0].logits.clone()

    def fail(*_: object) -> None:
        raise SHORT

    if place == "buffers":
        captured_of(target).forget()
        monkeypatch.setattr(static_steps, "_Buffers", fail)
        assert torch.allclose(target.verify(cache, [tree])[0].logits, expected, atol=1e-4)
    else:
        target.commit(cache, 0, [1])
        captured_of(target).forget()
        monkeypatch.setattr(KVTensors, "move", fail)
        with pytest.raises(torch.OutOfMemoryError):
            target.verify(cache, [tree])
    assert target.captures and captured_of(target)._passes == captured


class Broken(Direct):
    """Recorder that cannot record its first function."""

    is_broken = True

    def record(self, run: Run) -> Run:
        is_broken, self.is_broken = self.is_broken, False
        if is_broken:
            raise RuntimeError("no such kernel")
        return run


def test_a_note_says_that_the_fused_pass_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(model_of("llama"), lambda device: Broken())
    assert target.captures and not target.is_fused
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "hdtool's own pass is not used" in said and "no such kernel" in said


def answered_together(target: Target, prompts: Sequence[list[int]]) -> list[list[int]]:
    found = answers_of(target, map(request, range(len(prompts)), prompts), len(prompts), 12)
    return [found[place] for place in range(len(prompts))]


@pytest.mark.parametrize(("device", "changed"), [("cpu", []), ("cuda", [False])])
def test_attention_of_cudnn_is_off_on_cuda_only(
    device: str, changed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", found.append)
    use_planless_attention(torch.device(device))
    assert found == changed
