"""Converts a GGUF file with transformers: configuration, tokenizer and weights.

The file's header is parsed only once, as it is large: SmolLM2's has 150,000 values. For most architectures transformers
unpacks all tensors into a dictionary before it fills the model; for a few it converts them one by one. Both code paths
are patched to pass each weight to a callback. If the callback takes the weight, a single expanded zero replaces it in
the model, which limits memory use.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module, metadata
from io import StringIO
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file

from hdtool.data.errors import HdtoolError, ModelError
from hdtool.data.gguf_header import GGUFHeader
from hdtool.runtime.model.damaged_weights import WeightCheck
from hdtool.runtime.model.gguf import gpt_oss
from hdtool.runtime.model.gguf.converted_folder import WEIGHTS
from hdtool.runtime.model.gguf.packing import PackingPlan, unpacked

MISREAD = f"{gpt_oss.ARCHITECTURE}.{gpt_oss.SCALING}"
"""Prefix of the names of settings that transformers misreads and that are therefore hidden from it."""


@contextmanager
def read_once() -> Iterator[None]:
    """In this block, parse headers and build tensor name maps only once, and free mapped pages after each tensor."""
    import gguf

    maps: list[mmap.mmap] = []

    class Reader(gguf.GGUFReader):
        """A GGUF reader that slices a plain array, because slicing a ``memmap`` takes five times as long."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            for name in [name for name in self.fields if name.startswith(MISREAD)]:
                del self.fields[name]

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)
            if isinstance(file_map := getattr(mapped, "_mmap", None), mmap.mmap):
                maps.append(file_map)

    def dequantize(*arguments: Any, really: Any = gguf.dequantize) -> Any:
        try:
            return really(*arguments)
        finally:
            for mapped in maps:  # otherwise its pages stay in memory beside the expanded values
                mapped.madvise(mmap.MADV_DONTNEED)

    names = cache(gguf.get_tensor_name_map)
    changed: dict[str, Any] = {"dequantize": dequantize} if hasattr(mmap, "MADV_DONTNEED") else {}
    with patch.multiple(gguf, **changed, GGUFReader=cache(Reader), get_tensor_name_map=names):
        yield


FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
FLOAT32 = 0
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE scaling of all Llama models since 3.1; only the factor differs."""


def restore_settings(settings: Any, file: Path, header: GGUFHeader) -> None:
    """Restore the settings that transformers doesn't read from a GGUF file; print a note if a RoPE scaling is unknown.

    These are some settings of gpt-oss, and the RoPE scaling of Llama 3, for which GGUF files have no setting, only a
    tensor with the divisor of each frequency.
    """
    if header.architecture == gpt_oss.ARCHITECTURE:
        for name, value in gpt_oss.settings_of(header).items():
            setattr(settings, name, value)
    scaling = header.values.get(f"{header.architecture}.rope.scaling.type", "none")
    factors = [tensor for tensor in header.tensors if tensor.name in FACTORS]
    is_read = header.architecture == gpt_oss.ARCHITECTURE and scaling == gpt_oss.SCALING_TYPE
    if not factors and (is_read or scaling == "none"):
        return
    rope = dict(getattr(settings, "rope_parameters", None) or {})
    if scaling == "none" and [tensor.name for tensor in factors] == [FACTORS[0]] and factors[0].kind == FLOAT32:
        divisors = np.fromfile(file, "<f4", factors[0].numbers, offset=header.data + factors[0].offset)
        factor = round(float(divisors.max(initial=1)), 3)
        if rope.get("rope_type") == "default" and _are_of_llama_3(divisors, rope["rope_theta"], factor):
            settings.rope_parameters = {**rope, **LLAMA_3, "rope_type": "llama3", "factor": factor}
            return
    what = factors[0].name if factors else f"of type {scaling}"
    print(
        f"note: {file} scales its rotary positions ({what}), which transformers {metadata.version('transformers')} "
        "does not read: answers differ from those of the original model",
        file=sys.stderr,
    )


def _are_of_llama_3(divisors: np.ndarray[Any, np.dtype[np.float32]], theta: float, factor: float) -> bool:
    """Return True if ``divisors`` are Llama 3's, which go from ``factor`` for low frequencies to 1 for high ones."""
    wavelengths = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    low, high = LLAMA_3["low_freq_factor"], LLAMA_3["high_freq_factor"]
    share = (LLAMA_3["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    share = np.clip(share, 0, 1)
    return bool(np.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-3))


Take = Callable[[str, torch.Tensor], bool]
"""Callback that takes a weight's name and value, and returns True to drop the weight from the model."""
Function = Callable[..., Any]
SET_PARAMETER = "core_model_loading", "set_param_for_module"
LOAD_CHECKPOINT = "modeling_gguf_pytorch_utils", "load_gguf_checkpoint"
"""Modules and names of transformers' functions to patch. If they are missing, all weights are in memory at once."""


@contextmanager
def weights_in_turn(take: Take) -> Iterator[None]:
    """In this block, call ``take`` on each weight that transformers reads; if it returns True, keep only zeros."""
    import gguf

    with ExitStack() as patches:
        patches.enter_context(patch.object(gguf, "dequantize", partial(unpacked, gguf.dequantize)))
        # Otherwise threads read ahead without limit.
        patches.enter_context(patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"))
        for (module, name), wrapped in ((SET_PARAMETER, _putting), (LOAD_CHECKPOINT, _reading)):
            with suppress(ImportError):
                module_ = import_module(f"transformers.{module}")
                if hasattr(module_, name):
                    patches.enter_context(patch.object(module_, name, wrapped(getattr(module_, name), take)))
        yield


def _putting(put: Function, take: Take) -> Function:
    """Wrap ``put``, which sets a weight of the model, to pass the weight to ``take`` afterwards."""

    def put_in_turn(model: Any, name: str, *arguments: Any, **options: Any) -> None:
        put(model, name, *arguments, **options)
        path, _, last = name.rpartition(".")
        weight = dict(model.get_submodule(path).named_parameters(recurse=False)).get(last)
        if weight is not None and not weight.is_meta and take(name, weight.detach()):
            weight.data = _zeros(weight.shape)

    return put_in_turn


def _reading(read: Function, take: Take) -> Function:
    """Wrap ``read``, which unpacks a file, to pass each tensor to ``take`` and return zeros for those that it drops."""
    unpacking: Any = _unpacking()

    def read_in_turn(*arguments: Any, **options: Any) -> dict[str, Any]:
        taken: dict[str, tuple[int, ...]] = {}
        processors = {name: _processor(kind, take, taken) for name, kind in unpacking.TENSOR_PROCESSORS.items()}
        processor = _processor(unpacking.TensorProcessor, take, taken)
        with patch.dict(unpacking.TENSOR_PROCESSORS, processors), patch.object(unpacking, "TensorProcessor", processor):
            content: dict[str, Any] = read(*arguments, **options)
        content.get("tensors", {}).update((name, _zeros(shape)) for name, shape in taken.items())
        return content

    return read_in_turn


def _processor(kind: type[Any], take: Take, taken: dict[str, tuple[int, ...]]) -> type[Any]:
    class InTurn(kind):  # type: ignore[misc]
        def process(self, weights: Any, name: str, **options: Any) -> Any:
            tensor = super().process(weights=weights, name=name, **options)
            place = options["tensor_key_mapping"].get(tensor.name)
            # Tensors that are not unpacked are views of the file, and not writable.
            if place is None or not tensor.weights.flags.writeable:
                return tensor
            if not take(place, torch.from_numpy(tensor.weights)):
                return tensor
            taken[place] = tensor.weights.shape
            return tensor._replace(name="")  # transformers skips tensors whose name maps to no weight

    return InTurn


def _unpacking() -> Any:
    return import_module(f"transformers.{LOAD_CHECKPOINT[0]}")


@contextmanager
def _gpt_oss_experts() -> Iterator[None]:
    """In this block, make transformers find the experts of gpt-oss, whose tensors it expects under other names."""
    unpacking = _unpacking()
    processor = _experts_processor(unpacking.TensorProcessor)
    with patch.dict(unpacking.TENSOR_PROCESSORS, {gpt_oss.ARCHITECTURE: processor}):
        yield


def _experts_processor(kind: type[Any]) -> type[Any]:
    class Experts(kind):  # type: ignore[misc]
        def __init__(self, config: Any = None) -> None:
            super().__init__(config=config)
            self._tensors = gpt_oss.ExpertTensors()

        def perform_fallback_tensor_mapping(
            self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
        ) -> None:
            if name := gpt_oss.tensor_name(qual_name + hf_name):
                gguf_to_hf_name_map[name] = qual_name + hf_name

        def process(self, weights: Any, name: str, **options: Any) -> Any:
            name, weights = self._tensors.read(name, weights)
            if name not in options["tensor_key_mapping"]:  # the model's parameter has a name without this suffix
                name = name.removesuffix(".weight")
            return super().process(weights=weights, name=name, **options)

    return Experts


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(()).expand(shape)


PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Dtypes of unquantized tensor formats, by type number."""
END_OF_TURN_SETTINGS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Settings with the tokens that end a turn or message; transformers reads only the token that ends a text."""
LINK = "model.gguf"
MAX_SHARD_SIZE = 1 << 60
"""Maximum size of a weight file in bytes, so large that all weights are in a single file."""


@dataclass(frozen=True)
class Conversion:
    """Converts a GGUF file. Create instances with ``of``, which checks the file."""

    file: Path
    header: GGUFHeader

    @classmethod
    def of(cls, file: Path) -> Conversion:
        """Check the file; raise a ``ModelError`` if it cannot be converted."""
        from gguf import GGML_QUANT_SIZES

        header = GGUFHeader.read(file)
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
        """Dtype of the converted weights: float32 if any are quantized, as no narrower dtype holds their values."""
        kinds = {tensor.kind for tensor in self.header.tensors}
        if not kinds <= PLAIN.keys():
            return torch.float32
        dtypes = {PLAIN[kind] for kind in kinds}
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), torch.float32)

    @property
    def bytes(self) -> int:
        """Upper bound on the size of the converted weights in bytes; transformers leaves some tensors out."""
        return sum(tensor.numbers for tensor in self.header.tensors) * self.dtype.itemsize

    def write_configuration(self, folder: Path) -> None:
        """Write the configuration, generation settings and tokenizer to ``folder``."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer, GenerationConfig

        with self._alone(folder) as (source, name), read_once():
            with self._errors_worded("configuration"):
                settings: Any = AutoConfig.from_pretrained(source, gguf_file=name, trust_remote_code=False)
                settings.dtype = self.dtype
                settings.eos_token_id = self._ends(settings.eos_token_id)
                # Servers choose the model class by this name, which GGUF files lack.
                settings.architectures = [cast(type, MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]).__name__]
                restore_settings(settings, self.file, self.header)
                settings.save_pretrained(folder)
                generation = GenerationConfig.from_model_config(settings)
            with self._errors_worded("tokenizer"):
                tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=name, trust_remote_code=False)
                tokenizer.save_pretrained(folder)
            if self.header.architecture == gpt_oss.ARCHITECTURE:
                vocabulary = tokenizer.get_vocab()
                named = [vocabulary[token] for token in gpt_oss.END_TOKENS if token in vocabulary]
                generation.eos_token_id = self._ends(generation.eos_token_id, named)
            generation.save_pretrained(folder)

    def write_weights(self, configuration: Path, folder: Path) -> tuple[Path]:
        """Write all weights to ``folder``; ``configuration`` is a folder written by ``write_configuration``."""
        model = self._model(configuration, folder)
        WeightCheck(self.file).finish(_weights_once(model))
        if self.dtype != torch.float32:
            for weight in model.parameters():
                weight.data = narrow_if_exact(weight.data)
        with _progress():
            _save(model, folder)
        return (folder / WEIGHTS,)

    def write_packed(self, configuration: Path, folder: Path) -> tuple[Path, Path]:
        """Write the packing plan and the weights that can't stay packed to ``folder``.

        ``configuration`` was written by ``write_configuration``; if it also has converted weights, they are reused.
        """
        plan, there = PackingPlan(self.file, self.header), configuration / WEIGHTS
        if there.is_file():
            return plan.write(load_file(there).items(), folder)
        check = WeightCheck(self.file)

        def take(name: str, weight: torch.Tensor) -> bool:
            check.refuse_damaged(name, weight)
            return plan.take(name, weight)

        with weights_in_turn(take):
            model = self._model(configuration, folder)
        if not plan.is_of(model.state_dict()):
            plan, model = PackingPlan(self.file, self.header), self._model(configuration, folder)
        check.finish(_weights_once(model))
        return plan.write(_weights_once(model), folder)

    def _model(self, configuration: Path, folder: Path) -> Any:
        """Load the model in float32 with transformers; raise a ``ModelError`` if the file lacks weights."""
        from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

        with (
            self._alone(folder) as (source, name),
            read_once(),
            _gpt_oss_experts(),
            self._errors_worded("weights"),
            _progress(),
        ):
            model, report = cast(
                tuple[Any, dict[str, Any]],
                AutoModelForCausalLM.from_pretrained(
                    source,
                    gguf_file=name,
                    config=AutoConfig.from_pretrained(configuration, trust_remote_code=False),
                    trust_remote_code=False,
                    dtype=torch.float32,
                    quantization_config=GgufConfig(dequantize=True),
                    output_loading_info=True,
                ),
            )
            if lacking := sorted(report["missing_keys"]):
                raise ModelError(f"{self.file} lacks {len(lacking)} weights of its model ({lacking[0]}, …)")
        return model

    def _ends(self, token_ids: int | list[int] | None, others: Sequence[int] = ()) -> int | list[int] | None:
        """Return the token ids that end an answer: ``token_ids``, ``others`` and the file's end-of-turn tokens."""
        ends = list(token_ids) if isinstance(token_ids, (list, tuple)) else [] if token_ids is None else [token_ids]
        ends += [token for name in END_OF_TURN_SETTINGS if (token := self.header.values.get(name)) is not None]
        ends = list(dict.fromkeys([*ends, *others]))
        return ends if len(ends) > 1 else ends[0] if ends else None

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[tuple[Path, str]]:
        """Yield ``(folder, name)``: a folder that contains only a link to the file, and the link's name.

        Otherwise transformers would also read neighboring files, such as another tokenizer. If the file system has no
        symbolic links, yield the file's own folder and name.
        """
        source = folder / "source"
        source.mkdir()
        link = source / LINK
        try:
            link.symlink_to(self.file.resolve())
        except OSError:  # the file system has no symbolic links
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
    """Yield the name and value of each weight of a model; tied weights are yielded once, under the first name."""
    seen = set()
    for name, weight in model.state_dict().items():
        place = weight.data_ptr(), weight.shape
        if place not in seen or not weight.numel():
            seen.add(place)
            yield name, weight


def _save(model: Any, folder: Path) -> None:
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    except SafetensorError as error:  # such as a full disk
        raise OSError(0, " ".join(str(error).split())) from error


def narrow_if_exact(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in bfloat16 or float16 if that represents it exactly, otherwise unchanged."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal((narrow := weight.to(dtype)).to(weight.dtype), weight):
            return narrow
    return weight


@contextmanager
def _progress() -> Iterator[None]:
    """In this block, show transformers' progress bars only if stderr is a terminal.

    Otherwise stderr is discarded, because some bars ignore the library's setting.
    """
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
