"""Implements the operations of recurrent mixers and short convolutions over draft trees with Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton

from hdtool.runtime.engines.cuda import mixer_kernels
from hdtool.runtime.engines.cuda.triton_kernels import padded
from hdtool.runtime.engines.reference.mixer_operations import DeltaInputs, MixerOperations
from hdtool.runtime.engines.reference.tree_recurrences import Columns, Updates
from hdtool.runtime.program.mixer_parts import DELTA_ATTENTION, MixerParts

if TYPE_CHECKING:
    from hdtool.runtime.engines.reference.tree_recurrences import Changes, MixerStates

CHANNELS = 512
"""Number of channels that one program of the convolution computes."""
MOST_ROWS = 64
"""Maximum rows of a tree whose recurrence fits into registers; draft budgets never choose a larger one."""
MOST_VALUES = 32
"""Maximum number of value columns that one program of a recurrence computes."""
KEY_CHUNK = 16
"""Number of key columns that one program of a recurrence reads at once."""


class TritonMixers(MixerOperations):
    """Implements most operations of mixers with one Triton kernel each.

    PyTorch computes delta attention, whose decays differ by key channel, recurrences over more than ``MOST_ROWS`` rows,
    and gates without a norm.
    """

    def convolve(
        self, parts: MixerParts[Any], inputs: torch.Tensor, states: MixerStates, *, activates: bool
    ) -> torch.Tensor:
        (slots, rows, width), (state, step) = inputs.shape, (states.convolution, states.indices.step)
        before, bias = state.shape[2], parts.convolution.bias
        columns = state.new_empty((slots, before + rows, width))
        convolved = state.new_empty((slots, rows, width))
        read = inputs.flatten(0, 1)
        grid = slots * rows, triton.cdiv(width, CHANNELS)
        mixer_kernels.convolve_kernel[grid](
            read,
            state,
            parts.convolution.weight,
            state if bias is None else bias,
            columns,
            convolved,
            step.ancestor_mask,
            rows,
            width,
            step.buffer.stride(0),
            read.stride(0),
            state.stride(0),
            BEFORE=before,
            TAPS=parts.taps,
            BIAS=bias is not None,
            ACTIVATES=activates,
            BLOCK=CHANNELS,
            num_warps=4,
        )
        states.keep_columns(columns)
        return convolved

    def delta_rule(
        self, parts: MixerParts[Any], convolved: torch.Tensor, inputs: DeltaInputs, states: MixerStates
    ) -> torch.Tensor:
        if parts.kind == DELTA_ATTENTION or convolved.shape[1] > MOST_ROWS:
            return super().delta_rule(parts, convolved, inputs, states)
        strengths, steps = inputs.strength.flatten(0, 1), inputs.step.flatten(0, 1)
        return _recurred(
            mixer_kernels.delta_rule_kernel,
            parts,
            convolved,
            states,
            [strengths, steps, parts.parameters["A_log"], parts.parameters["dt_bias"]],
            [strengths.stride(0), steps.stride(0)],
            kept=[(parts.heads, parts.key_width), (parts.heads, parts.value_width)],
            FACTOR=parts.strength,
        )

    def scan(
        self, parts: MixerParts[Any], convolved: torch.Tensor, step: torch.Tensor, states: MixerStates
    ) -> torch.Tensor:
        if convolved.shape[1] > MOST_ROWS:
            return super().scan(parts, convolved, step, states)
        steps, parameters = step.flatten(0, 1), parts.parameters
        return _recurred(
            mixer_kernels.scan_kernel,
            parts,
            convolved,
            states,
            [steps, parameters["A_log"], parameters["dt_bias"], parameters["D"]],
            [steps.stride(0)],
            kept=[(parts.heads, parts.value_width), (parts.key_heads, parts.key_width)],
        )

    def gated_norm(self, parts: MixerParts[Any], output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        norm: Any = parts.norm
        if norm is None:
            return super().gated_norm(parts, output, gate)
        columns = output.shape[-1]
        gates = gate.flatten(0, 1) if gate.dim() == 3 else gate.reshape(-1, columns)
        groups = parts.key_heads if parts.norms_groups else parts.heads
        mixed = torch.empty_like(output)
        mixer_kernels.gated_norm_kernel[(len(gates), groups)](
            output,
            gates,
            norm.weight,
            mixed,
            groups,
            columns // groups,
            gates.stride(0),
            norm.variance_epsilon,
            WEIGHTS=parts.norms_groups,
            FIRST=parts.norms_groups and not parts.gates_after_norm,
            ACTIVATION="sigmoid" if parts.kind == DELTA_ATTENTION else "silu",
            ROUNDS=parts.rounds_norm,
            BLOCK=triton.next_power_of_2(columns // groups),
            num_warps=4 if parts.norms_groups else 1,
        )
        return mixed

    def write(self, change: Changes, slot: int, rows: Sequence[int], state: torch.Tensor) -> None:
        """Update states by one kernel, which gets the path as bits of its nodes: nothing is copied to the device."""
        low, high = np.array([sum(1 << row - 1 for row in rows[1:])], np.uint64).view(np.int32).tolist()
        path = slot, len(rows), low, high
        if isinstance(change, Columns):
            layers, slots, columns, width = change.columns.shape
            mixer_kernels.write_columns_kernel[layers, triton.cdiv(width, CHANNELS)](
                change.columns.contiguous(),
                state,
                *path,
                slots,
                columns - state.shape[2],
                width,
                state.stride(0),
                BEFORE=state.shape[2],
                BLOCK=CHANNELS,
                num_warps=4,
            )
        else:
            left, right, totals = (part.contiguous() for part in change)
            layers, slots, heads, rows_of_tree, width = left.shape
            values = right.shape[-1]
            block = min(MOST_VALUES, padded(values))
            mixer_kernels.write_updates_kernel[layers, heads, triton.cdiv(values, block)](
                left,
                right,
                totals,
                state,
                *path,
                slots,
                rows_of_tree,
                right.shape[2],
                state.stride(0),
                WIDTH=width,
                LOADED=padded(width),
                DECAYS=totals.shape[-1],
                VALUES=values,
                BLOCK=block,
                num_warps=4,
            )


def _recurred(
    kernel: Any,
    parts: MixerParts[Any],
    convolved: torch.Tensor,
    states: MixerStates,
    inputs: list[torch.Tensor],
    strides: list[int],
    kept: list[tuple[int, int]],
    **constants: float,
) -> torch.Tensor:
    """Compute a recurrence by a kernel; ``kept`` are heads and widths of the ``left`` and ``right`` of ``Updates``."""
    (slots, rows, _), step, state = convolved.shape, states.indices.step, states.recurrence
    output = convolved.new_empty((slots, rows, parts.heads * parts.value_width))
    left, right, totals = (
        torch.empty((slots, heads, rows, width), dtype=torch.float32, device=state.device)
        for heads, width in (*kept, (parts.heads, 1))
    )
    block, loaded = min(MOST_VALUES, padded(parts.value_width)), padded(rows)
    kernel[(parts.heads, slots, triton.cdiv(parts.value_width, block))](
        convolved,
        *inputs,
        state,
        output,
        left,
        right,
        totals,
        step.ancestor_mask,
        rows,
        step.buffer.stride(0),
        parts.key_heads,
        convolved.stride(1),
        *strides,
        state.stride(0),
        WIDTH=parts.key_width,
        CHUNK=KEY_CHUNK,
        VALUES=parts.value_width,
        BLOCK=block,
        ROWS=loaded,
        PRECISION="ieee" if convolved.dtype == torch.float32 else "tf32x3",
        num_warps=8 if loaded == MOST_ROWS else 4,
        num_stages=1,
        **constants,
    )
    states.keep_updates(Updates(left, right, totals))
    return output
