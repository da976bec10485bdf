"""Computes mixers over draft trees: short convolutions, and recurrences with the steps before and after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hdtool.runtime.engines.reference.mixer_operations import DeltaInputs, MixerOperations
from hdtool.runtime.engines.reference.tree_recurrences import MixerStates
from hdtool.runtime.program.mixer_parts import DELTA_ATTENTION, DELTA_RULE, MAMBA2, SHORT_CONVOLUTION, MixerParts

REFERENCE = MixerOperations()


def mix(
    parts: MixerParts[Any], hidden: torch.Tensor, states: MixerStates, operations: MixerOperations = REFERENCE
) -> torch.Tensor:
    """Return a mixer's output for ``hidden``, ``[slots, rows, width]``; ``states`` keeps what the rows change."""
    mixed: torch.Tensor = parts.out(MIXERS[parts.kind](parts, hidden, states, operations))
    return mixed


def _short_convolution(
    parts: MixerParts[Any], hidden: torch.Tensor, states: MixerStates, operations: MixerOperations
) -> torch.Tensor:
    before, after, inputs = parts.inputs[0](hidden).chunk(3, dim=-1)
    convolved = operations.convolve(parts, before * inputs, states, activates=False)
    mixed: torch.Tensor = after * convolved
    return mixed


def _delta_rule(
    parts: MixerParts[Any], hidden: torch.Tensor, states: MixerStates, operations: MixerOperations
) -> torch.Tensor:
    inputs = _delta_attention_inputs(parts, hidden) if parts.decay else _delta_rule_inputs(parts, hidden)
    convolved = operations.convolve(parts, inputs.joined, states, activates=True)
    output = operations.delta_rule(parts, convolved, inputs, states)
    return operations.gated_norm(parts, output, inputs.gate)


def _delta_rule_inputs(parts: MixerParts[Any], hidden: torch.Tensor) -> DeltaInputs:
    projected = [matmul(hidden) for matmul in parts.inputs]
    if len(projected) == 2:
        joined, gate, strength, step = _split_by_heads(parts, *projected)
    else:
        joined, gate, strength, step, *separate = projected
        joined = torch.cat([joined, *separate], -1) if separate else joined
    return DeltaInputs(joined, gate, strength, step)


def _split_by_heads(
    parts: MixerParts[Any], wide: torch.Tensor, narrow: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Regroup columns by kind instead of by key head; return ``(joined, gate, strength, step)``."""
    values = parts.heads // parts.key_heads * parts.value_width
    sizes = [parts.key_width, parts.key_width, values, values]
    *joined, gate = wide.unflatten(-1, (parts.key_heads, -1)).split(sizes, -1)
    strength, step = narrow.unflatten(-1, (parts.key_heads, -1)).chunk(2, -1)
    return torch.cat([part.flatten(-2) for part in joined], -1), gate, strength.flatten(-2), step.flatten(-2)


def _delta_attention_inputs(parts: MixerParts[Any], hidden: torch.Tensor) -> DeltaInputs:
    *joined, strength = [matmul(hidden) for matmul in parts.inputs]
    gate = hidden
    for matmul in parts.gate:
        gate = matmul(gate)
    assert parts.decay
    return DeltaInputs(torch.cat(joined, -1), gate, strength, parts.decay(hidden))


def _mamba2(
    parts: MixerParts[Any], hidden: torch.Tensor, states: MixerStates, operations: MixerOperations
) -> torch.Tensor:
    projected = parts.inputs[0](hidden if parts.factor == 1 else hidden * parts.factor)
    projected = projected if parts.scales is None else projected * parts.scales
    gate, inputs, step = projected.split([parts.heads * parts.value_width, parts.channels, parts.heads], -1)
    convolved = operations.convolve(parts, inputs, states, activates=True)
    gated = operations.gated_norm(parts, operations.scan(parts, convolved, step, states), gate)
    return gated.to(hidden.dtype)


MIXERS: Mapping[str, Callable[[MixerParts[Any], torch.Tensor, MixerStates, MixerOperations], torch.Tensor]] = {
    SHORT_CONVOLUTION: _short_convolution,
    DELTA_RULE: _delta_rule,
    DELTA_ATTENTION: _delta_rule,
    MAMBA2: _mamba2,
}
"""Functions that compute what a mixer's output projection reads, by kind of mixer."""
