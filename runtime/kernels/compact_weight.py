"""A float32 weight that is kept in 16 bits or in blocks, as GGUF files have them, which hold its numbers exactly.

Wherever code reads the weight it is a float32 tensor: an operation expands it first. Those that read some rows, as an
embedding does, expand these rows only, and ``linear.py`` multiplies by what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch.nn import Embedding

from hdtool.runtime.kernels.packed_matrix import PackedMatrix

FORMATS = (torch.bfloat16, torch.float16)
ATEN = torch.ops.aten
OF_ROWS = (ATEN.embedding.default, ATEN.index.Tensor, ATEN.index_select.default)
"""Operations that copy rows of their first argument."""


Stored = torch.Tensor | PackedMatrix


class Reads:
    """How often operations had to expand a weight as a whole."""

    number = 0


class CompactWeight(torch.Tensor):
    """A read-only tensor of dtype float32; ``stored`` has its numbers in 16 bits or in blocks."""

    stored: Stored
    reads: Reads
    """Of the weight and all its views."""

    @staticmethod
    def __new__(cls, stored: Stored, reads: Reads | None = None, *, requires_grad: bool = False) -> CompactWeight:
        with torch.inference_mode(False):  # a view of an ordinary tensor must be one
            made: Any = torch.Tensor._make_wrapper_subclass(
                cls,
                stored.shape,
                strides=stored.stride(),
                dtype=torch.float32,
                device=stored.device,
                requires_grad=requires_grad,
            )
        made.stored, made.reads = stored, reads or Reads()
        return cast(CompactWeight, made)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Become an ordinary parameter: what a model is converted to, or merged with, has other numbers."""
        if is_compact(value):
            self.stored, self.reads = value.stored, value.reads
        else:
            made = torch.nn.Parameter(value.detach(), requires_grad=self.requires_grad)
            torch.utils.swap_tensors(self, made)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation in OF_ROWS and is_compact(args[0]) and not any(map(is_compact, args[1:])):
            found = _rows(operation, args, kwargs)
            if found is not None:
                return found
        if operation.is_view and is_compact(args[0]) and not _changes_dtype(operation):
            reads = args[0].reads
            viewed = _viewed(operation, args, kwargs)
            return [cls(one, reads) for one in viewed] if isinstance(viewed, (list, tuple)) else cls(viewed, reads)
        _refuse_changes(operation, args, kwargs)
        expanded = [_expanded(one) for one in args]
        return operation(*expanded, **{name: _expanded(one) for name, one in kwargs.items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> CompactWeight:
        made = CompactWeight(self.stored.clone(), requires_grad=self.requires_grad)
        return cast(CompactWeight, memo.setdefault(id(self), made))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.stored.float().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kept = self.stored.format.name if isinstance(self.stored, PackedMatrix) else self.stored.dtype
        return f"CompactWeight({tuple(self.shape)}, kept in {kept})"


def is_compact(weight: object) -> TypeGuard[CompactWeight]:
    return isinstance(weight, CompactWeight)


def as_parameter(weight: CompactWeight) -> CompactWeight:
    """The weight as a parameter of a module.

    ``torch.nn.Parameter`` would detach it first. The first operation on a tensor of any such class has torch import
    its distributed tensors, which takes as long as loading a small model.
    """
    weight._is_param = True
    return weight


def is_packed(weight: object) -> bool:
    """Whether a weight is kept in blocks."""
    return is_compact(weight) and isinstance(weight.stored, PackedMatrix)


def stored_of(weight: torch.Tensor) -> Stored:
    """What a compiled matmul reads: the numbers of a compact weight as they are kept, or the weight itself."""
    return weight.stored if is_compact(weight) else weight


def in_float32(weight: torch.Tensor) -> torch.Tensor:
    """The same numbers as an ordinary tensor."""
    return weight.stored.float() if is_compact(weight) else weight


def embedded(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As ``torch.embedding``; a compact weight is not sent through torch, which takes 0.2 ms."""
    found = _rows(ATEN.embedding.default, (weight, ids), {}) if is_compact(weight) else None
    return torch.embedding(weight, ids) if found is None else found


class CompactEmbedding(Embedding):
    """A ``torch.nn.Embedding`` that copies rows of a compact weight itself, see ``as_parameter``."""

    @classmethod
    def of(cls, module: Embedding) -> CompactEmbedding:
        """The module that takes the place of another one, with its parameters and hooks."""
        made = cls.__new__(cls)
        made.__dict__ = dict(module.__dict__)
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if is_compact(self.weight) and not torch.compiler.is_compiling():
            return embedded(self.weight, input)
        return super().forward(input)


def narrowed(weight: torch.Tensor) -> torch.Tensor | None:
    """The same numbers in 16 bits; None if these do not hold them exactly."""
    if weight.dtype in FORMATS:
        return weight
    if weight.dtype != torch.float32:
        return None
    for dtype in FORMATS:
        # A part is compared first: of most weights in float32 no part fits.
        for part in (weight.flatten()[:1024], weight):
            narrow = part.to(dtype)
            if not torch.equal(narrow.to(weight.dtype).view(torch.int32), part.view(torch.int32)):
                break
        else:
            return narrow
    return None


def _rows(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    stored = args[0].stored
    if isinstance(stored, PackedMatrix):
        return stored.rows(operation, args[1:], kwargs)
    return cast(torch.Tensor, operation(stored, *args[1:], **kwargs).float())


def _viewed(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view of what is stored; of blocks, most kinds of views need all numbers expanded."""
    stored = args[0].stored
    if isinstance(stored, PackedMatrix):
        viewed = stored.viewed(operation, args[1:])
        if viewed is not None:
            return viewed
        stored = _expanded(args[0])
    return operation(stored, *args[1:], **kwargs)


def _changes_dtype(operation: Any) -> bool:
    return operation is ATEN.view.dtype or operation.overloadpacket is ATEN.to


def _expanded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_expanded(one) for one in value)
    if not is_compact(value):
        return value
    value.reads.number += 1
    return value.stored.float()


def _refuse_changes(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not operation._schema.is_mutable:
        return
    for place, described in enumerate(operation._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(described.name)
        if described.alias_info is not None and described.alias_info.is_write and is_compact(given):
            raise RuntimeError(
                "this weight is kept compact and cannot be changed: load the model with dtype float32 to change it"
            )
