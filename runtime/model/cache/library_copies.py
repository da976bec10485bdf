"""Copies of a cache of ``transformers``, of any kind: what passes replace is shared, and the rest is cloned.

Keys and values grow by concatenation, which makes new tensors, so a copy need only refer to the old ones. States are
updated in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig

Place = tuple[Any, ...]
"""Where a tensor is in a cache: attributes, keys and indices from the outside in."""
WHOLE = torch.nn.Module, PreTrainedConfig, type, FunctionType, MethodType, ModuleType, torch.dtype, torch.device
"""What is not looked into."""


def copied(cache: Any, shared: Collection[Place]) -> Any:
    """A copy on which a pass can be made while the cache stays as it is; passes replace what is at ``shared``."""
    return _rebuilt(cache, lambda place, tensor: tensor if place in shared else tensor.clone())


def tensors_of(cache: Any) -> dict[Place, torch.Tensor]:
    """All tensors of a cache."""
    found: dict[Place, torch.Tensor] = {}

    def note(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        found[place] = tensor
        return tensor

    _rebuilt(cache, note)
    return found


def with_views_of(longer: Any, cache: Any, shared: Collection[Place]) -> Any:
    """A copy of a cache that holds no memory of its own for what a longer one begins with."""
    others = tensors_of(longer)

    def view(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        other = others.get(place) if place in shared else None
        return tensor if other is None else _as_part(other, tensor)

    return _rebuilt(cache, view)


def bytes_of(caches: Iterable[Any]) -> int:
    """The memory of some caches, that which they share once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for cache in caches
        for tensor in tensors_of(cache).values()
        for storage in [tensor.untyped_storage()]
    }
    return sum(storages.values())


class Replaced:
    """Finds the places whose tensors each pass replaces and leaves as they were; passes must not be in inference mode.

    Tensors that a pass does not reach, or that it replaces in some passes only, are not among them.
    """

    def __init__(self) -> None:
        self._always: set[Place] = set()
        self._other: set[Place] = set()

    @property
    def places(self) -> frozenset[Place]:
        return frozenset(self._always - self._other)

    def watch(self, cache: Callable[[], Any], run: Callable[[], object]) -> None:
        """Watch a pass that updates a cache, or gives another one."""
        before = {place: (tensor, tensor._version) for place, tensor in tensors_of(cache()).items()}
        run()
        after = tensors_of(cache())
        for place, (tensor, version) in before.items():
            is_replaced = after.get(place) is not tensor and tensor._version == version
            (self._always if is_replaced else self._other).add(place)


def _as_part(other: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a view of one that begins with it along one dimension; the tensor itself if none does."""
    if other.dim() != tensor.dim() or other.dtype != tensor.dtype or other.device != tensor.device:
        return tensor
    differ = [at for at, (long, short) in enumerate(zip(other.shape, tensor.shape, strict=True)) if long != short]
    if len(differ) > 1 or any(other.shape[at] < tensor.shape[at] for at in differ):
        return tensor
    part = other.narrow(differ[0], 0, tensor.shape[differ[0]]) if differ else other
    return part if torch.equal(part, tensor) else tensor


def _rebuilt(cache: Any, of_tensor: Callable[[Place, torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a cache whose tensors a function gives."""
    made: dict[int, Any] = {}

    def rebuilt(value: Any, place: Place) -> Any:
        if id(value) in made:
            return made[id(value)]
        if isinstance(value, torch.Tensor):
            made[id(value)] = of_tensor(place, value)
        elif isinstance(value, list | tuple):
            parts = [rebuilt(part, (*place, number)) for number, part in enumerate(value)]
            made[id(value)] = parts if isinstance(value, list) else tuple(parts)
        elif isinstance(value, dict):
            new = made[id(value)] = copy.copy(value)
            for key, part in value.items():
                new[key] = rebuilt(part, (*place, key))
        elif hasattr(value, "__dict__") and not isinstance(value, WHOLE):
            new = made[id(value)] = copy.copy(value)
            for name, part in vars(value).items():
                vars(new)[name] = rebuilt(part, (*place, name))
        else:
            return value
        return made[id(value)]

    return rebuilt(cache, ())
