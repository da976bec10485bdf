"""SGLang without its compiled kernels: the names that it imports are there, and calling one is a mistake."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
KERNELS = "sgl_kernel"


class _Kernels(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name, side_effect=AssertionError(f"{name} is a compiled kernel"))


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == KERNELS else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        kernels = _Kernels(spec.name)
        kernels.__path__ = []
        return kernels

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.insert(0, _Finder())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.speculative.ngram_worker  # noqa: F401
