"""Hands weights over one by one while transformers reads a GGUF file, so that they are never in memory all at once.

transformers unpacks the tensors of most architectures into a dictionary before it fills the model, and converts those
of a few one by one while it does. Both places are taken, and a weight that is handed over is one zero in the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

Take = Callable[[str, torch.Tensor], bool]
"""Called with the name and the value of a weight; whether the model can do without it."""
Function = Callable[..., Any]
PUTTING = "core_model_loading", "set_param_for_module"
READING = "modeling_gguf_pytorch_utils", "load_gguf_checkpoint"
"""Functions of transformers. Without them, as in a later version, weights are in memory all at once."""


@contextmanager
def weights_in_turn(take: Take) -> Iterator[None]:
    """Call ``take`` for each weight that transformers reads meanwhile."""
    with ExitStack() as patches:
        # Else threads read ahead without a limit.
        patches.enter_context(patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"))
        for (module, name), wrapped in ((PUTTING, _putting), (READING, _reading)):
            with suppress(ImportError):
                found = import_module(f"transformers.{module}")
                if hasattr(found, name):
                    patches.enter_context(patch.object(found, name, wrapped(getattr(found, name), take)))
        yield


def _putting(put: Function, take: Take) -> Function:
    """Put a weight into the model, then hand it over."""

    def put_in_turn(model: Any, name: str, *arguments: Any, **options: Any) -> None:
        put(model, name, *arguments, **options)
        path, _, last = name.rpartition(".")
        weight = dict(model.get_submodule(path).named_parameters(recurse=False)).get(last)
        if weight is not None and not weight.is_meta and take(name, weight.detach()):
            weight.data = _zeros(weight.shape)

    return put_in_turn


def _reading(read: Function, take: Take) -> Function:
    """Unpack a file without the weights that are handed over."""
    unpacking: Any = import_module(f"transformers.{READING[0]}")

    def read_in_turn(*arguments: Any, **options: Any) -> dict[str, Any]:
        taken: dict[str, tuple[int, ...]] = {}
        processors = {name: _processor(kind, take, taken) for name, kind in unpacking.TENSOR_PROCESSORS.items()}
        other = _processor(unpacking.TensorProcessor, take, taken)
        with patch.dict(unpacking.TENSOR_PROCESSORS, processors), patch.object(unpacking, "TensorProcessor", other):
            found: dict[str, Any] = read(*arguments, **options)
        found.get("tensors", {}).update((name, _zeros(shape)) for name, shape in taken.items())
        return found

    return read_in_turn


def _processor(kind: type[Any], take: Take, taken: dict[str, tuple[int, ...]]) -> type[Any]:
    class InTurn(kind):  # type: ignore[misc]
        def process(self, weights: Any, name: str, **options: Any) -> Any:
            found = super().process(weights=weights, name=name, **options)
            place = options["tensor_key_mapping"].get(found.name)
            # Tensors that are not unpacked are views of the file, and not writable.
            if place is None or not found.weights.flags.writeable:
                return found
            if not take(place, torch.from_numpy(np.ascontiguousarray(found.weights))):
                return found
            taken[place] = found.weights.shape
            return found._replace(name="")  # tensors without a place in the model are left out

    return InTurn


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(()).expand(shape)
