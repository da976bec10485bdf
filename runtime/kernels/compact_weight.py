"""Float32 weights stored losslessly in 16 bits or in packed blocks.

Such a weight acts as a float32 tensor: operations expand it first, except that row lookups (embeddings) expand only the
selected rows and ``linear_layers.py`` multiplies by the stored form directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch.nn import Embedding, Module

from hdtool.runtime.kernels.packed_matrix import ROW_ARGUMENTS, PackedMatrix

NARROW_DTYPES = (torch.bfloat16, torch.float16)
ATEN = torch.ops.aten

Stored = torch.Tensor | PackedMatrix
M = TypeVar("M", bound=Module)


class ExpansionCounter:
    """Counts how often an operation expanded a whole weight."""

    count = 0


class CompactWeight(torch.Tensor):
    """A read-only float32 tensor ``stored`` in 16 bits or in packed blocks."""

    stored: Stored
    expansions: ExpansionCounter
    """Counter of expansions of the whole weight, shared by a weight and its views."""

    @staticmethod
    def __new__(
        cls, stored: Stored, expansions: ExpansionCounter | None = None, *, requires_grad: bool = False
    ) -> CompactWeight:
        with torch.inference_mode(False):  # else a view of an ordinary tensor would be an inference tensor
            tensor: Any = torch.Tensor._make_wrapper_subclass(
                cls,
                stored.shape,
                strides=stored.stride(),
                dtype=torch.float32,
                device=stored.device,
                requires_grad=requires_grad,
            )
        tensor.stored, tensor.expansions = stored, expansions or ExpansionCounter()
        return cast(CompactWeight, tensor)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Set the value; an ordinary tensor, as from a conversion or a merge, turns this into an ordinary parameter."""
        if is_compact(value):
            self.stored, self.expansions = value.stored, value.expansions
        else:
            parameter = torch.nn.Parameter(value.detach(), requires_grad=self.requires_grad)
            torch.utils.swap_tensors(self, parameter)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation in ROW_ARGUMENTS and is_compact(args[0]) and not any(map(is_compact, args[1:])):
            rows = _rows(operation, args, kwargs)
            if rows is not None:
                return rows
        if operation.is_view and is_compact(args[0]) and not _changes_dtype(operation):
            expansions = args[0].expansions
            view = _viewed(operation, args, kwargs)
            return (
                [cls(item, expansions) for item in view] if isinstance(view, (list, tuple)) else cls(view, expansions)
            )
        _refuse_changes(operation, args, kwargs)
        expanded = [_expanded(arg) for arg in args]
        return operation(*expanded, **{name: _expanded(value) for name, value in kwargs.items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> CompactWeight:
        duplicate = CompactWeight(self.stored.clone(), requires_grad=self.requires_grad)
        return cast(CompactWeight, memo.setdefault(id(self), duplicate))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.stored.float().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kept = self.stored.format.name if isinstance(self.stored, PackedMatrix) else self.stored.dtype
        return f"CompactWeight({tuple(self.shape)}, kept in {kept})"


def is_compact(weight: object) -> TypeGuard[CompactWeight]:
    return isinstance(weight, CompactWeight)


def as_parameter(weight: CompactWeight) -> CompactWeight:
    """Mark the weight as a module parameter and return it.

    Unlike ``torch.nn.Parameter``, this doesn't detach the weight: the first operation on a tensor subclass makes torch
    import its distributed tensors, which takes as long as loading a small model.
    """
    weight._is_param = True
    return weight


def is_packed(weight: object) -> bool:
    """Return True if the weight is stored in packed blocks."""
    return is_compact(weight) and isinstance(weight.stored, PackedMatrix)


def stored_of(weight: torch.Tensor) -> Stored:
    """Return the operand for a compiled matmul: the stored form of a compact weight, or the weight itself."""
    return weight.stored if is_compact(weight) else weight


def expand_compact(weight: torch.Tensor) -> torch.Tensor:
    """Return a compact weight expanded to a plain float32 tensor; return any other weight unchanged."""
    return weight.stored.float() if is_compact(weight) else weight


def embedding_rows(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return ``torch.embedding(weight, ids)``; skip torch's dispatch for compact weights, which would take 0.2 ms."""
    rows = _rows(ATEN.embedding.default, (weight, ids), {}) if is_compact(weight) else None
    return torch.embedding(weight, ids) if rows is None else rows


def sharing(kind: type[M], module: Module, **more: Any) -> M:
    """Return a module of class ``kind`` with the attributes of ``module``, such as its parameters, and ``more``."""
    other = kind.__new__(kind)
    other.__dict__ = {**module.__dict__, **more}
    return other


class CompactEmbedding(Embedding):
    """A ``torch.nn.Embedding`` that reads rows of a compact weight without torch's dispatch; see ``as_parameter``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if is_compact(self.weight) and not torch.compiler.is_compiling():
            return embedding_rows(self.weight, input)
        return super().forward(input)


def narrowed(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight in a 16-bit dtype that represents all values exactly; None if there is no such dtype."""
    if weight.dtype in NARROW_DTYPES:
        return weight
    if weight.dtype != torch.float32:
        return None
    for dtype in NARROW_DTYPES:
        # Try a prefix first: most float32 weights already fail there.
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
    """Apply a view operation to the stored form, or to the expanded weight if packed blocks don't support the view."""
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
        return type(value)(_expanded(item) for item in value)
    if not is_compact(value):
        return value
    value.expansions.count += 1
    return value.stored.float()


def _refuse_changes(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not operation._schema.is_mutable:
        return
    for position, parameter in enumerate(operation._schema.arguments):
        argument = args[position] if position < len(args) else kwargs.get(parameter.name)
        if parameter.alias_info is not None and parameter.alias_info.is_write and is_compact(argument):
            raise RuntimeError(
                "this weight is kept compact and cannot be changed: load the model with dtype float32 to change it"
            )
