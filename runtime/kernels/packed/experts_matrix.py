"""The matrices of all experts of a layer in blocks, mapped from a file that may have gate and up apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hdtool.runtime.kernels.packed.matrix import ATEN, PackedMatrix


class PackedExperts(PackedMatrix):
    """Matrices ``[experts, rows, columns]`` in blocks; the rows of an expert are in one part after another."""

    def __init__(self, parts: Sequence[PackedMatrix], number: int, *, is_transposed: bool = False) -> None:
        """Each part has some rows of the first of a ``number`` of experts, then as many of the second, and so on.

        A matrix that ``is_transposed`` is given to others with its rows as columns, as some modules have it.
        """
        first = parts[0]
        super().__init__(first.blocks, first.format)
        self.parts, self.is_transposed = tuple(parts), is_transposed
        rows, columns = sum(len(part) for part in parts) // number, first.shape[1]
        self.shape = torch.Size((number, columns, rows) if is_transposed else (number, rows, columns))
        self.nbytes = sum(part.nbytes for part in parts)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, experts: slice) -> PackedExperts:
        first, end, step = experts.indices(len(self))
        assert step == 1
        sizes = [len(part) // len(self) for part in self.parts]
        parts = [part[first * size : end * size] for part, size in zip(self.parts, sizes, strict=True)]
        return PackedExperts(parts, end - first, is_transposed=self.is_transposed)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [part.blocks for part in self.parts]

    def stride(self) -> tuple[int, ...]:
        _, rows, columns = self.shape
        return (rows * columns, 1, rows) if self.is_transposed else (rows * columns, columns, 1)

    def is_contiguous(self) -> bool:
        return not self.is_transposed

    def transpose(self, *dims: int) -> PackedExperts:
        assert set(dims) == {1, 2}
        return PackedExperts(self.parts, len(self), is_transposed=not self.is_transposed)

    def clone(self) -> PackedExperts:
        return self

    def page_out(self) -> None:
        for part in self.parts:
            part.page_out()

    def unmap(self) -> None:
        for part in self.parts:
            part.unmap()

    def float(self) -> torch.Tensor:
        parts = [part.float().view(len(self), -1, part.shape[1]) for part in self.parts]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return found.transpose(1, 2) if self.is_transposed else found

    def into(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.copy_(self.float())

    def rows(self, operation: Any, args: Sequence[Any], kwargs: Any) -> torch.Tensor | None:
        """The experts that an operation copies, in float32; None if it copies other parts."""
        if operation is not ATEN.index.Tensor or len(args[0]) != 1 or args[0][0] is None:
            return None
        chosen = args[0][0]
        if chosen.dtype == torch.bool:
            return None
        found = [self[one : one + 1].float()[0] for one in (chosen.flatten() % len(self)).tolist()]
        return torch.stack(found).view(*chosen.shape, *self.shape[1:]) if found else None

    def viewed(self, operation: Any, args: Sequence[Any]) -> PackedMatrix | torch.Tensor | None:
        if operation is ATEN.transpose.int and {dim % 3 for dim in args} == {1, 2}:
            return self.transpose(1, 2)
        return super().viewed(operation, args)
