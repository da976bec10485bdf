"""Faults that are put into hdtool's device code on purpose, which the simulated device must detect.

Only this file knows names inside the captured steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdtool.runtime.caches import kv_cache
from hdtool.runtime.engines.captured import static_steps
from hdtool.runtime.engines.captured.device_clock import DeviceClock
from hdtool.runtime.engines.captured.static_steps import StaticSteps, Steps
from hdtool.runtime.model.pass_inputs import AttentionMasks, StepInput

Undo = Callable[[], None]


def replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Undo:
    """Replace an attribute by ``made(attribute)``. Returns a function that restores it."""
    usual = vars(owner)[name] if isinstance(owner, type) and name in vars(owner) else getattr(owner, name)
    setattr(owner, name, made(usual))
    return lambda: setattr(owner, name, usual)


def nothing() -> Undo:
    return lambda: None


def no_wait_for_a_step() -> Undo:
    return replaced(DeviceClock, "seconds", lambda usual: lambda clock: 1e-3)


def input_reused_before_its_copy() -> Undo:
    def reusing(usual: Any) -> Any:
        def send(step_input: Any, *args: Any) -> None:
            usual(step_input, *args)
            step_input._buffer.host.zero_()

        return send

    return replaced(StepInput, "send", reusing)


def tensor_of_a_list_in_a_capture() -> Undo:
    def before(mask: Any) -> None:
        torch.tensor([1], device=mask.device)

    return with_each_mask(before)


def number_read_in_a_capture() -> Undo:
    def before(mask: Any) -> None:
        int(mask.flatten()[0])

    return with_each_mask(before)


def with_each_mask(act: Callable[[torch.Tensor], None]) -> Undo:
    def acting(usual: Any) -> Any:
        def on_device(masks: Any, ancestor_mask: torch.Tensor, *args: Any) -> Any:
            act(ancestor_mask)
            return usual(masks, ancestor_mask, *args)

        return on_device

    return replaced(AttentionMasks, "on_device", acting)


def logits_left_in_the_pool() -> Undo:
    def leaving(usual: Any) -> Any:
        def write(buffers: Any, *args: Any) -> None:
            usual(buffers, *args)
            if torch.cuda.is_current_stream_capturing():
                buffers._logits = buffers._logits.clone()

        return write

    return replaced(static_steps._Buffers, "write", leaving)


def steps_kept_over_new_memory() -> Undo:
    def keeping(usual: Any) -> Any:
        kept: list[Steps] = []

        def prepared(steps: Any, cache: Any, *args: Any) -> Any:
            kept[:] = kept or [Steps(steps._capture)]
            steps._steps.setdefault(cache.storage, kept[0])
            return usual(steps, cache, *args)

        return prepared

    return replaced(StaticSteps, "prepared", keeping)


def indices_on_the_host() -> Undo:
    def sending(usual: Any) -> Any:
        def tensors(*args: Any) -> Any:
            found = usual(*args)
            return found._replace(moved_from=found.moved_from.cpu())

        return tensors

    return replaced(StepInput, "tensors", sending)


def blocking_copies() -> Undo:
    def blocking(usual: Any) -> Any:
        return lambda target, source, non_blocking=False: usual(target, source)

    return replaced(torch.Tensor, "copy_", blocking)


def moves_forgotten() -> Undo:
    return replaced(kv_cache, "must_move", lambda usual: lambda path: False)


MUTATIONS: dict[str, Callable[[], Undo]] = {
    mutation.__name__.replace("_", " "): mutation
    for mutation in (
        nothing,
        no_wait_for_a_step,
        input_reused_before_its_copy,
        tensor_of_a_list_in_a_capture,
        number_read_in_a_capture,
        logits_left_in_the_pool,
        steps_kept_over_new_memory,
        indices_on_the_host,
        blocking_copies,
        moves_forgotten,
    )
}
