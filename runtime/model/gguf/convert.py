"""The conversion of a GGUF file by transformers: its configuration and tokenizer, and its weights.

The weights are written in float32, or only those that no product takes from the file itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from hdtool.data.errors import HdtoolError, ModelError
from hdtool.data.extras import install_command
from hdtool.data.gguf_header import GGUFHeader
from hdtool.runtime.model.gguf.manifest import WEIGHTS
from hdtool.runtime.model.gguf.packing import PackingPlan
from hdtool.runtime.model.gguf.read_once import read_once
from hdtool.runtime.model.gguf.rotary_scaling import restore_scaling
from hdtool.runtime.model.gguf.weights_in_turn import weights_in_turn

LIBRARIES = ("gguf", "accelerate")
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Formats of tensors that are not quantized."""
ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Tokens that end a turn or a message; transformers reads the one that ends a text."""
LINK = "model.gguf"
UNSHARDED = 1 << 60
"""Bytes of a file of weights: all are in one, which one step puts in place."""


@dataclass(frozen=True)
class Conversion:
    """A GGUF file that is whole and that transformers can be asked to read."""

    file: Path
    header: GGUFHeader

    @classmethod
    def of(cls, file: Path) -> Conversion:
        """Check the file and the libraries; raises a ``ModelError`` that states what is wrong."""
        header = GGUFHeader.read(file)
        if lacking := [name for name in LIBRARIES if not find_spec(name)]:
            needed = " and ".join(lacking)
            raise ModelError(f"{file} needs {needed}, not installed here: {install_command('gguf')}")
        from gguf import GGML_QUANT_SIZES

        header.check_whole(file, {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()})
        parts = header.values.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise ModelError(
                f"{file} is one of {parts} parts of a model: join them with llama-gguf-split --merge, and name the "
                "result"
            )
        return cls(file, header)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the checkpoint: float32 for quantized tensors, whose values no narrower dtype holds."""
        kinds = {tensor.kind for tensor in self.header.tensors}
        if not kinds <= PLAIN.keys():
            return torch.float32
        found = {PLAIN[kind] for kind in kinds}
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in found), torch.float32)

    @property
    def bytes(self) -> int:
        """The size of the converted weights, at most: transformers leaves some tensors out."""
        return sum(tensor.numbers for tensor in self.header.tensors) * self.dtype.itemsize

    def write_configuration(self, folder: Path) -> None:
        """Write the configuration, the generation settings and the tokenizer."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer, GenerationConfig

        with self._alone(folder) as (source, name), read_once():
            with self._errors_worded("configuration"):
                settings: Any = AutoConfig.from_pretrained(source, gguf_file=name)
                settings.dtype = self.dtype
                settings.eos_token_id = self._ends(settings.eos_token_id)
                # Servers choose the class by this name, which GGUF files do not have.
                settings.architectures = [cast(type, MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]).__name__]
                restore_scaling(settings, self.file, self.header)
                settings.save_pretrained(folder)
                GenerationConfig.from_model_config(settings).save_pretrained(folder)
            with self._errors_worded("tokenizer"):
                AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)

    def write_weights(self, configuration: Path, folder: Path) -> tuple[Path]:
        """Write the weights; ``configuration`` is what ``write_configuration`` wrote."""
        model = self._model(configuration, folder)
        if self.dtype != torch.float32:
            for weight in model.parameters():
                weight.data = narrowed(weight.data)
        with _progress():
            _save(model, folder)
        return (folder / WEIGHTS,)

    def write_packed(self, configuration: Path, folder: Path) -> tuple[Path, Path]:
        """Write which weights stay in the file, and the others; expanded weights that are there are not read again."""
        plan, there = PackingPlan(self.file, self.header), configuration / WEIGHTS
        if there.is_file():
            return plan.write(load_file(there).items(), folder)
        with weights_in_turn(plan.take):
            model = self._model(configuration, folder)
        if not plan.is_of(model.state_dict()):
            plan, model = PackingPlan(self.file, self.header), self._model(configuration, folder)
        return plan.write(_weights_once(model), folder)

    def _model(self, configuration: Path, folder: Path) -> Any:
        """The model in float32, as transformers reads it."""
        from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

        with self._alone(folder) as (source, name), read_once(), self._errors_worded("weights"), _progress():
            model, report = cast(
                tuple[Any, dict[str, Any]],
                AutoModelForCausalLM.from_pretrained(
                    source,
                    gguf_file=name,
                    config=AutoConfig.from_pretrained(configuration),
                    dtype=torch.float32,
                    quantization_config=GgufConfig(dequantize=True),
                    output_loading_info=True,
                ),
            )
            if lacking := sorted(report["missing_keys"]):
                raise ModelError(f"{self.file} lacks {len(lacking)} weights of its model ({lacking[0]}, …)")
        return model

    def _ends(self, found: int | list[int] | None) -> int | list[int] | None:
        """The tokens that end an answer: those that transformers read and those that end a turn."""
        ends = list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]
        ends += [token for name in ENDS if (token := self.header.values.get(name)) is not None]
        ends = list(dict.fromkeys(ends))
        return ends if len(ends) > 1 else ends[0] if ends else None

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[tuple[Path, str]]:
        """A folder with the file alone: what lies beside it, such as another tokenizer, would be read as well."""
        source = folder / "source"
        source.mkdir()
        link = source / LINK
        try:
            link.symlink_to(self.file.resolve())
        except OSError:  # a file system without links
            yield self.file.parent, self.file.name
        else:
            yield source, LINK
        finally:
            link.unlink(missing_ok=True)
            source.rmdir()

    @contextmanager
    def _errors_worded(self, part: str) -> Iterator[None]:
        try:
            yield
        except (HdtoolError, OSError):
            raise
        except Exception as error:
            reason = " ".join(str(error).split()).split(". ")[0].rstrip(".")[:300] or type(error).__name__
            raise ModelError(
                f"transformers {metadata.version('transformers')} cannot read the {part} of {self.file}, which has "
                f"architecture {self.header.architecture} ({reason}): take the model in the layout of save_pretrained"
            ) from error


def _weights_once(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model; of tied ones the first, by which the other is found."""
    seen = set()
    for name, weight in model.state_dict().items():
        place = weight.data_ptr(), weight.shape
        if place not in seen or not weight.numel():
            seen.add(place)
            yield name, weight


def _save(model: Any, folder: Path) -> None:
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder, max_shard_size=UNSHARDED)
    except SafetensorError as error:  # of a full disk, among others
        raise OSError(0, " ".join(str(error).split())) from error


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """The same numbers in 16 bits if these hold them exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal((narrow := weight.to(dtype)).to(weight.dtype), weight):
            return narrow
    return weight


@contextmanager
def _progress() -> Iterator[None]:
    """Show the bars of transformers on a terminal and nowhere else; some of them heed no setting of the library."""
    from transformers.utils import logging

    if sys.stderr is None or not sys.stderr.isatty():
        with redirect_stderr(StringIO()):
            yield
        return
    enabled = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        yield
    finally:
        if not enabled:
            logging.disable_progress_bar()
