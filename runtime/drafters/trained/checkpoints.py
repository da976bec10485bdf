"""Checkpoints of published drafters, and what is loaded only once for each target."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from hdtool.data.errors import HeadsError, error_reason
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.weights.checkpoint_identity import place_of

if TYPE_CHECKING:
    from hdtool.runtime.target.target import Target

T = TypeVar("T")
LOADED_BY_TARGET: WeakKeyDictionary[Target, dict[str, Any]] = WeakKeyDictionary()
"""Results of ``loaded_once`` by target and name."""


def loaded_once(target: Target, name: str, load: Callable[[], T]) -> T:
    """Return the result of ``load``, which is called only once for each target and name."""
    loaded = LOADED_BY_TARGET.setdefault(target, {})
    if name not in loaded:
        loaded[name] = load()
    return cast(T, loaded[name])


EAGLE3, DFLASH, GEMMA_ASSISTANT, SMALL_MODEL = "EAGLE-3", "DFlash", "assistant", "model"
"""Kinds of published drafters; a DSpark drafter is of kind ``DFLASH``, and ``SMALL_MODEL`` any small language model."""
UNSUPPORTED_KINDS = {
    "eagle": "an EAGLE drafter of an earlier kind",
    "medusa": "a set of Medusa heads",
    "peagle": "a P-EAGLE drafter",
}
"""Descriptions of unsupported drafters, by a word in the name of their class."""
CONFIG_FILE = "config.json"
DOWNLOAD_AGAIN, OF_THIS_MODEL = "download it again", "name a drafter of this model"
"""Advice to users whose drafter cannot be used."""


@dataclass(frozen=True)
class PublishedDrafter:
    """The checkpoint of a drafter, given by its folder or its name on the Hugging Face Hub."""

    name: str
    folder: Path
    settings: dict[str, Any]

    @classmethod
    def named(cls, name: str) -> PublishedDrafter:
        folder = place_of(ModelConfig(name), (CONFIG_FILE,), weights=True)
        try:
            settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            return cls(name, folder, dict(settings))
        except (OSError, ValueError) as error:
            raise HeadsError(
                f"drafter {name} cannot be read ({CONFIG_FILE}: {error_reason(error)}): {DOWNLOAD_AGAIN}"
            ) from error

    def refusal(self, fault: str, advice: str = "name another one") -> HeadsError:
        """Return the error for a drafter that cannot be used."""
        return HeadsError(f"drafter {self.name} {fault}: {advice}")

    @property
    def kind(self) -> str:
        """The kind of drafter; raises HeadsError if it is not supported."""
        classes = " ".join(map(str, self.settings.get("architectures") or ())).lower()
        speculator = str(self.settings.get("speculators_model_type", "")).lower()
        if "eagle3" in classes or speculator == "eagle3":
            return EAGLE3
        if (
            any(word in classes + speculator for word in ("dflash", "dspark"))
            or {"target_layer_ids", "block_size"} <= self.settings.keys()
        ):
            return DFLASH
        if "assistantforcausallm" in classes:
            return GEMMA_ASSISTANT
        for word, kind in UNSUPPORTED_KINDS.items():
            if word in classes + speculator:
                raise self.refusal(f"is {kind}, which is not supported")
        return SMALL_MODEL

    def tensors(self) -> dict[str, torch.Tensor]:
        """Load all tensors of the checkpoint into host memory; raise HeadsError if files are missing or damaged."""
        from safetensors.torch import load_file

        by_name: dict[str, torch.Tensor] = {}
        files = sorted([*self.folder.glob("*.safetensors"), *self.folder.glob("pytorch_model*.bin")])
        if any(file.suffix == ".safetensors" for file in files):
            files = [file for file in files if file.suffix == ".safetensors"]
        try:
            for file in files:
                by_name |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        except Exception as error:  # damaged files raise many kinds
            reason = error_reason(error).split(". ")[0]
            raise self.refusal(f"cannot be read ({file.name}: {reason})", DOWNLOAD_AGAIN) from error
        if not by_name:
            raise self.refusal(f"has no weights in {self.folder}", DOWNLOAD_AGAIN)
        return by_name

    def pretrained(self, auto: Any) -> Any:
        """Load the checkpoint by one of transformers' ``Auto`` classes; raise HeadsError if that fails."""
        try:
            return auto.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:  # the library raises many kinds
            raise self.refusal(f"cannot be loaded ({error_reason(error)})") from error

    def require_width(self, width: int | None, target: Target) -> None:
        """Raise HeadsError unless ``width`` is that of the target's hidden states."""
        if width != (required := int(target.config.hidden_size)):
            raise self.refusal(f"is for a model of width {width}, and this one has {required}", OF_THIS_MODEL)

    def require_vocabulary(self, size: int, target: Target) -> None:
        """Raise HeadsError unless ``size`` is that of the target's vocabulary."""
        if size != target.vocabulary:
            raise self.refusal(f"is for a model of {size} tokens, and this one has {target.vocabulary}", OF_THIS_MODEL)

    def token_ids(self, offsets: torch.Tensor | None, drafted: int, target: Target) -> torch.Tensor | None:
        """Return the target's id of each of ``drafted`` draft tokens; ``offsets`` are the differences to the draft ids.

        Return None without ``offsets``; raise HeadsError if the target does not have these tokens.
        """
        if offsets is None:
            return None
        token_ids = torch.arange(len(offsets)) + offsets.long()
        if len(offsets) != drafted or not ((token_ids >= 0) & (token_ids < target.vocabulary)).all():
            raise self.refusal("drafts tokens that this model does not have")
        return token_ids.to(target.device)

    def fill(self, module: Module, tensors: dict[str, torch.Tensor], *, known_only: bool = False) -> None:
        """Load a module's parameters from ``tensors``; raise HeadsError if one is missing or has a different shape.

        With ``known_only``, raise it for further tensors, too.
        """
        parameters = {name: tensor for name, tensor in module.state_dict().items() if tensor is not None}
        missing = sorted(parameters.keys() - tensors.keys())
        mismatched = sorted(
            name for name in parameters.keys() & tensors.keys() if parameters[name].shape != tensors[name].shape
        )
        unknown = sorted(tensors.keys() - parameters.keys()) if known_only else []
        if missing or mismatched or unknown:
            what = f"has another shape of {mismatched[0]}" if mismatched else f"has {' '.join(unknown[:1])}"
            what = f"lacks {missing[0]}" if missing else what
            raise self.refusal(f"{what}, so it is of a kind that is not supported")
        module.load_state_dict({name: tensors[name] for name in parameters})


def renamed_parameter(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a tensor's name with the first of ``prefixes`` that it begins with replaced by that prefix's value."""
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
