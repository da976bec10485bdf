"""Which weights of a model can be computed in the blocks of its GGUF file, and in what row order.

Families differ in names and row order, so neither is relied on: a weight stays packed if each of its float32 rows, as
transformers reads the file, equals a row of one of the file's tensors bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import Parameter
from transformers import GenerationConfig

from hdtool.data.errors import ModelError
from hdtool.data.gguf_header import GGUFHeader, GGUFTensor
from hdtool.runtime.kernels.compact_weight import CompactWeight, as_parameter, is_compact
from hdtool.runtime.kernels.compiled import return_free_memory
from hdtool.runtime.kernels.gemm import COLUMN_MULTIPLE
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_GGUF_TYPE
from hdtool.runtime.kernels.packed_matrix import PackedExperts, PackedMatrix
from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16
from hdtool.runtime.model.gguf.converted_folder import PACKING, PLAN, REST
from hdtool.runtime.model.transformers_internals import text_class

PART = 1 << 22
"""Numbers that are expanded at a time while rows are compared."""
DIGEST = 16
"""Bytes of the hash of a row."""
ORDER = ".rows"
"""Suffix of the tensor with a weight's row order in the file."""


JOINED = ("gpt-oss",)
"""Architectures whose experts have gates and ups apart in the file, and row by row in the model."""


@dataclass(frozen=True)
class PackedTensor:
    """Where a GGUF file has the blocks of a weight."""

    kind: int
    offset: int
    """Bytes from the start of the file."""
    outs: int
    columns: int
    ordered: bool
    """True if the file has the rows in the weight's order."""
    experts: int = 0
    """How many experts have as many of its rows each; 0 for a matrix."""

    @property
    def bytes(self) -> int:
        return self.outs * FORMATS_BY_GGUF_TYPE[self.kind].row_bytes(self.columns)

    def of(self, content: torch.Tensor) -> PackedMatrix:
        """The matrix in the content of the file; the rows are in the order of the file."""
        blocks = content[self.offset : self.offset + self.bytes].view(self.outs, -1)
        return PackedMatrix(blocks, FORMATS_BY_GGUF_TYPE[self.kind])


def packable(header: GGUFHeader) -> list[PackedTensor]:
    """Tensors of a file that the compiled matmul takes as they are."""
    tensors = []
    for tensor in header.tensors:
        if EXPANDS_FLOAT16 and tensor.kind in FORMATS_BY_GGUF_TYPE and _fits(tensor, header.architecture):
            *experts, out_features, columns = tensor.shape
            rows, number = out_features * prod(experts), sum(experts)
            tensors.append(PackedTensor(tensor.kind, header.data + tensor.offset, rows, columns, True, number))
    return tensors


def _fits(tensor: GGUFTensor, architecture: str) -> bool:
    columns, dims = tensor.shape[-1], 2 if architecture in JOINED else 3
    is_whole = columns % max(COLUMN_MULTIPLE, FORMATS_BY_GGUF_TYPE[tensor.kind].numbers) == 0
    return 2 <= len(tensor.shape) <= dims and prod(tensor.shape) > 0 and is_whole


Place = tuple[list[PackedTensor], torch.Tensor | None]
"""The tensor that has the rows of a weight, and their order if it is another one; or those of a layer's experts, of
which two have their gates and their ups."""


class PackingPlan:
    """The places in a file of the weights that stay packed."""

    def __init__(self, file: Path, header: GGUFHeader) -> None:
        content = mapped(file)
        self._tensors = [_TensorInFile(tensor, tensor.of(content)) for tensor in packable(header)]
        self._found: dict[str, Place | None] = {}

    def take(self, name: str, weight: torch.Tensor) -> bool:
        """Look for a weight of the model in the file; return True if it is there."""
        try:
            return self._place(name, weight) is not None
        finally:
            return_free_memory()

    def _place(self, name: str, weight: torch.Tensor) -> Place | None:
        """Where the file has a weight, which is looked for once."""
        if name not in self._found:
            self._found[name] = _place_of(weight, self._tensors)
        return self._found[name]

    def is_of(self, model: Mapping[str, torch.Tensor]) -> bool:
        """True if a model has all weights that were taken as the zeros that stand for them.

        If it has not, it was filled with what was made from zeros, as of weights that are renamed or joined on the way.
        """
        taken = [model.get(name) for name, tensors_ in self._found.items() if tensors_]
        return all(weight is not None and weight.untyped_storage().nbytes() == weight.itemsize for weight in taken)

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> tuple[Path, Path]:
        """Write the places and, in float32, the weights that the file does not have; ``weights`` are the model's."""
        rest, plan = {}, {}
        for name, weight in weights:
            if (location := self._place(name, weight)) is None:
                rest[name] = weight.contiguous()
                continue
            tensors, order = location
            plan[name] = [asdict(tensor) for tensor in tensors]
            if order is not None:
                rest[name + ORDER] = order
        places = folder / PLAN, folder / REST
        places[0].write_text(json.dumps({"version": PACKING, "tensors": plan}, indent=1) + "\n", encoding="utf-8")
        try:
            save_file(rest, places[1], {"format": "pt"})
        except SafetensorError as error:  # of a full disk, among others
            raise OSError(0, " ".join(str(error).split())) from error
        return places


def read_weights(file: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model by name, those in blocks mapped from its file."""
    rest = load_file(folder / REST)
    try:
        row = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        plan = {name: [PackedTensor(**fields) for fields in tensors] for name, tensors in row["tensors"].items()}
        content = mapped(file)
        orders = {name: rest.pop(name + ORDER, None) for name in plan}
        packed = {name: CompactWeight(_matrix(file, plan[name], content, order)) for name, order in orders.items()}
    except (ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{folder / PLAN} is damaged or does not fit {file} ({error}): remove {folder}, and the file is read again"
        ) from error
    return {**rest, **packed}


def mapped(file: Path) -> torch.Tensor:
    """The bytes of a file, read from the disk where they are used; a change of the tensor would not change the file."""
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)


def _matrix(file: Path, tensors: list[PackedTensor], content: torch.Tensor, order: torch.Tensor | None) -> PackedMatrix:
    tensor = tensors[0]
    if tensor.experts:
        return PackedExperts([packed.of(content) for packed in tensors], tensor.experts)
    if order is None:
        return tensor.of(content)
    # Read and not mapped: of a mapped part, the pages would stay in memory beside the copy.
    part = torch.from_numpy(np.fromfile(file, np.uint8, tensor.bytes, offset=tensor.offset))
    return PackedMatrix(part.view(tensor.outs, -1)[order.long()], FORMATS_BY_GGUF_TYPE[tensor.kind])


class _TensorInFile:
    """A tensor of the file, to be compared with weights of the model."""

    def __init__(self, tensor: PackedTensor, matrix: PackedMatrix) -> None:
        self.tensor, self._matrix = tensor, matrix

    @cached_property
    def first_row(self) -> torch.Tensor:
        return self._matrix[:1].float()

    @cached_property
    def rows(self) -> list[bytes]:
        """The hash of each row in float32."""
        try:
            return _rows(self._matrix)
        finally:
            self._matrix.unmap()

    def equals(self, weight: torch.Tensor) -> bool:
        """True if all rows have the bits of those of a weight, in their order."""
        try:
            return all(_has_bits(self._matrix[part].float(), weight[part]) for part in _parts(weight))
        finally:
            self._matrix.unmap()


def _has_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.view(torch.int32), expected.contiguous().view(torch.int32))


def _parts(matrix: PackedMatrix | torch.Tensor) -> Iterator[slice]:
    """The rows of a matrix, a few at a time."""
    size = max(1, PART // matrix.shape[1])
    return (slice(first, first + size) for first in range(0, len(matrix), size))


def _rows(matrix: PackedMatrix | torch.Tensor) -> list[bytes]:
    """The hash of each row in float32."""
    parts = (matrix[part].float() for part in _parts(matrix))
    return [blake2b(row, digest_size=DIGEST).digest() for part in parts for row in part.contiguous().numpy()]


def _place_of(weight: torch.Tensor, tensors: list[_TensorInFile]) -> Place | None:
    if weight.dtype != torch.float32 or weight.dim() not in (2, 3):
        return None
    weight = weight.detach()
    if weight.dim() == 3:
        return _place_of_experts(
            weight, [candidate for candidate in tensors if candidate.tensor.experts == len(weight)]
        )
    tensors = [candidate for candidate in tensors if not candidate.tensor.experts]
    alike = [
        candidate for candidate in tensors if (candidate.tensor.outs, candidate.tensor.columns) == tuple(weight.shape)
    ]
    # Most weights have the order of the file, and where it is another one, the first row is usually the first.
    alike.sort(key=lambda candidate: not _has_bits(candidate.first_row, weight[:1]))
    for candidate in alike:
        if _has_bits(candidate.first_row, weight[:1]) and candidate.equals(weight):
            return [candidate.tensor], None
    rows = _rows(weight) if alike else []
    for candidate in alike:
        places = {row: place for place, row in enumerate(candidate.rows)}
        if all(row in places for row in rows):
            tensor = candidate.tensor
            moved = PackedTensor(tensor.kind, tensor.offset, tensor.outs, tensor.columns, False)
            return [moved], torch.tensor([places[row] for row in rows], dtype=torch.int32)
    return None


def _place_of_experts(weight: torch.Tensor, tensors: list[_TensorInFile]) -> Place | None:
    """The tensor that has the matrices of all experts, or the two that have their upper and lower halves."""
    _, rows, columns = weight.shape
    for count in (1, 2):
        matched = []
        for part in weight.split(rows // count, 1) if rows % count == 0 else ():
            matrix = part.reshape(-1, columns)
            alike = [
                candidate
                for candidate in tensors
                if (candidate.tensor.outs, candidate.tensor.columns) == tuple(matrix.shape)
            ]
            same = (
                candidate
                for candidate in alike
                if _has_bits(candidate.first_row, matrix[:1]) and candidate.equals(matrix)
            )
            matched += [candidate.tensor for candidate in same][:1]
        if len(matched) == count and len({tensor.kind for tensor in matched}) == 1:
            return matched, None
    return None


def packed_model(settings: Any, weights: dict[str, torch.Tensor], folder: Path, **options: Any) -> Any:
    """A float32 CPU model with these weights; ``folder`` is its converted folder."""
    family: Any = text_class(settings, trust_remote_code=False)._model_mapping[type(settings)]
    model, report = cast(
        tuple[Any, dict[str, Any]],
        family.from_pretrained(
            None, config=settings, state_dict=weights, dtype=torch.float32, output_loading_info=True, **options
        ),
    )
    if lacking := sorted(report["missing_keys"]):
        raise ModelError(f"{folder} lacks {len(lacking)} of its weights ({lacking[0]}, …): remove it")
    _name(model, folder)
    return model


def assembled_model(settings: Any, weights: dict[str, torch.Tensor], folder: Path, **options: Any) -> Any:
    """The model without the loader of transformers, which takes longer than the rest of a start.

    Names and forms of the weights are not checked: compare its outline with that of ``packed_model``.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        auto = text_class(settings, trust_remote_code=False)
        model: Any = auto.from_config(settings, dtype=torch.float32, **options)
    for name, weight in weights.items():
        path, _, last = name.rpartition(".")
        parameter = as_parameter(weight) if is_compact(weight) else Parameter(weight, requires_grad=False)
        model.get_submodule(path)._parameters[last] = parameter
    model.tie_weights()
    model.eval()
    _name(model, folder)
    return model


def _name(model: Any, folder: Path) -> None:
    model.name_or_path = model.config.name_or_path = str(folder)
    model.generation_config = GenerationConfig.from_pretrained(folder)
