"""Finds the weights of a model that can stay in the quantized blocks of its GGUF file, and the order of their rows.

Tensor names and row orders differ between model families, so neither is assumed: a weight stays packed if each of its
float32 rows, as transformers reads the file, equals a row of one of the file's tensors bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
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
from hdtool.runtime.kernels.gemm_tiles import unpack_matrix
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_GGUF_TYPE
from hdtool.runtime.kernels.packed_matrix import PackedExperts, PackedMatrix
from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16
from hdtool.runtime.model.gguf.converted_folder import PACKING, PLAN, REST
from hdtool.runtime.model.transformers_internals import text_class

MAX_EXPANDED_VALUES = 1 << 22
"""Maximum number of values that are expanded to float32 at once while rows are compared."""
DIGEST = 16
"""Size of a row's hash in bytes."""
ORDER = ".rows"
"""Suffix that turns a weight's name into the name of the tensor with its row order."""


@dataclass(frozen=True)
class PackedTensor:
    """Location and format of a weight's blocks in a GGUF file."""

    kind: int
    offset: int
    """Offset from the start of the file in bytes."""
    outs: int
    columns: int
    ordered: bool
    """True if the rows have the same order in the file and in the weight."""
    experts: int = 0
    """Number of experts, which have an equal number of rows each; 0 for a single matrix."""
    transposed: bool = False
    """True if the model stores the experts' matrices transposed."""
    interleaved: bool = False
    """True if an expert's rows in the weight alternate between this tensor and another one."""

    @property
    def bytes(self) -> int:
        return self.outs * FORMATS_BY_GGUF_TYPE[self.kind].row_bytes(self.columns)

    def of(self, content: torch.Tensor) -> PackedMatrix:
        """Return the matrix as a view of the file's content, with rows in the file's order."""
        blocks = content[self.offset : self.offset + self.bytes].view(self.outs, -1)
        return PackedMatrix(blocks, FORMATS_BY_GGUF_TYPE[self.kind])


def packable(header: GGUFHeader) -> list[PackedTensor]:
    """Return the tensors of a GGUF file whose quantized blocks the compiled matmul can read."""
    tensors = []
    for tensor in header.tensors:
        if EXPANDS_FLOAT16 and tensor.kind in FORMATS_BY_GGUF_TYPE and _fits(tensor):
            *experts, out_features, columns = tensor.shape
            rows, number = out_features * prod(experts), sum(experts)
            tensors.append(PackedTensor(tensor.kind, header.data + tensor.offset, rows, columns, True, number))
    return tensors


def _fits(tensor: GGUFTensor) -> bool:
    is_whole = tensor.shape[-1] % max(COLUMN_MULTIPLE, FORMATS_BY_GGUF_TYPE[tensor.kind].block_size) == 0
    return 2 <= len(tensor.shape) <= 3 and prod(tensor.shape) > 0 and is_whole


PackedLocation = tuple[list[PackedTensor], torch.Tensor | None]
"""Pair ``(tensors, order)``: the tensors in the file that hold a weight's rows, and each row's index in them.

``order`` is None if the rows are in the file's order. There are two tensors if a layer's experts have separate gate and
up projections in the file, otherwise one.
"""


class PackingPlan:
    """Records where a GGUF file holds the weights that stay packed."""

    def __init__(self, file: Path, header: GGUFHeader) -> None:
        content = mapped(file)
        self._tensors = [_TensorInFile(tensor, tensor.of(content)) for tensor in packable(header)]
        self._found: dict[str, PackedLocation | None] = {}

    def take(self, name: str, weight: torch.Tensor) -> bool:
        """Search the file for a weight of the model; return True if it is found."""
        try:
            return self._location(name, weight) is not None
        finally:
            return_free_memory()

    def _location(self, name: str, weight: torch.Tensor) -> PackedLocation | None:
        """Return where the file holds a weight, or None if it doesn't. Each weight is searched for only once."""
        if name not in self._found:
            self._found[name] = _location_of(weight, self._tensors)
        return self._found[name]

    def is_of(self, model: Mapping[str, torch.Tensor]) -> bool:
        """Return True if the model still has a placeholder (one expanded zero) for each weight found in the file.

        If not, transformers renamed or joined weights after they were taken, and computed some of the model's weights
        from the zeros.
        """
        taken = [model.get(name) for name, tensors_ in self._found.items() if tensors_]
        return all(weight is not None and weight.untyped_storage().nbytes() == weight.itemsize for weight in taken)

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> tuple[Path, Path]:
        """Write the packing plan and, in float32, the weights that the file lacks; return the paths of both files.

        ``weights`` are all weights of the model.
        """
        rest, plan = {}, {}
        for name, weight in weights:
            if (location := self._location(name, weight)) is None:
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
        except SafetensorError as error:  # such as a full disk
            raise OSError(0, " ".join(str(error).split())) from error
        return places


SAMPLED_ROWS = 64


def unpacked(reference: Callable[..., Any], blocks: npt.NDArray[np.uint8], kind: int) -> Any:
    """Unpack a tensor to float32: with compiled code if possible and exact in sampled rows, else with ``reference``.

    ``reference`` is ``dequantize`` of the gguf library, which takes fifty times as long for MXFP4.
    """
    format, rows = FORMATS_BY_GGUF_TYPE.get(kind), blocks.reshape(-1, blocks.shape[-1])
    columns = rows.shape[1] // format.bytes * format.block_size if format else 0
    if format is None or not EXPANDS_FLOAT16 or columns % COLUMN_MULTIPLE or not rows.flags.c_contiguous:
        return reference(blocks, kind)
    values = np.empty((len(rows), columns), np.float32)
    unpack_matrix(format, rows.ctypes.data, len(rows), columns, values.ctypes.data)
    step = max(1, len(rows) // SAMPLED_ROWS)
    sample = np.ascontiguousarray(reference(np.ascontiguousarray(rows[::step]), kind))
    if not np.array_equal(sample.view(np.int32), values[::step].view(np.int32)):
        return reference(blocks, kind)
    return values.reshape(*blocks.shape[:-1], columns)


def read_weights(file: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return a model's weights by name; those packed in the row order of ``file`` are memory-mapped."""
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
    """Return a file's bytes as a memory-mapped tensor; writing to the tensor does not change the file."""
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)


def _matrix(file: Path, tensors: list[PackedTensor], content: torch.Tensor, order: torch.Tensor | None) -> PackedMatrix:
    tensor = tensors[0]
    if tensor.experts:
        return PackedExperts(
            [packed.of(content) for packed in tensors],
            tensor.experts,
            is_transposed=tensor.transposed,
            is_interleaved=tensor.interleaved,
        )
    if order is None:
        return tensor.of(content)
    # Read, not mapped: mapped pages would stay in memory beside the reordered copy.
    part = torch.from_numpy(np.fromfile(file, np.uint8, tensor.bytes, offset=tensor.offset))
    return PackedMatrix(part.view(tensor.outs, -1)[order.long()], FORMATS_BY_GGUF_TYPE[tensor.kind])


class _TensorInFile:
    """Compares a tensor of the file with weights of the model."""

    def __init__(self, tensor: PackedTensor, matrix: PackedMatrix) -> None:
        self.tensor, self._matrix = tensor, matrix

    @cached_property
    def first_row(self) -> torch.Tensor:
        return self._matrix[:1].float()

    @cached_property
    def rows(self) -> list[bytes]:
        """Hash of each row's float32 values."""
        try:
            return _rows(self._matrix)
        finally:
            self._matrix.unmap()

    def equals(self, weight: torch.Tensor) -> bool:
        """Return True if all rows of the tensor equal those of a weight bit for bit, in the same order."""
        try:
            return all(_has_bits(self._matrix[part].float(), weight[part]) for part in _parts(weight))
        finally:
            self._matrix.unmap()


def _has_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.view(torch.int32), expected.contiguous().view(torch.int32))


def _parts(matrix: PackedMatrix | torch.Tensor) -> Iterator[slice]:
    """Return slices that split a matrix into groups of rows with about ``MAX_EXPANDED_VALUES`` values each."""
    size = max(1, MAX_EXPANDED_VALUES // matrix.shape[1])
    return (slice(first, first + size) for first in range(0, len(matrix), size))


def _rows(matrix: PackedMatrix | torch.Tensor) -> list[bytes]:
    """Return the hash of each row's float32 values."""
    parts = (matrix[part].float() for part in _parts(matrix))
    return [blake2b(row, digest_size=DIGEST).digest() for part in parts for row in part.contiguous().numpy()]


def _location_of(weight: torch.Tensor, tensors: list[_TensorInFile]) -> PackedLocation | None:
    if weight.dtype != torch.float32 or weight.dim() not in (2, 3):
        return None
    weight = weight.detach()
    if weight.dim() == 3:
        return _location_of_experts(
            weight, [candidate for candidate in tensors if candidate.tensor.experts == len(weight)]
        )
    tensors = [candidate for candidate in tensors if not candidate.tensor.experts]
    alike = [
        candidate for candidate in tensors if (candidate.tensor.outs, candidate.tensor.columns) == tuple(weight.shape)
    ]
    # Most weights have the file's row order, and most reordered ones keep the first row, so try equal first rows first.
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


def _location_of_experts(weight: torch.Tensor, tensors: list[_TensorInFile]) -> PackedLocation | None:
    """Find the tensor with the matrices of all experts, or the two tensors that each hold half of every matrix's rows.

    The weight may have the matrices transposed, and their rows may alternate between the two tensors. Return None if
    the file has no such tensors.
    """
    for transposed in (False, True):
        matrices = weight.transpose(1, 2) if transposed else weight
        rows = matrices.shape[1]
        halves = [*matrices.split(rows // 2, 1)] if rows % 2 == 0 else []
        # Interleaved rows first, because halves start with the same row and must be copied to be compared.
        for interleaved, parts in ((False, [matrices]), (True, [matrices[:, ::2], matrices[:, 1::2]]), (False, halves)):
            matched = [found for part in parts if (found := _tensor_with(part, tensors))]
            if matched and len(matched) == len(parts) and len({tensor.kind for tensor in matched}) == 1:
                return [replace(tensor, transposed=transposed, interleaved=interleaved) for tensor in matched], None
    return None


def _tensor_with(matrices: torch.Tensor, tensors: list[_TensorInFile]) -> PackedTensor | None:
    """Return the file's tensor that holds these matrices ``[experts, rows, columns]``, or None if there is none."""
    shape = matrices.shape[0] * matrices.shape[1], matrices.shape[2]
    alike = [candidate for candidate in tensors if (candidate.tensor.outs, candidate.tensor.columns) == shape]
    first_row = matrices[0, :1]
    alike = [candidate for candidate in alike if _has_bits(candidate.first_row, first_row)]
    rows = matrices.reshape(shape) if alike else matrices
    return next((candidate.tensor for candidate in alike if candidate.equals(rows)), None)


def packed_model(settings: Any, weights: dict[str, torch.Tensor], folder: Path, **options: Any) -> Any:
    """Load ``weights`` into a float32 CPU model with transformers; ``folder`` has its converted or quantized files."""
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
    """Build the same model as ``packed_model``, but without the loader of transformers.

    The loader takes longer than the rest of the startup. Without it, weight names and shapes are not checked: compare
    the model's outline with that of a model from ``packed_model``.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        auto = text_class(settings, trust_remote_code=False)
        model: Any = auto.from_config(settings, dtype=torch.float32, trust_remote_code=False, **options)
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
