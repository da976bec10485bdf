"""Detects changes to a model's weights, hooks and adapters.

Adapters replace modules, training and merging replace weights, and hooks rely on every module being called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch.nn import Module

from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.kernels.packed_matrix import PackedMatrix

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")

LAYOUT = attrgetter("shape", "dtype")
"""Reads a tensor's shape and dtype, which its address and strides don't determine."""

MODULE_ATTRIBUTES = frozenset(vars(Module()))
"""Attributes that torch gives to every module."""

SCALAR_TYPES = (bool, int, float, str, type(None))


class RecordedModel:
    """Records what a model's answers depend on: modules, code, hooks, weights and plain attributes."""

    def __init__(self, model: Module) -> None:
        self._modules = list(model.modules())
        self._holders = [
            holder for module in self._modules for holder in (module._modules, module._parameters, module._buffers)
        ]
        self._held = self._now_held()
        weights = [item for item in self._held if isinstance(item, torch.Tensor)]
        self._compact = list(filter(is_compact, weights))
        self._stored = self._now_stored()
        self._tensors = list(chain.from_iterable(_with_numbers(weight) for weight in weights if not is_compact(weight)))
        for item in self._stored:
            self._tensors += item.tensors if isinstance(item, PackedMatrix) else [item]
        self._addresses = self._now_at()
        self._code, self._settings = self._code_now(), self._settings_now()
        self._parameters = list(model.parameters())
        self._versions = self._versions_now()

    def memory(self) -> list[torch.UntypedStorage]:
        """Return the storages of all weights; holding them keeps the memory from being freed."""
        return [tensor.untyped_storage() for tensor in self._tensors]

    def is_same(self) -> bool:
        """Return True if modules, code, weights and settings are as recorded, ignoring in-place writes to weights."""
        return self._code == self._code_now() and self._has_same_weights() and self._settings == self._settings_now()

    def _has_same_weights(self) -> bool:
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
        """Return each compact weight's ``stored`` data, or None if the weight has become an ordinary parameter."""
        return list(map(getattr, self._compact, repeat("stored"), repeat(None)))

    def _now_at(self) -> list[tuple[Any, ...]]:
        readers = torch.Tensor.data_ptr, torch.Tensor.stride, LAYOUT
        return list(zip(*(map(read, self._tensors) for read in readers), strict=True))

    def was_written(self) -> bool:
        """Return True if torch has counted in-place writes to weights, after which compiled passes stay valid."""
        return self._versions != self._versions_now()

    def has_code_of(self, model: Module) -> bool:
        """Return True if a model has the recorded modules, classes, ``forward`` methods and hooks."""
        modules = list(model.modules())
        is_same = len(modules) == len(self._modules) and all(map(is_, modules, self._modules))
        return is_same and self._code == self._code_now()

    def _versions_now(self) -> list[int]:
        return [-1 if parameter.is_inference() else parameter._version for parameter in self._parameters]

    def _code_now(self) -> list[Hashable]:
        """Return the hook ids, classes and ``forward`` methods of all modules; torch never reuses the id of a hook."""
        hooks: Iterator[Hashable] = map(tuple, hooks_of(self._modules))
        forwards = (vars(module).get("forward") for module in self._modules)
        kinds: list[Any] = list(map(type, self._modules))
        return [*hooks, *kinds, *forwards, *(kind.forward for kind in dict.fromkeys(kinds))]

    def _settings_now(self) -> list[Hashable]:
        """Return the plain attributes of modules, such as active adapters and their scales."""
        return [
            (name, _plain(value))
            for module in self._modules
            for name, value in vars(module).items()
            if name not in MODULE_ATTRIBUTES or name == "training"
        ]


def hooks_of(modules: Iterable[Module]) -> list[dict[int, Any]]:
    """Return torch's global hooks and the hooks of these modules, as dictionaries keyed by hook id."""
    of_all = [getattr(torch.nn.modules.module, name) for name in GLOBAL_HOOKS]
    return of_all + [getattr(module, name) for module in modules for name in HOOKS]


def _with_numbers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a weight's values: the weight itself or, for a tensor subclass, its parts.

    Skip tensors on the meta device and those with a layout that isn't strided.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for part in parts:
            if isinstance(part, torch.Tensor):  # a distributed tensor also lists its mesh
                yield from _with_numbers(part)
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor


def _plain(value: Any) -> Hashable:
    """Return a hashable summary of a setting; it changes if the setting is replaced or a container in it is modified.

    Settings are plain values, tensors and containers of them; return None for other objects.
    """
    kind = type(value)  # isinstance would also read ``__class__``, which configurations of transformers answer slowly
    if issubclass(kind, SCALAR_TYPES):
        return cast(Hashable, value)
    if issubclass(kind, torch.Tensor):
        return id(value), *map(torch.Tensor.data_ptr, _with_numbers(value))
    if issubclass(kind, dict):
        return tuple((_plain(key), _plain(item)) for key, item in value.items())
    if issubclass(kind, list | tuple | set | frozenset):
        return tuple(map(_plain, value))
    return None


class ModelChanges:
    """Records a model's state at each prompt and counts changes between prompts."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self.count = 0
        self._recorded: RecordedModel | None = None
        self._memory: list[torch.UntypedStorage] = []
        """Memory that captured steps read, held so that a weight replaced during an answer isn't freed."""
        self._notices = True

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """In this block, ignore changes to the model. Use this for hdtool's own changes, which don't affect answers."""
        noticed, self._notices, self._recorded = self._notices, False, None
        try:
            yield
        finally:
            self._notices = noticed

    @property
    def is_unchanged(self) -> bool:
        """True if the model has a record and is as recorded, except for in-place writes to weights."""
        return self._recorded is not None and self._recorded.is_same()

    def record(self, *, holds_memory: bool) -> None:
        self._recorded = RecordedModel(self._model)
        self._memory = self._recorded.memory() if holds_memory else []

    def found(self, discard: Callable[[bool], None]) -> bool:
        """Return True if the model has no record or has changed since it was recorded; the caller must then record it.

        If there is a record, ``discard`` is called first: with True if modules or code changed, with False if only
        weights or settings did. If weights were only written in place, it is not called. If ``discard`` raises, the
        next call finds the change again. Return False while changes are ignored.
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
