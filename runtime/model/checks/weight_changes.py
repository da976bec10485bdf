"""Detects changed weights, hooks or adapters of a model.

Adapters replace modules, training and merging replace weights, and hooks expect every module to be called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch.nn import Module

from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.kernels.packed_matrix import PackedMatrix

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

OF_ALL_MODULES = ("_global_forward_hooks", "_global_forward_pre_hooks")

LAYOUT = attrgetter("shape", "dtype")
"""Memory layout beyond address and strides: a transposed tensor has the same address."""

OF_EVERY_MODULE = frozenset(vars(Module()))
"""Attributes that torch gives to a module."""

PLAIN = (bool, int, float, str, type(None))


class RecordedWeights:
    """The submodules, parameters and buffers of modules, and where their numbers lie."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self._holders = [
            holder for module in modules for holder in (module._modules, module._parameters, module._buffers)
        ]
        self._held = self._now_held()
        weights = [item for item in self._held if isinstance(item, torch.Tensor)]
        self._compact = list(filter(is_compact, weights))
        self._stored = self._now_stored()
        self._tensors = list(chain.from_iterable(_with_numbers(weight) for weight in weights if not is_compact(weight)))
        for item in self._stored:
            self._tensors += item.tensors if isinstance(item, PackedMatrix) else [item]
        self._addresses = self._now_at()

    def memory(self) -> list[torch.UntypedStorage]:
        """The memory of all weights, which is not freed while this list exists."""
        return [tensor.untyped_storage() for tensor in self._tensors]

    def are_same(self) -> bool:
        held = self._now_held()
        return (
            len(held) == len(self._held)
            and all(map(is_, held, self._held))
            and all(map(is_, self._now_stored(), self._stored))
            and self._now_at() == self._addresses
        )

    def _now_held(self) -> list[Any]:
        return list(chain.from_iterable(holder.values() for holder in self._holders))

    def _now_stored(self) -> list[Any]:
        """None for a weight that became an ordinary parameter: it stays the same object."""
        return list(map(getattr, self._compact, repeat("stored"), repeat(None)))

    def _now_at(self) -> list[tuple[Any, ...]]:
        readers = torch.Tensor.data_ptr, torch.Tensor.stride, LAYOUT
        return list(zip(*(map(read, self._tensors) for read in readers), strict=True))


class RecordedModel:
    """All that the answers of a model depend on, as far as Python shows it."""

    def __init__(self, model: Module) -> None:
        self._modules = list(model.modules())
        self._weights = RecordedWeights(self._modules)
        self._code, self._settings = self._code_now(), self._settings_now()
        self._parameters = list(model.parameters())
        self._versions = self._versions_now()

    def memory(self) -> list[torch.UntypedStorage]:
        return self._weights.memory()

    def is_same(self) -> bool:
        """True if nothing changed, including added or replaced modules."""
        return self._code == self._code_now() and self._weights.are_same() and self._settings == self._settings_now()

    def was_written(self) -> bool:
        """True if weights were written in place, as by an optimizer; what was compiled or captured stays valid."""
        return self._versions != self._versions_now()

    def has_code_of(self, model: Module) -> bool:
        """True if a model has the recorded modules, classes and hooks."""
        modules = list(model.modules())
        is_same = len(modules) == len(self._modules) and all(map(is_, modules, self._modules))
        return is_same and self._code == self._code_now()

    def _versions_now(self) -> list[int]:
        return [-1 if parameter.is_inference() else parameter._version for parameter in self._parameters]

    def _code_now(self) -> list[Hashable]:
        """Ids of hooks are never used twice."""
        hooks: Iterator[Hashable] = map(tuple, hooks_of(self._modules))
        forwards = (vars(module).get("forward") for module in self._modules)
        kinds: list[Any] = list(map(type, self._modules))
        return [*hooks, *kinds, *forwards, *(kind.forward for kind in dict.fromkeys(kinds))]

    def _settings_now(self) -> list[Hashable]:
        """Plain attributes of modules, such as active adapters and their scales."""
        return [
            (name, _plain(value))
            for module in self._modules
            for name, value in vars(module).items()
            if name not in OF_EVERY_MODULE or name == "training"
        ]


def hooks_of(modules: Iterable[Module]) -> list[dict[int, Any]]:
    """The hooks of modules, and those of all modules."""
    of_all = [getattr(torch.nn.modules.module, name) for name in OF_ALL_MODULES]
    return of_all + [getattr(module, name) for module in modules for name in HOOKS]


def _with_numbers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors of a weight that have memory: itself, or those inside a tensor subclass of a library."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for part in parts:
            if isinstance(part, torch.Tensor):  # a distributed tensor names its mesh, too
                yield from _with_numbers(part)
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor


def _plain(value: Any) -> Hashable:
    """A value that changes if a setting is replaced or changed in place; None for objects that are not settings."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), *map(torch.Tensor.data_ptr, _with_numbers(value))
    if isinstance(value, dict):
        return tuple((_plain(key), _plain(item)) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_plain, value))
    return None


class ModelChanges:
    """State of a model at its last prompt, and how often it has changed since."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self.count = 0
        self._recorded: RecordedModel | None = None
        self._memory: list[torch.UntypedStorage] = []
        """Memory of the weights that captured steps read: a replaced weight is not freed within an answer."""
        self._notices = True

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Notice no changes of the model in this block: they are hdtool's own, and change no answer."""
        noticed, self._notices, self._recorded = self._notices, False, None
        try:
            yield
        finally:
            self._notices = noticed

    def record(self, *, holds_memory: bool) -> None:
        self._recorded = RecordedModel(self._model)
        self._memory = self._recorded.memory() if holds_memory else []

    def found(self, discard: Callable[[bool], None]) -> bool:
        """True if the model changed since it was recorded; it must be recorded again then, or if it never was.

        ``discard`` is called with whether the model has other code, but not if its weights were merely written in
        place; if it fails, the model is still another one at the next prompt.
        """
        if not self._notices:
            return False
        if recorded := self._recorded:
            if recorded.is_same():
                was_written = recorded.was_written()
                self.count += was_written
                return was_written
            self._memory.clear()
            has_same_code = recorded.has_code_of(self._model)
            try:
                discard(not has_same_code)
            except BaseException:
                self._recorded = recorded
                raise
            self.count += 1
        return True
