"""Computes mixers over draft trees: projections, a short convolution, a recurrence, a gated norm, a projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu, softplus

from hdtool.runtime.engines.reference.recurrences import MixerStates, delta_rule, scan
from hdtool.runtime.program.mixer_parts import DELTA_ATTENTION, DELTA_RULE, MAMBA2, SHORT_CONVOLUTION, MixerParts


def mix(parts: MixerParts[Any], hidden: torch.Tensor, states: MixerStates) -> torch.Tensor:
    """Return a mixer's output for ``hidden``, ``[slots, rows, width]``; ``states`` keeps what the rows change."""
    return MIXERS[parts.kind](parts, hidden, states)


def _short_convolution(parts: MixerParts[Any], hidden: torch.Tensor, states: MixerStates) -> torch.Tensor:
    before, after, inputs = parts.inputs[0](hidden).transpose(1, 2).chunk(3, dim=1)
    mixed = after * states.convolve(before * inputs, parts.convolution, activates=False)
    return _projected(parts, mixed.transpose(1, 2).contiguous())


class _DeltaInputs(NamedTuple):
    """Outputs of a gated delta rule's projections, each ``[slots, rows, columns]``."""

    joined: torch.Tensor
    """Queries, keys and values."""
    gate: torch.Tensor
    strength: torch.Tensor
    """Write strength of each head, before the sigmoid."""
    decay: torch.Tensor
    """Logarithm of the decay of each head, or of each head's key channels."""


def _delta_rule(parts: MixerParts[Any], hidden: torch.Tensor, states: MixerStates) -> torch.Tensor:
    inputs = _delta_attention_inputs(parts, hidden) if parts.decay else _delta_rule_inputs(parts, hidden)
    convolved = states.convolve(inputs.joined.transpose(1, 2), parts.convolution, activates=True).transpose(1, 2)
    keys, values = parts.key_heads * parts.key_width, parts.heads * parts.value_width
    query, key, value = convolved.split([keys, keys, values], -1)
    strength = inputs.strength.sigmoid()
    output = states.recur(
        delta_rule,
        query.unflatten(-1, (parts.key_heads, -1)),
        key.unflatten(-1, (parts.key_heads, -1)),
        value.unflatten(-1, (parts.heads, -1)),
        inputs.decay,
        strength if parts.strength == 1 else strength * parts.strength,
    )
    assert parts.norm
    normed = parts.norm(output.flatten(0, 2), inputs.gate.reshape(-1, parts.value_width))
    return _projected(parts, normed.view(*hidden.shape[:2], values))


def _delta_rule_inputs(parts: MixerParts[Any], hidden: torch.Tensor) -> _DeltaInputs:
    projected = [matmul(hidden) for matmul in parts.inputs]
    if len(projected) == 2:
        joined, gate, strength, step = _split_by_heads(parts, *projected)
    else:
        joined, gate, strength, step, *separate = projected
        joined = torch.cat([joined, *separate], -1) if separate else joined
    parameters = parts.parameters
    decay = -parameters["A_log"].float().exp() * softplus(step.float() + parameters["dt_bias"])
    return _DeltaInputs(joined, gate, strength, decay)


def _split_by_heads(
    parts: MixerParts[Any], wide: torch.Tensor, narrow: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Regroup columns by kind instead of by key head; return ``(joined, gate, strength, step)``."""
    values = parts.heads // parts.key_heads * parts.value_width
    sizes = [parts.key_width, parts.key_width, values, values]
    *joined, gate = wide.unflatten(-1, (parts.key_heads, -1)).split(sizes, -1)
    strength, step = narrow.unflatten(-1, (parts.key_heads, -1)).chunk(2, -1)
    return torch.cat([part.flatten(-2) for part in joined], -1), gate, strength.flatten(-2), step.flatten(-2)


def _delta_attention_inputs(parts: MixerParts[Any], hidden: torch.Tensor) -> _DeltaInputs:
    *joined, strength = [matmul(hidden) for matmul in parts.inputs]
    gate = hidden
    for matmul in parts.gate:
        gate = matmul(gate)
    assert parts.decay
    return _DeltaInputs(torch.cat(joined, -1), gate, strength, parts.decay(hidden))


def _mamba2(parts: MixerParts[Any], hidden: torch.Tensor, states: MixerStates) -> torch.Tensor:
    projected = parts.inputs[0](hidden if parts.factor == 1 else hidden * parts.factor)
    projected = projected if parts.scales is None else projected * parts.scales
    keys, values = parts.key_heads * parts.key_width, parts.heads * parts.value_width
    gate, inputs, step = projected.split([values, parts.channels, parts.heads], -1)
    convolved = states.convolve(inputs.transpose(1, 2), parts.convolution, activates=True).transpose(1, 2)
    value, key, query = convolved.split([values, keys, keys], -1)
    parameters = parts.parameters
    output = states.recur(
        scan,
        value.unflatten(-1, (parts.heads, -1)),
        softplus(step + parameters["dt_bias"].to(step.dtype)),  # decoding doesn't limit it
        -parameters["A_log"].float().exp(),
        key.unflatten(-1, (parts.key_heads, -1)),
        query.unflatten(-1, (parts.key_heads, -1)),
        parameters["D"],
    ).flatten(2)
    gated = parts.norm(output, gate) if parts.norm else output * silu(gate)
    return _projected(parts, gated.to(hidden.dtype))


def _projected(parts: MixerParts[Any], mixed: torch.Tensor) -> torch.Tensor:
    projected: torch.Tensor = parts.out(mixed)
    return projected


MIXERS: Mapping[str, Callable[[MixerParts[Any], torch.Tensor, MixerStates], torch.Tensor]] = {
    SHORT_CONVOLUTION: _short_convolution,
    DELTA_RULE: _delta_rule,
    DELTA_ATTENTION: _delta_rule,
    MAMBA2: _mamba2,
}
"""Functions that compute mixers over draft trees, by the mixer's kind."""
