"""Describes the environment of a measurement: machine, versions, model and stores."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch

from hdtool.data.stores.store_file_names import MANIFEST
from hdtool.data.stores.store_folder import file_checksum
from hdtool.runtime.kernels.linear_layers import has_compiled_layers
from hdtool.runtime.kernels.machine_name import dtype_name, machine
from hdtool.runtime.model.compact_layers import has_compact_weights
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.model.quantization import library_of
from hdtool.runtime.settings.model import INT8
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded


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
            kind: {
                "folder": str(store.folder.resolve()),
                "tokens": store.manifest.counts["tokens"],
                "sha256": file_checksum(store.folder / MANIFEST),
            }
            for kind, store in store_set.opened.items()
        },
    }
