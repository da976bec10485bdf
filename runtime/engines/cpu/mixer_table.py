"""Describes a model's mixers to compiled code."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from hdtool.runtime.caches.recurrent_states import CONV, RECURRENT, StateName, States
from hdtool.runtime.engines.cpu import layer_record as layers
from hdtool.runtime.engines.cpu.convolution import window_size
from hdtool.runtime.engines.cpu.mixer_kernel import mixer_function, sizes_of
from hdtool.runtime.kernels.compiled import Record
from hdtool.runtime.kernels.vector_code import ITEM_SIZE
from hdtool.runtime.program.mixer_parts import (
    DELTA_ATTENTION,
    DELTA_RULE,
    MAMBA2,
    SHORT_CONVOLUTION,
    UNLIMITED,
    MixerParts,
)

if TYPE_CHECKING:
    from hdtool.runtime.engines.cpu.compiled_support import CompiledParts

MIXER_NUMBERS = {
    SHORT_CONVOLUTION: layers.SHORT_CONVOLUTION,
    DELTA_RULE: layers.DELTA_RULE,
    DELTA_ATTENTION: layers.DELTA_RULE,
    MAMBA2: layers.MAMBA2,
}

PARAMETERS = "A_log", "dt_bias", "D"
"""Names of a recurrence's parameters: log decay rates, biases of time steps and skip factors."""


def _is_compiled(mixer: MixerParts[Any]) -> bool:
    """Return True if compiled code supports a mixer's kind, bounds of time steps and matmul widths."""
    between = [matmul.in_features for chain in (mixer.gate, mixer.decay_inputs) for matmul in chain[1:]]
    fits_scratch = all(width <= mixer.heads * mixer.value_width for width in between)
    return mixer.kind in MIXER_NUMBERS and mixer.step_limit[1] == UNLIMITED[1] and fits_scratch


class MixerTable:
    """Fills in the record fields of one model's mixers, and owns the copies of their convolution weights."""

    def __init__(self, mixers: dict[int, MixerParts[Any]]) -> None:
        self._mixers = mixers
        """Mixers by layer index."""
        self._taps: dict[int, torch.Tensor] = {}
        """Convolution weights ``[taps, channels]`` by layer index."""
        self.journal_size = 0
        """Number of float32 values that the mixers of all layers together keep per row of a tree."""
        self.max_journal_size = 0
        """Maximum number of float32 values that a single layer's mixer keeps per row."""
        self._memory = [0, 0, 0]
        self.copy_weights()

    @classmethod
    def of(cls, parts: CompiledParts) -> MixerTable | None:
        mixers = {number: layer.mixer for number, layer in enumerate(parts.layers) if layer.mixer}
        return cls(mixers) if mixers else None

    @torch.inference_mode(False)
    def copy_weights(self) -> None:
        """Copy the convolutions' current weights; the addresses of the copies never change."""
        for number, mixer in self._mixers.items():
            weight = mixer.convolution.weight.detach()[:, 0].T
            if number in self._taps:
                self._taps[number].copy_(weight)
            else:
                self._taps[number] = weight.clone(memory_format=torch.contiguous_format)

    def fits(self, states: States) -> bool:
        """Return True if compiled code supports the mixers and ``states``, which must be exactly the mixers' states."""
        expected: dict[StateName, tuple[int, ...]] = {}
        for number, mixer in self._mixers.items():
            expected[StateName(number, CONV, 0)] = mixer.channels, mixer.taps
            head_shape = mixer.key_width, mixer.value_width
            if mixer.kind != SHORT_CONVOLUTION:
                head_shape = head_shape[::-1] if mixer.kind == MAMBA2 else head_shape
                expected[StateName(number, RECURRENT, 0)] = mixer.heads, *head_shape
        actual = {name: tuple(tensor.shape[1:]) for name, tensor in states.tensors.items()}
        return (
            all(map(_is_compiled, self._mixers.values()))
            and actual == expected
            and all(tensor.dtype == torch.float32 and tensor[0].is_contiguous() for tensor in states.tensors.values())
        )

    def fill_layers(self, table: Record) -> None:
        """Fill in all mixer fields of the layer records except the states' addresses."""
        for number, mixer in self._mixers.items():
            row, parameters, bias = table[number].mixer, mixer.parameters, mixer.convolution.bias
            row.kind, convolution = MIXER_NUMBERS[mixer.kind], row.convolution
            convolution.taps, convolution.channels = mixer.taps, mixer.channels
            convolution.weight = self._taps[number].data_ptr()
            convolution.bias = 0 if bias is None else bias.data_ptr()
            row.delta.strength, row.scan.min_step = mixer.strength, mixer.step_limit[0]
            row.scan.gates_after_norm = mixer.gates_after_norm
            row.key_heads, row.heads = mixer.key_heads, mixer.heads
            row.key_width, row.value_width = mixer.key_width, mixer.value_width
            row.delta.decay_width, row.delta.decay_bound = mixer.key_width if mixer.decay else 1, mixer.decay_bound
            addresses = (parameters[name].data_ptr() if name in parameters else 0 for name in PARAMETERS)
            row.decay_log, row.step_bias, row.scan.skip = addresses
            if mixer.norm:
                norm: Any = mixer.norm
                row.norm, row.epsilon = norm.weight.data_ptr(), norm.variance_epsilon
        rows = [table[number].mixer for number in self._mixers]
        scratch, kept, state = zip(*map(sizes_of, rows), strict=True)
        for row, earlier in zip(rows, accumulate(kept, initial=0), strict=False):
            row.journal_offset = earlier
        self.journal_size, self.max_journal_size = sum(kept), max(kept)
        self._memory = [max(scratch), max(state), max(window_size(row.convolution) for row in rows)]

    def fill_states(self, table: Record, states: States, first: int = 0) -> None:
        """Fill in the addresses of ``states``, whose first sequence is the slot ``first`` of the pass."""
        for number, mixer in self._mixers.items():
            if number >= len(table):  # the pass computes only the first layers
                break
            row = table[number].mixer
            records = [(row.convolution, CONV), (row, RECURRENT)]
            for record, name in records[: 1 if mixer.kind == SHORT_CONVOLUTION else 2]:
                state = states.tensors[StateName(number, name, 0)]
                record.state_stride = state.stride(0)
                record.state = state[0].data_ptr() - first * state.stride(0) * ITEM_SIZE

    def fill_pass_record(self, pass_record: Record) -> None:
        """Fill in the mixer function's address and the amounts of scratch memory that mixers need in a pass."""
        pass_record.mixer_function = mixer_function().address
        pass_record.mixer_row, pass_record.mixer_state, pass_record.mixer_window = self._memory
