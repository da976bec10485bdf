"""Whether the layers of a model are still those whose addresses were recorded.

Adapters replace modules, training and merging replace weights, and hooks expect each module to be called.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter, contains, is_
from typing import Any

import torch
from torch.nn import Module

from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.kernels.packed.matrix import PackedMatrix

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

OF_ALL_MODULES = ("_global_forward_hooks", "_global_forward_pre_hooks")


class Unchanged:
    """True if modules, weights and their memory are the recorded ones and nothing is hooked to them.

    Hundreds of objects are compared by functions in C; after a pass, none of them is in the caches of the processor.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        self._modules = modules = list(modules)
        self._hooks = [getattr(torch.nn.modules.module, name) for name in OF_ALL_MODULES]
        self._hooks += [getattr(module, name) for module in modules for name in HOOKS]
        self._attributes: list[dict[str, Any]] = [vars(module) for module in modules]
        held = [(holder, name) for module in modules for holder in _holders(module) for name in holder]
        self._holders, self._names = [holder for holder, _ in held], [name for _, name in held]
        self._held = self._now_held()
        weights = [one for one in self._held if isinstance(one, torch.Tensor)]
        self._compact = list(filter(is_compact, weights))
        self._stored = self._now_stored()
        self._tensors = [weight for weight in weights if not is_compact(weight)]
        self._tensors += [one.blocks if isinstance(one, PackedMatrix) else one for one in self._stored]
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        self._memory = [tensor.untyped_storage() for tensor in self._tensors]
        """Held, so that compiled code reads no memory that was freed if weights are replaced within an answer."""

        self._is_checked = False

    def check_again(self) -> None:
        """Compare at the next call; until then, what was found unchanged is taken for it."""
        self._is_checked = False

    def __call__(self) -> bool:
        self._is_checked = self._is_checked or self._is_same()
        return self._is_checked

    def _is_same(self) -> bool:
        return (
            self._has_weights()
            and not any(self._hooks)
            and not any(map(contains, self._attributes, repeat("forward")))
            and not any(map(attrgetter("training"), self._modules))
        )

    def _has_weights(self) -> bool:
        """Whether all weights are the recorded ones; if they were replaced, their memory is given back."""
        same = (
            bool(self._memory)
            and all(map(is_, self._now_held(), self._held))
            and all(map(is_, self._now_stored(), self._stored))
            and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
        )
        if not same:
            self._memory.clear()
        return same

    def _now_held(self) -> list[Any]:
        return list(map(dict.get, self._holders, self._names))

    def _now_stored(self) -> list[Any]:
        """None for a weight that became an ordinary parameter: it stays the same object."""
        return list(map(getattr, self._compact, repeat("stored"), repeat(None)))


def _holders(module: Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._modules, module._parameters
