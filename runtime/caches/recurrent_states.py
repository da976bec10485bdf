"""Stores the states of recurrent layers and short convolutions, and snapshots of them to roll back to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

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


StateNames = tuple[StateName, ...]


@dataclass(frozen=True, eq=False)
class States:
    """The recurrent and convolution states of all layers, for one or more sequences.

    States of equal shape, dtype and device share a tensor ``[states, sequences, ...]``.
    """

    stacks: Mapping[StateNames, torch.Tensor]

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
        """Return each layer's ``StateLayer`` by layer number; layers without states are left out."""
        return {layer: StateLayer(tensors, has_begun=has_begun) for layer, tensors in self.by_layer.items()}


class StateLayer(LinearAttentionLayer):
    """A ``transformers`` cache layer that holds the states of one model layer; forward passes update them in place."""

    def __init__(self, tensors: Mapping[StateName, torch.Tensor], *, has_begun: bool) -> None:
        """Without ``has_begun``, the next forward pass ignores the contents of the states."""
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
        for index in self.has_previous_state:
            self.has_previous_state[index] = has_begun


class StatesOfTree(Protocol):
    """What a pass over trees keeps to advance recurrent states along the accepted paths."""

    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        """Advance ``states`` from before the tree to the end of the path ``rows``, which starts with the root.

        ``slot`` is the index of the tree's slot in the pass.
        """
        ...


class KeptStates:
    """Base class of the states that a slot keeps besides keys and values; this class keeps none.

    Kept states can be rolled back to certain lengths only.
    """

    keeps_states = False

    @property
    def bytes(self) -> int:
        """Memory taken by kept copies of the states, in bytes."""
        return 0

    @property
    def has_begun(self) -> bool:
        """True if a token has been read into the states, or if there are no states."""
        return True

    def resumes_at(self, shared: int) -> int:
        """Return where to resume reading a prompt that has its first ``shared`` tokens in common with the slot.

        Without states, only the last shared token is read again, to compare its keys and values.
        """
        return max(0, shared - 1)

    def keep(self) -> None:
        """Keep a copy of the current states, from which another prompt may continue."""

    def cut(self, length: int) -> None:
        """Go back to the states after ``length`` tokens, if they were kept."""

    def begin_prefill(self, length: int) -> None:
        """Note that a pass begins to update the states, which include ``length`` tokens."""

    def end_reading(self, length: int) -> None:
        """Note that the states include ``length`` tokens."""

    def hold(self, states: Any, place: int) -> None:
        """Hold a pass's ``StatesOfTree`` or ``Snapshot`` for ``commit``; ``place`` is the slot's index in the pass."""

    def commit(self, rows: Sequence[int], length: int) -> None:
        """Advance the states along a path of the verified tree, after which the context has ``length`` tokens."""

    def copy_from(self, source: Any, length: int) -> None:
        """Copy from another slot the states that include at most ``length`` tokens."""


class Snapshot(NamedTuple):
    """The states after the first ``length`` tokens of a sequence."""

    length: int
    states: Any


MAX_SNAPSHOTS = 4


def kept(snapshots: Sequence[Snapshot], new: Snapshot) -> list[Snapshot]:
    """Return the snapshots shorter than ``new``, then ``new``; only the last ``MAX_SNAPSHOTS`` are kept."""
    return [*(snapshot for snapshot in snapshots if snapshot.length < new.length), new][-MAX_SNAPSHOTS:]


def up_to(snapshots: Sequence[Snapshot], length: int) -> list[Snapshot]:
    return [snapshot for snapshot in snapshots if snapshot.length <= length]


class SlotStates(KeptStates):
    """A slot's recurrent states, which prefill updates in place, and snapshots of them to roll back to."""

    keeps_states = True

    def __init__(self, states: States) -> None:
        self._states = states
        self._length = 0
        """Number of accepted tokens read into the states; -1 if they are unusable, as while a pass updates them."""
        self._snapshots: list[Snapshot] = []
        self.of_tree: StatesOfTree | None = None
        self._place = 0

    @property
    def bytes(self) -> int:
        return sum(snapshot.states.bytes for snapshot in self._snapshots)

    @property
    def has_begun(self) -> bool:
        return self._length > 0

    def resumes_at(self, shared: int) -> int:
        lengths = [self._length, *(snapshot.length for snapshot in self._snapshots)]
        return max((length for length in lengths if length <= shared), default=0)

    def keep(self) -> None:
        if self._length > 0:
            self._snapshots = kept(self._snapshots, Snapshot(self._length, self._states.copy()))

    def cut(self, length: int) -> None:
        """Restore the states after ``length`` tokens from a snapshot; without one, mark later states as unusable."""
        self._snapshots, self.of_tree = up_to(self._snapshots, length), None
        if length == 0:
            self._length = 0
        elif self._length != length and self._snapshots and self._snapshots[-1].length == length:
            self._length = -1
            self._states.copy_from(self._snapshots[-1].states)
            self._length = length
        elif self._length > length:
            self._length = -1

    def begin_prefill(self, length: int) -> None:
        assert self._length == length, "the states are those of another length"
        self._length = -1

    def end_reading(self, length: int) -> None:
        self._length = length

    def hold(self, states: StatesOfTree | None, place: int) -> None:
        self.of_tree, self._place = states, place

    def commit(self, rows: Sequence[int], length: int) -> None:
        if self.of_tree:
            self._length = -1
            self.of_tree.commit(self._place, rows, self._states)
            self._length, self.of_tree = length, None

    def copy_from(self, source: SlotStates, length: int) -> None:
        self._length = -1
        if 0 <= source._length <= length:
            self._states.copy_from(source._states)
            self._length = source._length
        self._snapshots = up_to(source._snapshots, length)
