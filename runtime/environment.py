"""On what a figure was measured: the machine, the versions, the model and the stores."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hdtool.data.stores.store import MANIFEST, checksum
from hdtool.runtime.kernels.cpu_name import processor_name
from hdtool.runtime.kernels.small_batch_linear import has_own_products
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.model.quantization import library_of
from hdtool.runtime.model.quantized_layers import parts_of
from hdtool.runtime.stores.store_set import StoreSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED = 16
"""Numbers of each parameter that go into a model's fingerprint."""


def surroundings(loaded: Loaded, store_set: StoreSet) -> dict[str, Any]:
    """All that a reader of figures needs to place them; the same twice only where figures may be compared."""
    target = loaded.target
    return {
        "machine": machine(target.device),
        "hdtool": metadata.version("hdtool"),
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "model": loaded.name,
        "fingerprint": fingerprint(target.model),
        "quantised": library_of(target.model.config),
        "own_products": has_own_products(target.model),
        "stores": {
            store.manifest.kind: {
                "folder": str(store.folder.resolve()),
                "tokens": store.manifest.counts["tokens"],
                "sha256": checksum(store.folder / MANIFEST),
            }
            for store in (store_set.model, store_set.corpus)
            if store
        },
    }


def compute_with(threads: int | None) -> None:
    """Let torch compute with so many threads; with None, as many as it chose."""
    if threads is not None:
        torch.set_num_threads(threads)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """What tells models apart: the names and shapes of their weights, and a few numbers out of each."""
    found = hashlib.sha256(type(model).__name__.encode())
    for name, weight in model.named_parameters():
        # As far as all types tell numbers apart: a checkpoint is the same whatever it is loaded as.
        corners = [part[(0,) * (part.dim() - 1)].reshape(-1)[:SAMPLED].to(torch.bfloat16) for part in parts_of(weight)]
        found.update(f"{name} {tuple(weight.shape)} {', '.join(str(corner.tolist()) for corner in corners)}".encode())
    return found.hexdigest()[:16]


def machine(device: torch.device | None = None) -> str:
    """In words; of the fastest device, if none is named."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = device_name(device)
    if device.type == "cuda":
        return f"{name}, {versions()}"
    return f"{name}, {os.cpu_count()} cores, {platform.system()}, {versions()}"


def device_name(device: torch.device) -> str:
    """Of a GPU its own, of others that of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def versions() -> str:
    return f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
