"""What the records of layers have of mixers beside attention: weights, states, and the memory that passes need."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from hdtool.runtime.engines.cpu import layer_record as layers
from hdtool.runtime.engines.cpu.mixers.convolution import window_numbers
from hdtool.runtime.engines.cpu.mixers.mix import kept_numbers, mixer_function, row_numbers, state_numbers
from hdtool.runtime.engines.mixer_parts import DELTA_RULE, MAMBA2, SHORT_CONVOLUTION, MixerParts
from hdtool.runtime.kernels.memory.raw_memory import bits
from hdtool.runtime.kernels.vector_code import ITEM_SIZE
from hdtool.runtime.model.cache.states import CONV, RECURRENT, StateName, States

if TYPE_CHECKING:
    from hdtool.runtime.engines.cpu.compiled_kind import CompiledParts

NUMBERS = {
    SHORT_CONVOLUTION: layers.SHORT_CONVOLUTION,
    DELTA_RULE: layers.DELTA_RULE,
    MAMBA2: layers.MAMBA2,
}


class MixerTable:
    """The mixers of one model."""

    def __init__(self, mixers: dict[int, MixerParts[Any]]) -> None:
        self._mixers = mixers
        """By their layers."""
        self._taps: dict[int, torch.Tensor] = {}
        """The weight of each convolution, ``[taps, channels]``: its columns one after another."""
        self.kept = 0
        """Numbers that are kept of a row of a tree in all layers."""
        self.most_kept = 0
        """In the layer that keeps most of them."""
        self._memory = [0, 0, 0]
        self.copy_weights()

    @classmethod
    def of(cls, parts: CompiledParts) -> MixerTable | None:
        mixers = {number: layer.mixer for number, layer in enumerate(parts.layers) if layer.mixer}
        return cls(mixers) if mixers else None

    @torch.inference_mode(False)
    def copy_weights(self) -> None:
        """Copy the weights of convolutions as they are now; their copies stay where they are."""
        for number, mixer in self._mixers.items():
            weight = mixer.convolution.weight.detach()[:, 0].T
            if number in self._taps:
                self._taps[number].copy_(weight)
            else:
                self._taps[number] = weight.clone(memory_format=torch.contiguous_format)

    def fits(self, states: States) -> bool:
        """Whether a cache has the states of these mixers and no others, each as the records describe it."""
        expected: dict[StateName, tuple[int, ...]] = {}
        for number, mixer in self._mixers.items():
            expected[StateName(number, CONV, 0)] = mixer.channels, mixer.taps
            of_head = mixer.key_width, mixer.value_width
            if mixer.kind != SHORT_CONVOLUTION:
                of_head = of_head if mixer.kind == DELTA_RULE else of_head[::-1]
                expected[StateName(number, RECURRENT, 0)] = mixer.heads, *of_head
        found = {name: tuple(tensor.shape[1:]) for name, tensor in states.tensors.items()}
        return found == expected and all(
            tensor.dtype == torch.float32 and tensor[0].is_contiguous() for tensor in states.tensors.values()
        )

    def fill_layers(self, table: layers.Numbers) -> None:
        """Fill the rows of layers with all but the addresses of states."""
        for number, mixer in self._mixers.items():
            row, own, convolution = table[number], mixer.parameters, mixer.convolution
            row[layers.MIXER] = NUMBERS[mixer.kind]
            row[layers.TAPS], row[layers.COLUMNS], row[layers.CHANNELS] = mixer.taps, mixer.taps, mixer.channels
            row[layers.CONV_WEIGHT] = self._taps[number].data_ptr()
            row[layers.CONV_BIAS] = 0 if convolution.bias is None else convolution.bias.data_ptr()
            row[layers.STRENGTH] = bits(mixer.strength)
            row[layers.KEY_HEADS], row[layers.STATE_HEADS] = mixer.key_heads, mixer.heads
            row[layers.KEY_WIDTH], row[layers.VALUE_WIDTH] = mixer.key_width, mixer.value_width
            for field, name in ((layers.DECAY_LOG, "A_log"), (layers.STEP_BIAS, "dt_bias"), (layers.SKIP, "D")):
                row[field] = own[name].data_ptr() if name in own else 0
            if mixer.norm:
                norm: Any = mixer.norm
                row[layers.GATE_NORM], row[layers.GATE_EPSILON] = (
                    norm.weight.data_ptr(),
                    bits(norm.variance_epsilon),
                )
        rows = [table[number] for number in self._mixers]
        kept = list(map(kept_numbers, rows))
        for row, earlier in zip(rows, accumulate(kept, initial=0), strict=False):
            row[layers.JOURNAL_AT] = earlier
        self.kept, self.most_kept = sum(kept), max(kept)
        self._memory = [max(map(numbers, rows)) for numbers in (row_numbers, state_numbers, window_numbers)]

    def fill_states(self, table: layers.Numbers, states: States, first: int = 0) -> None:
        """Fill in the addresses of the states of a cache, whose first sequence has this number."""
        for number, mixer in self._mixers.items():
            if number >= len(table):  # other layers are left out
                break
            row = table[number]
            fields = [(layers.CONV_STATE, layers.CONV_STRIDE, CONV)]
            if mixer.kind != SHORT_CONVOLUTION:
                fields.append((layers.STATE, layers.STATE_STRIDE, RECURRENT))
            for address, stride, name in fields:
                state = states.tensors[StateName(number, name, 0)]
                row[address], row[stride] = state[0].data_ptr() - first * state.stride(0) * ITEM_SIZE, state.stride(0)

    def fill_shape(self, shape: layers.Numbers) -> None:
        """Fill in the memory that a pass needs."""
        shape[layers.MIXER_PART] = mixer_function().address
        shape[layers.MIXER_ROW], shape[layers.MIXER_STATE], shape[layers.MIXER_WINDOW] = self._memory
