"""Defines the operations between a mixer's matmuls, and implements them in PyTorch as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu, softplus

from hdtool.runtime.engines.reference.tree_recurrences import Changes, MixerStates, convolve, delta_rule, scan
from hdtool.runtime.program.mixer_parts import DELTA_RULE, MixerParts


class DeltaInputs(NamedTuple):
    """What the projections of a gated delta rule compute, ``[slots, rows, columns]``."""

    joined: torch.Tensor
    """Queries, keys and values."""
    gate: torch.Tensor
    strength: torch.Tensor
    """One value per head, whose sigmoid is the head's write strength."""
    step: torch.Tensor
    """Each head's time step before bias and softplus; in a delta attention, logarithms of its key channels' decays."""


class MixerOperations:
    """Operations between the matmuls of mixers, over the rows of draft trees ``[slots, rows, columns]``.

    A subclass may implement them with kernels.
    """

    def convolve(
        self, parts: MixerParts[Any], inputs: torch.Tensor, states: MixerStates, *, activates: bool
    ) -> torch.Tensor:
        """Apply the short convolution to ``inputs``, then SiLU if ``activates``; ``states`` keeps what it reads."""
        state, weight = states.convolution, parts.convolution.weight.squeeze(1)
        columns = torch.cat([state.mT, inputs.to(state.dtype)], 1)
        states.keep_columns(columns)
        return convolve(states.indices, columns, weight, parts.convolution.bias, activates=activates)

    def delta_rule(
        self, parts: MixerParts[Any], convolved: torch.Tensor, inputs: DeltaInputs, states: MixerStates
    ) -> torch.Tensor:
        """Return the output of a gated delta rule for convolved queries, keys and values; ``states`` keeps updates."""
        keys, values = parts.key_heads * parts.key_width, parts.heads * parts.value_width
        query, key, value = convolved.split([keys, keys, values], -1)
        decay, strength, parameters = inputs.step, inputs.strength.sigmoid(), parts.parameters
        if parts.kind == DELTA_RULE:
            decay = -parameters["A_log"].float().exp() * softplus(decay.float() + parameters["dt_bias"])
        output, updates = delta_rule(
            states.indices,
            states.recurrence,
            query.unflatten(-1, (parts.key_heads, -1)),
            key.unflatten(-1, (parts.key_heads, -1)),
            value.unflatten(-1, (parts.heads, -1)),
            decay,
            strength if parts.strength == 1 else strength * parts.strength,
        )
        states.keep_updates(updates)
        return output.flatten(2)

    def scan(
        self, parts: MixerParts[Any], convolved: torch.Tensor, step: torch.Tensor, states: MixerStates
    ) -> torch.Tensor:
        """Return a Mamba-2 scan's output for convolved values, keys and queries; ``states`` keeps updates."""
        keys, values = parts.key_heads * parts.key_width, parts.heads * parts.value_width
        value, key, query = convolved.split([values, keys, keys], -1)
        parameters = parts.parameters
        output, updates = scan(
            states.indices,
            states.recurrence,
            value.unflatten(-1, (parts.heads, -1)),
            softplus(step + parameters["dt_bias"].to(step.dtype)),  # decoding doesn't limit it
            -parameters["A_log"].float().exp(),
            key.unflatten(-1, (parts.key_heads, -1)),
            query.unflatten(-1, (parts.key_heads, -1)),
            parameters["D"],
        )
        states.keep_updates(updates)
        return output.flatten(2)

    def gated_norm(self, parts: MixerParts[Any], output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return a recurrence's output, normalized and gated; only gated if the mixer has no norm."""
        if parts.norm is None:
            return output * silu(gate)
        width = gate.shape[-1] if parts.norms_groups else parts.value_width
        normed: torch.Tensor = parts.norm(output.reshape(-1, width), gate.reshape(-1, width))
        return normed.view(output.shape)

    def write(self, change: Changes, slot: int, rows: Sequence[int], state: torch.Tensor) -> None:
        """Update the states ``[layers, ...]`` of a slot in place to those after ``rows``, a path in its tree."""
        change.write(slot, rows, state)
