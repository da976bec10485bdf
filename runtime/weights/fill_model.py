"""Builds a model without weights, and fills it from a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from transformers import GenerationConfig

from hdtool.data.errors import ModelError
from hdtool.data.file_state import FileState
from hdtool.data.progress import ProgressBar
from hdtool.runtime.kernels.compact_weight import as_parameter, is_compact
from hdtool.runtime.weights.damaged_weights import WeightCheck
from hdtool.runtime.weights.weight_store import WeightStore

NARROW_BYTES = 2
READERS = 2
"""Number of threads that read weights; each may hold a weight that it expands."""


def fits(store: WeightStore, model: Any) -> bool:
    """Return True if a store has exactly a model's weights, with the same shapes; of tied parameters, one is enough."""
    parameters = model.state_dict()
    if any(name not in parameters or parameters[name].shape != weight.shape for name, weight in store.items()):
        return False
    tied: dict[str, str] = model.all_tied_weights_keys
    sources = {source for name, source in tied.items() if name in store}
    return all(name in store or tied.get(name) in store or name in sources for name in parameters)


def fill(model: Any, store: WeightStore, folder: Path, bar: ProgressBar, check: WeightCheck | None) -> None:
    """Read a store's weights into an empty model, whose configuration is in ``folder``.

    Raise a ``ModelError`` if ``check`` is given and finds a weight damaged, or if a file changes meanwhile.
    """
    states, done = list(map(FileState.of, store.files)), 0
    missing = model.state_dict().keys() - store.keys()
    readers = ThreadPoolExecutor(READERS)
    try:
        for name, weight in zip(store, readers.map(store.read, store), strict=True):
            if check:
                check.refuse_damaged(name, weight)
            _put(model, name, weight)
            done += store[name].bytes
            bar.to(done)
    finally:
        readers.shutdown(cancel_futures=True)
        if not all(state.holds for state in states):
            raise ModelError(f"{store.source} was changed while it was read: run the command again")
    if check:
        check.finish()
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    model.initialize_weights()  # some types overwrite weights that were loaded
    model.eval()
    name_after(model, folder)


def _put(model: Any, name: str, weight: Any) -> None:
    """Set a parameter or a buffer of a model to a weight, and mark it as initialized for transformers.

    16-bit and packed matrices stay as they are stored; other floating-point weights are converted to float32.
    """
    if weight.is_floating_point() and (weight.dim() < 2 or weight.itemsize != NARROW_BYTES) and not is_compact(weight):
        weight = weight.float()
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    if last in module._buffers:
        module._buffers[last] = weight
    else:
        module._parameters[last] = as_parameter(weight) if is_compact(weight) else Parameter(weight, False)
        weight = module._parameters[last]
    weight._is_hf_initialized = True


def name_after(model: Any, folder: Path) -> None:
    """Give a model the name and the generation settings of the folder with its configuration."""
    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


class _OnRequest:
    """A weight whose numbers are read only when transformers' loader indexes it."""

    def __init__(self, store: WeightStore, name: str) -> None:
        self._store, self._name = store, name

    def get_shape(self) -> list[int]:
        return list(self._store[self._name].shape)

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self._store.numbers(self._name)[part]


def on_request(store: WeightStore) -> dict[str, Any]:
    """Return a store's weights by name for transformers' loader; each is read only when the loader needs it."""
    return {name: _OnRequest(store, name) for name in store}
