"""Lets transformers read a GGUF file in less time: it parses the header several times, and lists names for each module.

What it reads stays the same. Of SmolLM2's file, the header has 150,000 values, and the model has 397 modules.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np


@contextmanager
def read_once() -> Iterator[None]:
    """Keep the header of each file and the list of tensor names for as long as the context lasts, and no tensor."""
    import gguf

    maps: list[mmap.mmap] = []

    class Reader(gguf.GGUFReader):
        """Takes parts of a plain array: parts of a ``memmap`` take five times as long."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)
            if isinstance(own := getattr(mapped, "_mmap", None), mmap.mmap):
                maps.append(own)

    def dequantize(*given: Any, really: Any = gguf.dequantize) -> Any:
        try:
            return really(*given)
        finally:
            for mapped in maps:  # the pages would stay in memory beside the numbers
                mapped.madvise(mmap.MADV_DONTNEED)

    names = cache(gguf.get_tensor_name_map)
    changed: dict[str, Any] = {"dequantize": dequantize} if hasattr(mmap, "MADV_DONTNEED") else {}
    with patch.multiple(gguf, **changed, GGUFReader=cache(Reader), get_tensor_name_map=names):
        yield
