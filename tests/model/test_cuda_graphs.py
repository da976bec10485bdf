"""The capture of CUDA graphs without a GPU: what is called around it, in which order, and after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hdtool.runtime.model import static_steps
from hdtool.runtime.model.placement import use_planless_attention
from hdtool.runtime.model.static_steps import WARM_UPS, CudaGraphs

CPU = torch.device("cpu")


class FakeCuda:
    """The part of ``torch.cuda`` that records graphs, as a list of events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = "main"
        self.fails_at_end = False

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
            if streams.fails_at_end:
                raise RuntimeError("the capture failed")
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
        }.items():
            monkeypatch.setattr(torch.cuda, name, double)
        monkeypatch.setattr(static_steps, "clear_cublas_workspaces", lambda: self.events.append("clear"))


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
    cuda.fails_at_end = True
    with pytest.raises(RuntimeError, match="the capture failed"):
        graphs.record(lambda: None)
    assert cuda.current == "main" and cuda.events[-1] == "clear"


@pytest.mark.parametrize(("device", "changed"), [("cpu", []), ("cuda", [False])])
def test_attention_of_cudnn_is_off_on_cuda_only(
    device: str, changed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", found.append)
    use_planless_attention(torch.device(device))
    assert found == changed
