"""Stores the states of recurrent layers and short convolutions for a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

CONV, RECURRENT = "conv_states", "recurrent_states"
"""Kinds of states, named after the attributes of ``transformers`` caches that hold them."""


class StateName(NamedTuple):
    """Identifies one recurrent or convolution state of a model."""

    layer: int
    kind: str
    number: int
    """Index among the layer's states of this kind."""


FIRST = StateName(0, "", 0)


class StateShape(NamedTuple):
    """The name of a state, and the shape, dtype and device of its tensor for one sequence."""

    name: StateName
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def has_states(cache: DynamicCache) -> bool:
    """Return True if any layer of a ``transformers`` cache has a recurrent or convolution state."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def state_shapes(used: DynamicCache) -> list[StateShape]:
    """Return the name and shape of each state in ``used``, a ``transformers`` cache filled by a forward pass."""
    return [
        StateShape(StateName(layer, kind, index), tuple(state.shape[1:]), state.dtype, state.device)
        for layer, layer_cache in enumerate(used.layers)
        if isinstance(layer_cache, LinearAttentionCacheLayerMixin)
        for kind in (CONV, RECURRENT)
        for index, state in getattr(layer_cache, kind).items()
        if state is not None
    ]


Names = tuple[StateName, ...]


@dataclass(frozen=True, eq=False)
class States:
    """The recurrent and convolution states of all layers, for one or more sequences.

    States of equal shape, dtype and device share a tensor ``[states, sequences, ...]``.
    """

    stacks: Mapping[Names, torch.Tensor]

    @classmethod
    def zeros(cls, shapes: Iterable[StateShape], sequences: int) -> States:
        alike: dict[StateShape, list[StateName]] = {}
        for shape in shapes:
            alike.setdefault(shape._replace(name=FIRST), []).append(shape.name)
        return cls(
            {
                tuple(names): torch.zeros((len(names), sequences, *shape.shape), dtype=shape.dtype, device=shape.device)
                for shape, names in alike.items()
            }
        )

    @cached_property
    def tensors(self) -> dict[StateName, torch.Tensor]:
        """Maps the name of each state to a view of its tensor, shape ``[sequences, ...]``."""
        return {name: stack[place] for names, stack in self.stacks.items() for place, name in enumerate(names)}

    @property
    def bytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks.values())

    @property
    def address(self) -> int:
        """Memory address of the first state, which identifies these states while they exist."""
        return next(iter(self.stacks.values())).data_ptr()

    @property
    def stride(self) -> int:
        """Distance in bytes between consecutive sequences in the tensor of the first state."""
        first = next(iter(self.stacks.values()))
        return first.stride(1) * first.itemsize

    @torch.inference_mode()
    def clear(self) -> None:
        """Reset all states to zero, their value before the first token."""
        for stack in self.stacks.values():
            stack.zero_()

    def part(self, first: int, sequences: int) -> States:
        """Return a view of the states of ``sequences`` consecutive sequences, starting at index ``first``."""
        return States({names: stack.narrow(1, first, sequences) for names, stack in self.stacks.items()})

    @cached_property
    def by_layer(self) -> dict[int, dict[StateName, torch.Tensor]]:
        """Views of the states, by layer number and then by name; layers without states are left out."""
        layers: dict[int, dict[StateName, torch.Tensor]] = {}
        for name, tensor in self.tensors.items():
            layers.setdefault(name.layer, {})[name] = tensor
        return layers

    @torch.inference_mode()
    def copy(self) -> States:
        return States({names: stack.clone() for names, stack in self.stacks.items()})

    @torch.inference_mode()
    def copy_from(self, source: States) -> None:
        for names, stack in self.stacks.items():
            stack.copy_(source.stacks[names])

    def layers(self, *, has_begun: bool) -> dict[int, StateLayer]:
        """Return ``transformers`` cache layers by layer number; each reads and writes the states of its layer."""
        return {layer: StateLayer(tensors, has_begun=has_begun) for layer, tensors in self.by_layer.items()}


class StateLayer(LinearAttentionLayer):
    """A ``transformers`` cache layer that holds the states of one model layer; forward passes update them in place."""

    def __init__(self, tensors: Mapping[StateName, torch.Tensor], *, has_begun: bool) -> None:
        number = max(name.number for name in tensors) + 1
        super().__init__(number_of_states=number)
        for name, tensor in tensors.items():
            getattr(self, name.kind)[name.number] = tensor
            if name.kind == CONV:
                self.is_conv_states_initialized[name.number] = True
                self.conv_kernel_size[name.number] = tensor.shape[-1]
            else:
                self.is_recurrent_states_initialized[name.number] = True
            self.device, self.dtype = tensor.device, tensor.dtype  # type: ignore[assignment]
        self.begin(has_begun)

    def begin(self, has_begun: bool) -> None:
        """Mark the states as valid if ``has_begun``; otherwise, forward passes ignore them."""
        for index in self.has_previous_state:
            self.has_previous_state[index] = has_begun


class Snapshot(NamedTuple):
    """The states after the first ``length`` tokens of a sequence."""

    length: int
    states: States


MAX_SNAPSHOTS = 4


def kept(snapshots: Sequence[Snapshot], new: Snapshot) -> list[Snapshot]:
    """Return the snapshots shorter than ``new``, then ``new``; only the last ``MAX_SNAPSHOTS`` are kept."""
    return [*(snapshot for snapshot in snapshots if snapshot.length < new.length), new][-MAX_SNAPSHOTS:]
