"""Stores proofs that compiled models match Transformers, so that later starts can skip the comparison.

Proofs are stored in hdtool's home folder. A stored proof is valid only if the model's files, the code of hdtool and its
libraries, the processor, the settings and the number of threads are unchanged. At a start with a stored proof, hdtool
checks that a short prompt and a small tree still give the stored logits, bit for bit, and otherwise proves the model
again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import hdtool
from hdtool.data.durable_files import CachedValue
from hdtool.data.file_state import FileState
from hdtool.data.home import proofs_at_home
from hdtool.runtime.caches.kv_cache import HeadShape, LayerShape
from hdtool.runtime.engines.proofs.probes import PROOF_CONTEXT, PROOF_TREE, some_context
from hdtool.runtime.engines.stock.model_facts import ModelFacts
from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.kernels.compiled import processor_name
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.target import Target

FORMAT = 3
LIBRARIES = ("torch", "transformers", "numba", "llvmlite", "numpy", "accelerate", "safetensors")
SETTINGS = ("NUMBA_", "LLVM_", "OMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH_", "PYTORCH_", "OPENBLAS_")
"""Prefixes of environment variables that change what libraries compute."""


@dataclass(frozen=True)
class Proof:
    """Result of comparing a compiled model with Transformers."""

    facts: ModelFacts
    """What the model can do."""
    compact: dict[str, bool]
    """Maps each kind of weight to True if its weights may stay compact; see ``compact_weights``."""
    logits: str
    """Hash of the logits of a short prefill and a small tree."""

    def in_json(self) -> dict[str, Any]:
        shapes = [
            [[head.heads, head.width, str(head.dtype).removeprefix("torch.")] if head else None for head in layer]
            for layer in self.facts.shapes
        ]
        return {"shapes": shapes, "continues": self.facts.continues, "compact": self.compact, "logits": self.logits}

    @classmethod
    def of_json(cls, row: dict[str, Any]) -> Proof:
        facts = ModelFacts(tuple(map(_shape, row["shapes"])), continues=bool(row["continues"]))
        return cls(facts, dict(row["compact"]), row["logits"])


def _shape(layer: Any) -> LayerShape:
    cpu = torch.device("cpu")
    return LayerShape(*(head and HeadShape(head[0], head[1], getattr(torch, head[2]), cpu) for head in layer))


class KeptProof:
    """Keeps the result of one model's checks between starts; it is valid for this machine and these settings only."""

    def __init__(self, config: ModelConfig, settings: Any, family: type, files: Iterable[Path]) -> None:
        """``settings`` and ``family`` are the model's Transformers configuration and class; ``files`` are its files."""
        code = Path(str(sys.modules[family.__module__].__file__))
        self.record = CachedValue(
            proofs_at_home(),
            {
                "format": FORMAT,
                "model": [asdict(FileState.of(file)) for file in sorted(files)],
                "options": repr(config),
                "settings": json.dumps(settings.to_dict(), sort_keys=True, default=str),
                "class": [family.__qualname__, asdict(FileState.of(code))],
                "threads": torch.get_num_threads(),
                **_machine(),
            },
        )

    def read(self) -> Proof | None:
        return self.record.read(Proof.of_json)

    def keep(self, proof: Proof) -> None:
        self.record.write(proof.in_json())

    def forget(self) -> None:
        self.record.forget()


@cache
def _machine() -> dict[str, Any]:
    """Return versions, processor features and environment variables that affect results on this machine."""
    from llvmlite import binding  # type: ignore[import-untyped]

    return {
        "hdtool": [metadata.version("hdtool"), _source_hash()],
        "python": sys.version,
        "system": platform.platform(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES if _is_installed(name)},
        "processor": [processor_name(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()],
        "environment": {name: text for name, text in sorted(os.environ.items()) if name.startswith(SETTINGS)},
    }


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _source_hash() -> str:
    """Return a hash of the hdtool code that loads and runs models."""
    digest = hashlib.sha256()
    for package in (hdtool.runtime, hdtool.data):
        folder = Path(str(vars(package)["__file__"])).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


@torch.inference_mode()
def logits_hash(target: Target) -> str:
    """Return a hash of the logits of a prefill and of a pass over a tree."""
    digest = hashlib.sha256()
    cache = target.allocate()
    with target.changing(), target.log.unchanged():
        after = target.prefill(cache, 0, some_context(PROOF_CONTEXT, target.vocabulary))
        digest.update(after.logits.numpy().tobytes())
        digest.update(target.verify(cache, [PROOF_TREE])[0].logits.numpy().tobytes())
    return digest.hexdigest()


def proof_of(target: Target, compact: dict[str, bool]) -> Proof | None:
    """Return the proof of a loaded target, or None if the target must be compared with Transformers at each start.

    A proof needs compiled passes without recurrent states, no compact weight that has been expanded, and logits that
    are the same in two runs.
    """
    facts = ModelFacts(target.facts.shapes, continues=target.facts.continues)
    if (
        target.compiled is None
        or target.facts != facts
        or any(is_compact(weight) and weight.expansions.count for weight in target.model.parameters())
    ):
        return None
    logits = logits_hash(target)
    return Proof(facts, compact, logits) if logits == logits_hash(target) else None
