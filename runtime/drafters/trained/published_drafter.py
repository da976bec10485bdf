"""The checkpoint of a published drafter: which kind it is, its configuration and its tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from hdtool.data.errors import HeadsError, reason_of
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.model.checkpoint.place import place_of

EAGLE3, DFLASH, ASSISTANT, MODEL = "EAGLE-3", "DFlash", "assistant", "model"
"""Kinds of drafters; the last one is any model of text."""
UNKNOWN = {
    "eagle": "an EAGLE drafter of an earlier kind",
    "medusa": "a set of Medusa heads",
    "peagle": "a P-EAGLE drafter",
}
"""Words in the class of a drafter that is not supported."""
SETTINGS = "config.json"


@dataclass(frozen=True)
class PublishedDrafter:
    """A drafter that was named by its folder or by its name on the hub."""

    name: str
    folder: Path
    settings: dict[str, Any]

    @classmethod
    def named(cls, name: str) -> PublishedDrafter:
        folder = place_of(ModelConfig(name), (SETTINGS,), weights=True)
        try:
            settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            return cls(name, folder, dict(settings))
        except (OSError, ValueError) as error:
            raise HeadsError(
                f"drafter {name} cannot be read ({SETTINGS}: {reason_of(error)}): download it again"
            ) from error

    @property
    def kind(self) -> str:
        """Which kind of drafter it is; HeadsError names one that is not supported."""
        classes = " ".join(map(str, self.settings.get("architectures") or ())).lower()
        speculator = str(self.settings.get("speculators_model_type", "")).lower()
        if "eagle3" in classes or speculator == "eagle3":
            return EAGLE3
        if "dflash" in classes + speculator or {"target_layer_ids", "block_size"} <= self.settings.keys():
            return DFLASH
        if "assistantforcausallm" in classes:
            return ASSISTANT
        for word, kind in UNKNOWN.items():
            if word in classes + speculator:
                raise HeadsError(f"drafter {self.name} is {kind}, which is not supported: name another one")
        return MODEL

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint, on the host."""
        from safetensors.torch import load_file

        found: dict[str, torch.Tensor] = {}
        files = sorted([*self.folder.glob("*.safetensors"), *self.folder.glob("pytorch_model*.bin")])
        if any(file.suffix == ".safetensors" for file in files):
            files = [file for file in files if file.suffix == ".safetensors"]
        try:
            for file in files:
                found |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        except Exception as error:  # damaged files raise many kinds
            reason = reason_of(error).split(". ")[0]
            raise HeadsError(
                f"drafter {self.name} cannot be read ({file.name}: {reason}): download it again"
            ) from error
        if not found:
            raise HeadsError(f"drafter {self.name} has no weights in {self.folder}: download it again")
        return found

    def fill(self, module: Module, tensors: dict[str, torch.Tensor]) -> None:
        """Load a module from tensors; all of its own must be among them, in its shapes."""
        own = {name: tensor for name, tensor in module.state_dict().items() if tensor is not None}
        missing = sorted(own.keys() - tensors.keys())
        other = sorted(name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape)
        if missing or other:
            what = f"lacks {missing[0]}" if missing else f"has another shape of {other[0]}"
            raise HeadsError(f"drafter {self.name} {what}, so it is of a kind that is not supported: name another one")
        module.load_state_dict({name: tensors[name] for name in own})
