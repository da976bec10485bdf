"""Drafting heads on disk: a folder with ``config.json`` and safetensors, of one target and no other."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hdtool.data.errors import FamilyError, HeadsError, reason_of
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import json_with, safetensors_metadata
from hdtool.runtime.config import HeadsConfig
from hdtool.runtime.drafters.heads.modules import Heads, HeadsShape, OutputLayer
from hdtool.runtime.environment import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = 1
SETTINGS, WEIGHTS = "config.json", "heads.safetensors"
KEYS = ("model", "target", "heads", "shape", "judged", "training")
"""Of the settings, besides the format."""
METADATA = {"format": "pt", "writer": "hdtool"}
"""Of the weights."""
KEPT_AS = torch.float16
"""Drafts decide nothing, so half the bytes do."""
QUICK = 1024
"""Matrices of this width are taken apart exactly; larger ones would take minutes."""


@dataclass(frozen=True)
class EvalResult:
    """What heads are worth, by texts that they did not learn from."""

    top: dict[str, list[float]] = field(default_factory=dict)
    """How often the token that came was among a head's best, head by head: ``1``, ``5`` and ``10``."""
    places: int = 0
    """Where that was looked at."""
    tree: list[list[int]] = field(default_factory=list)
    """The nodes of the static tree, best first: for each depth down to the node, which of a head's best it is."""
    gains: list[float] = field(default_factory=list)
    """Of each of these nodes: how often the target takes it."""
    odds: list[list[float]] = field(default_factory=list)
    """By head and by how likely the head thought a token: how often it came, of those behind a path that was right."""


@dataclass(frozen=True)
class SavedHeads:
    """Heads, and what is known of them."""

    heads: Heads
    target: str
    """The fingerprint of the model that they were trained on."""
    model: str
    """Its name."""
    judged: EvalResult
    training: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Weights first: the settings are there only once the heads are whole."""
        from safetensors.torch import save

        told = {
            "format": FORMAT,
            "model": self.model,
            "target": self.target,
            "heads": asdict(self.heads.config),
            "shape": asdict(self.heads.shape),
            "judged": asdict(self.judged),
            "training": self.training,
        }
        weights = {name: weight.detach().to("cpu", KEPT_AS) for name, weight in self.heads.state_dict().items()}
        weights_file, settings_file = output_files(folder)
        weights_file.write(save({name: weight.contiguous() for name, weight in weights.items()}, METADATA))
        settings_file.write(_written(told) + "\n")


def output_files(folder: Path) -> tuple[OutputFile, OutputFile]:
    """The weights and the settings of a folder, replaced only if hdtool wrote them."""
    is_settings = json_with(KEYS, FORMAT)

    def is_weights(path: Path) -> bool:
        # Earlier versions wrote no metadata.
        settings = folder / SETTINGS
        return safetensors_metadata(path).get("writer") == METADATA["writer"] or (
            settings.is_file() and is_settings(settings)
        )

    advice = "make room, choose another --out, or move it away, and run the command again"
    return (
        OutputFile(folder / WEIGHTS, "a file of drafting heads", is_weights, HeadsError, advice),
        OutputFile(folder / SETTINGS, "the settings of drafting heads", is_settings, HeadsError, advice),
    )


def load_heads(folder: Path, model: PreTrainedModel) -> SavedHeads:
    """The heads of a folder, ready to draft for ``model``; for any other than theirs they are refused."""
    from safetensors.torch import load_file

    told = settings_of(folder)
    if (found := fingerprint(model)) != told["target"]:
        raise HeadsError(
            f"the heads in {folder} were trained on another model ({told['model']}, {told['target']}; this one is "
            f"{found}): train some for this one with hdtool train-heads"
        )
    try:
        heads = Heads(HeadsShape(**told["shape"]), HeadsConfig(**told["heads"]))
        heads.load_state_dict(load_file(folder / WEIGHTS))
        judged = EvalResult(**told["judged"])
    except FileNotFoundError:
        raise HeadsError(f"{folder / WEIGHTS} is missing: train the heads again with hdtool train-heads") from None
    except Exception as error:  # whatever a damaged file makes the libraries trip over
        raise HeadsError(
            f"{folder} cannot be read ({reason_of(error)}): train the heads again with hdtool train-heads"
        ) from error
    place = output_layer(model).weight
    torch.nn.Module.to(heads, place.device, model.dtype)
    heads.requires_grad_(False).eval()
    return SavedHeads(heads, told["target"], told["model"], judged, told["training"])


def new_heads(model: PreTrainedModel, hidden: int, vocabulary: int, config: HeadsConfig) -> Heads:
    """Heads that have learned nothing yet but to repeat what the target itself would say next."""
    settings = model.config.get_text_config(decoder=True)
    own = int(getattr(settings, "num_attention_heads", 1))
    attention = next(number for number in range(min(own, hidden // 2), 0, -1) if hidden % (2 * number) == 0)
    mlp = config.mlp or getattr(settings, "intermediate_size", None) or 4 * hidden
    shape = HeadsShape(hidden, vocabulary, embedding_width(model), attention, int(mlp))
    heads = Heads(shape, config)
    _begin_outputs(heads, output_layer(model).weight.detach())
    return heads


def output_layer(model: PreTrainedModel) -> Any:
    layer = model.get_output_embeddings()
    if getattr(layer, "weight", None) is None:
        kind = model.config.model_type
        raise FamilyError(
            f"models of type {kind!r} cannot have heads: this one shows no output layer to begin them from"
        )
    return layer


def embedding_width(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[1])


@torch.no_grad()
def _begin_outputs(heads: Heads, weight: torch.Tensor) -> None:
    """From the target's output layer, or from its best approximation of the rank."""
    outputs = [output for output in heads.outputs if isinstance(output, OutputLayer)]
    if not heads.config.rank:
        for output in outputs:
            output.up.weight.copy_(weight)
        return
    exact = min(weight.shape) <= max(4 * heads.config.rank, QUICK)
    taken_apart = torch.linalg.svd(weight.float(), full_matrices=False) if exact else None
    left, sizes, right = taken_apart or _of_low_rank(weight.float(), heads.config.rank)
    rank = min(heads.config.rank, len(sizes))
    root = sizes[:rank].sqrt()
    for output in outputs:
        assert output.down is not None
        output.down.weight.zero_()
        output.up.weight.zero_()
        output.down.weight[:rank] = root[:, None] * right[:rank]
        output.up.weight[:, :rank] = left[:, :rank] * root


def _of_low_rank(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    left, sizes, right = torch.svd_lowrank(weight, q=min(*weight.shape, 2 * rank), niter=4)
    return left, sizes, right.T


def settings_of(folder: Path) -> dict[str, Any]:
    try:
        told = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise HeadsError(
            f"{folder} holds no heads: train some with hdtool train-heads, or name the folder of some with --heads"
        ) from None
    except (OSError, ValueError) as error:
        raise HeadsError(f"{folder / SETTINGS} cannot be read ({error}): train the heads again") from None
    found = told.get("format") if isinstance(told, dict) else None
    if found != FORMAT or not set(KEYS) <= told.keys():
        raise HeadsError(
            f"{folder / SETTINGS} is of no format that this hdtool reads ({found}, not {FORMAT}): train the heads "
            "again with hdtool train-heads"
        )
    return dict(told)


def _written(told: Any, depth: int = 0) -> str:
    """JSON with every list of numbers on one line."""
    if not isinstance(told, dict) or not told:
        return json.dumps(told, ensure_ascii=False)
    inner = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(key)}: {_written(told[key], depth + 1)}" for key in told)
    return f"{{\n{inner}\n{' ' * depth}}}"
