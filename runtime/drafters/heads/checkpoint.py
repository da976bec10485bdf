"""Checkpoints of drafting heads, of all kinds.

A checkpoint consists of ``config.json`` and a safetensors file, and fits only the model that it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.data import demo
from hdtool.data.errors import FamilyError, HeadsError, error_reason
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import is_json_with, safetensors_metadata
from hdtool.runtime.drafters.heads.modules import Heads, HeadsShape, HydraHeads, MtpHeads, OutputLayer, ParallelHeads
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.settings.building import AMPHISTA, HYDRA, HYDRA_PLUS, MEDUSA, MTP_LAYER, HeadsConfig
from hdtool.runtime.settings.decoding import TAKE_HEADS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


HEADS_FORMAT = 1
SETTINGS_FILE, WEIGHTS_FILE = "config.json", "heads.safetensors"
SETTINGS_KEYS = ("model", "target", "heads", "shape", "judged", "training")
"""Keys of the settings file besides ``format``."""
METADATA = {"format": "pt", "writer": "hdtool"}
"""Metadata of the weights file."""
SAVED_DTYPE = torch.float16
"""Dtype of saved weights; half precision is enough, as drafts do not change the output."""
ARCHITECTURES: Mapping[str, Callable[[HeadsShape, HeadsConfig], Heads]] = {
    AMPHISTA: ParallelHeads,
    MEDUSA: ParallelHeads,
    HYDRA: HydraHeads,
    HYDRA_PLUS: HydraHeads,
    MTP_LAYER: MtpHeads,
}
"""The class that implements each kind of heads."""
EXACT_SVD_WIDTH = 1024
"""Size of a matrix's smaller dimension up to which the SVD is exact for any rank; larger ones would take minutes."""


@dataclass(frozen=True)
class EvalResult:
    """Accuracy, calibration and best static tree of drafting heads on held-out text."""

    top: dict[str, list[float]] = field(default_factory=dict)
    """Top-1, top-5 and top-10 accuracy (keys ``1``, ``5`` and ``10``) of each head."""
    places: int = 0
    """Number of evaluated positions."""
    tree: list[list[int]] = field(default_factory=list)
    """Nodes of the static tree, best first. Each node is a path with one rank per head, from the first head on."""
    gains: list[float] = field(default_factory=list)
    """Share of positions at which each node of the static tree is accepted."""
    odds: list[list[float]] = field(default_factory=list)
    """How often a token is accepted after an accepted path, by head and probability bucket."""


@dataclass(frozen=True)
class SavedHeads:
    """Drafting heads with their evaluation and the identity of their target."""

    heads: Heads
    target: str
    """Fingerprint of the model that the heads were trained on."""
    model: str
    """Name of the model that the heads were trained on."""
    evaluation: EvalResult
    training: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write the weights, then the settings, which mark the folder as complete; raise HeadsError if that fails."""
        from safetensors.torch import save

        settings = {
            "format": HEADS_FORMAT,
            "model": self.model,
            "target": self.target,
            "heads": asdict(self.heads.config),
            "shape": asdict(self.heads.shape),
            "judged": asdict(self.evaluation),
            "training": self.training,
        }
        weights = {name: _for_file(weight) for name, weight in self.heads.state_dict().items()}
        weights_file, settings_file = output_files(folder)
        weights_file.write(save(weights, METADATA))
        settings_file.write(_formatted(settings) + "\n")


def _for_file(weight: torch.Tensor) -> torch.Tensor:
    dtype = SAVED_DTYPE if weight.is_floating_point() else weight.dtype
    return weight.detach().to("cpu", dtype).contiguous()


def output_files(folder: Path) -> tuple[OutputFile, OutputFile]:
    """Return the output files for weights and settings; writing them overwrites only files that hdtool wrote."""
    is_settings = is_json_with(SETTINGS_KEYS, HEADS_FORMAT)

    def is_weights(path: Path) -> bool:
        # Earlier versions wrote no metadata.
        settings = folder / SETTINGS_FILE
        return safetensors_metadata(path).get("writer") == METADATA["writer"] or (
            settings.is_file() and is_settings(settings)
        )

    advice = "make room, choose another --out, or move it away, and run the command again"
    return (
        OutputFile(folder / WEIGHTS_FILE, "a file of drafting heads", is_weights, HeadsError, advice),
        OutputFile(folder / SETTINGS_FILE, "the settings of drafting heads", is_settings, HeadsError, advice),
    )


def load_heads(folder: Path, model: PreTrainedModel) -> SavedHeads:
    """Load heads from a folder onto the model's device.

    Raise HeadsError if they are missing or damaged, or were trained on another model.
    """
    from safetensors.torch import load_file

    settings = read_settings(folder)
    if (model_fingerprint := fingerprint(model)) != settings["target"]:
        raise HeadsError(
            f"the heads in {folder} were trained on another model ({settings['model']}, {settings['target']}; "
            f"this one is {model_fingerprint}): train some for this one with hdtool train-heads"
        )
    try:
        config = HeadsConfig.of_checkpoint(settings["heads"])
        heads = ARCHITECTURES[config.kind](HeadsShape(**settings["shape"]), config)
        heads.load_state_dict(load_file(folder / WEIGHTS_FILE))
        _check_token_ids(heads)
        evaluation = EvalResult(**settings["judged"])
    except FileNotFoundError:
        raise HeadsError(f"{folder / WEIGHTS_FILE} is missing: train the heads again with hdtool train-heads") from None
    except Exception as error:  # damaged files raise many kinds
        raise HeadsError(
            f"{folder} cannot be read ({error_reason(error)}): train the heads again with hdtool train-heads"
        ) from error
    output = output_layer(model)
    torch.nn.Module.to(heads, output.weight.device, model.dtype)
    heads.requires_grad_(False).eval()
    if isinstance(heads, MtpHeads) and not config.draft_vocabulary:
        heads.share(output)
    return SavedHeads(heads, settings["target"], settings["model"], evaluation, settings["training"])


def _check_token_ids(heads: Heads) -> None:
    """Raise ValueError if the draft vocabulary has ids that the model lacks: drafting one would crash generation."""
    ids = heads.token_ids
    if ids is not None and not ((ids >= 0) & (ids < heads.shape.vocabulary)).all():
        raise ValueError("the draft vocabulary has token ids that the model does not have")


def new_heads(
    model: PreTrainedModel,
    hidden: int,
    vocabulary: int,
    config: HeadsConfig,
    token_ids: npt.NDArray[np.int64] | None = None,
) -> Heads:
    """Return untrained heads, initialized to give the target's next-token logits (approximately if low-rank).

    ``token_ids`` are the target's ids of the draft vocabulary, if ``config`` has one. Raise FamilyError for a model
    without an output layer.
    """
    settings = model.config.get_text_config(decoder=True)
    target_heads = int(getattr(settings, "num_attention_heads", 1))
    attention = next(number for number in range(min(target_heads, hidden // 2), 0, -1) if hidden % (2 * number) == 0)
    mlp = config.mlp or getattr(settings, "intermediate_size", None) or 4 * hidden
    shape = HeadsShape(hidden, vocabulary, embedding_width(model), attention, int(mlp))
    heads = ARCHITECTURES[config.kind](shape, config)
    weight = output_layer(model).weight.detach()
    if token_ids is not None:
        assert heads.token_ids is not None
        heads.token_ids.copy_(torch.from_numpy(token_ids))
        weight = weight[heads.token_ids.to(weight.device)]
    _init_outputs(heads, weight)
    if isinstance(heads, MtpHeads):
        heads.outputs.requires_grad_(False)
        if token_ids is None:
            heads.share(output_layer(model))
    return heads


def output_layer(model: PreTrainedModel) -> Any:
    layer = model.get_output_embeddings()
    if getattr(layer, "weight", None) is None:
        kind = model.config.model_type
        raise FamilyError(
            f"models of type {kind!r} cannot have heads: this one has no output layer to initialize them from"
        )
    return layer


def embedding_width(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[1])


@torch.no_grad()
def _init_outputs(heads: Heads, weight: torch.Tensor) -> None:
    """Initialize the output layers with the target's output weights, approximated if ``rank`` is not 0."""
    outputs = [output for output in heads.outputs if isinstance(output, OutputLayer)]
    if not heads.config.rank:
        for output in outputs:
            output.up.weight.copy_(weight)
        return
    exact = min(weight.shape) <= max(4 * heads.config.rank, EXACT_SVD_WIDTH)
    factors = torch.linalg.svd(weight.float(), full_matrices=False) if exact else None
    left, sizes, right = factors or _low_rank_factors(weight.float(), heads.config.rank)
    rank = min(heads.config.rank, len(sizes))
    root = sizes[:rank].sqrt()
    for output in outputs:
        assert output.down is not None
        output.down.weight.zero_()
        output.up.weight.zero_()
        output.down.weight[:rank] = root[:, None] * right[:rank]
        output.up.weight[:, :rank] = left[:, :rank] * root


def _low_rank_factors(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    left, sizes, right = torch.svd_lowrank(weight, q=min(*weight.shape, 2 * rank), niter=4)
    return left, sizes, right.T


def read_settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise HeadsError(
            f"{folder} holds no heads: train some with hdtool train-heads, or name the folder of some with --heads"
        ) from None
    except (OSError, ValueError) as error:
        raise HeadsError(f"{folder / SETTINGS_FILE} cannot be read ({error}): train the heads again") from None
    format_number = settings.get("format") if isinstance(settings, dict) else None
    if format_number != HEADS_FORMAT or not set(SETTINGS_KEYS) <= settings.keys():
        raise HeadsError(
            f"{folder / SETTINGS_FILE} has a format that this hdtool does not read "
            f"({format_number}, not {HEADS_FORMAT}): train the heads "
            "again with hdtool train-heads"
        )
    return dict(settings)


def _formatted(value: Any, depth: int = 0) -> str:
    """Return ``value`` as JSON, with each list on a single line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    inner = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(key)}: {_formatted(value[key], depth + 1)}" for key in value)
    return f"{{\n{inner}\n{' ' * depth}}}"


def heads_for(method: str, folders: Sequence[str], model: PreTrainedModel) -> SavedHeads:
    """Load heads for a method from the first of ``folders`` whose heads it can use.

    Without ``folders``, choose among the heads of the demo, which fit only its model. Raise HeadsError if none fits.
    """
    wanted = kinds_for(method)
    places = _heads_folders(folders, model)
    kinds = [kind_of(place) for place in places]
    for place, kind in zip(places, kinds, strict=True):
        if kind in wanted:
            return load_heads(place, model)
    if folders:
        available = ", ".join(f"{kind} heads in {place}" for kind, place in zip(kinds, places, strict=True))
        raise HeadsError(
            f"method {method} needs {' or '.join(wanted)} heads (found: {available}): name a folder that holds some"
        )
    option = "" if wanted[0] == AMPHISTA else f" --kind {wanted[0]}"
    raise HeadsError(
        f"method {method} needs trained heads, and none are given: train some with hdtool train-heads{option} and "
        "name their folder with --heads"
    )


def methods_with_heads(folders: Sequence[str], model: PreTrainedModel) -> set[str]:
    """Return the methods that can use the heads in ``folders`` or, without ``folders``, the demo's for ``model``."""
    kinds = {kind_of(place) for place in _heads_folders(folders, model)}
    return {method for method in TAKE_HEADS if kinds & set(kinds_for(method))}


def kinds_for(method: str) -> tuple[str, ...]:
    """Return the kinds of heads that a method takes."""
    kind = method.removeprefix("hd+")
    return (HYDRA, HYDRA_PLUS) if kind == HYDRA else (kind,)


def kind_of(folder: Path) -> str:
    return HeadsConfig.of_checkpoint(read_settings(folder)["heads"]).kind


def _heads_folders(folders: Sequence[str], model: PreTrainedModel) -> list[Path]:
    return [Path(folder).expanduser() for folder in folders] or shipped_heads(model)


def shipped_heads(model: PreTrainedModel) -> list[Path]:
    """Return the folders of the demo's heads if this is the demo's model, else an empty list."""
    target = fingerprint(model)
    return [folder for folder in demo.HEADS if read_settings(folder)["target"] == target]
