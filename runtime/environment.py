"""Describes the environment of a measurement: machine, versions, model and stores."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hdtool.data.stores.store import file_checksum
from hdtool.data.stores.store_files import MANIFEST
from hdtool.runtime.config.model import INT8
from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.kernels.compiled import processor_name
from hdtool.runtime.kernels.linear import has_compiled_layers
from hdtool.runtime.model.compact_layers import has_compact_weights
from hdtool.runtime.model.quantization import library_of, parts_of
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED_WEIGHTS = 16
"""Number of values of each parameter that are hashed into a model's fingerprint."""


def describe_environment(loaded: Loaded, store_set: StoreSet) -> dict[str, Any]:
    """Return the environment to save with measurements; only those from equal environments are comparable."""
    target = loaded.target
    return {
        "machine": machine(target.device),
        "hdtool": metadata.version("hdtool"),
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "model": loaded.name,
        "fingerprint": fingerprint(target.model),
        "quantized": library_of(target.model.config),
        "own_products": has_compiled_layers(target.model),
        "compact_weights": has_compact_weights(target.model),
        "activations": INT8 if target.compiled and target.compiled.activations_are_int8 else "float32",
        "fused_layers": target.compiled is not None,
        "stores": {
            store.manifest.kind: {
                "folder": str(store.folder.resolve()),
                "tokens": store.manifest.counts["tokens"],
                "sha256": file_checksum(store.folder / MANIFEST),
            }
            for store in (store_set.model, store_set.corpus)
            if store
        },
    }


def set_num_threads(threads: int | None) -> None:
    """Set torch's number of threads; None keeps the current number."""
    if threads is not None:
        torch.set_num_threads(threads)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of the model's class and of each parameter's name, shape and first few values."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, weight in model.named_parameters():
        # Rounded to bfloat16, so that the fingerprint does not depend on the dtype that a checkpoint is loaded in.
        parts = [weight.stored[:1].float()] if is_compact(weight) and weight.dim() > 1 else parts_of(weight)
        samples = [part[(0,) * (part.dim() - 1)].reshape(-1)[:SAMPLED_WEIGHTS].to(torch.bfloat16) for part in parts]
        digest.update(f"{name} {tuple(weight.shape)} {', '.join(str(corner.tolist()) for corner in samples)}".encode())
    return digest.hexdigest()[:16]


def machine(device: torch.device | None = None) -> str:
    """Describe a device and the library versions in one line; ``device`` defaults to the GPU, if any, else the CPU."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    host = "" if device.type == "cuda" else f", {os.cpu_count()} cores, {platform.system()}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device_name(device)}{host}, {versions}"


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; for any other device, the name of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
