"""Captured steps without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hdtool.runtime.engines.captured.captured_passes import CapturedPasses
from hdtool.runtime.engines.captured_functions import Run
from hdtool.runtime.target.target import Target


class Direct:
    """Recorder that returns the function itself, so that it runs on any device."""

    def record(self, run: Run) -> Run:
        return run


def direct(device: torch.device) -> Direct:
    return Direct()


def captured_of(target: Target) -> CapturedPasses:
    """Return the captured passes of a target that was asked to capture its steps."""
    assert target.captured
    return target.captured


class Rehearsed(Direct):
    """Recorder that also runs the function while recording it, as CUDA graphs do, and counts the recordings."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, run: Run) -> Run:
        self.recorded += 1
        for _ in range(3):
            run()
        return run


class Replayed(Direct):
    """Recorder that repeats recorded operations on the same memory, as CUDA graphs do, even if the model changes."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, run: Run) -> Run:
        self.recorded += 1
        tape = Tape()
        run()
        with tape:
            run()
        return tape.repeat


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, found))
        return found

    @torch.inference_mode()
    def repeat(self) -> None:
        for func, args, kwargs, found in self._operations:
            made = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue
            for old, new in zip(tree_leaves(found), tree_leaves(made), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # equal addresses mean a view
                    old.copy_(new)
