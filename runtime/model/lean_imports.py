"""Imports torch and transformers faster.

Garbage collection is postponed, torch's compiler deferred, distributed tensors skipped and a file scan cached.

``transformers`` imports torch's compiler for decorators that disable it, and torch's distributed tensors, which
import sympy. It also scans a thousand source files for the names that they define. Together, these imports and the
scan take as long as importing torch. The compiler is loaded at its first use instead. The imports also create half a
million lasting objects, which the garbage collector would visit again and again, for another second.

This saves over 3 s: ``hdtool generate`` with 8 new tokens takes 2.9 s with the embedded model, and 5.2 s with a 1.5B
GGUF file, where usual imports take 6.2 and 8.8 s (medians of 4 runs in turn, 2-core EPYC, 2026-11-29).

Each replacement is optional: if a library lacks the function to replace, the library is imported as usual.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from hashlib import blake2b
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hdtool.data.durable_files import CachedValue
from hdtool.data.home import import_structure_at_home
from hdtool.data.memory import freeze_objects

COMPILER = "torch._dynamo"
MARKERS = ("assume_constant_result", "allow_in_graph")
"""The compiler's decorators that only register a function and return it unchanged."""
INDEPENDENT = (f"{COMPILER}._trace_wrapped_higher_order_op",)
"""Submodules of the compiler that models import and that do not need the rest of the compiler."""
LOADER, MARKS = "_deferred_loader", "_deferred_marks"
USUAL_THRESHOLD, POSTPONED_THRESHOLD = gc.get_threshold()[0], 1_000_000
"""Numbers of new objects that trigger a garbage collection: usually, and while collection is postponed."""
Structure = dict[frozenset[str], dict[str, set[str]]]
"""Maps each set of required libraries to the modules that need them, and each module to the names that it defines."""


def import_leanly() -> None:
    """Speed up later imports of torch and transformers in this process; do nothing if either is imported already.

    Garbage collection is postponed until ``collect_garbage_again``.
    """
    if not {"torch", "transformers"} & sys.modules.keys():
        sys.meta_path.insert(0, _Finder())
        gc.set_threshold(POSTPONED_THRESHOLD)


def collect_garbage_again() -> None:
    """Resume garbage collection if it was postponed; the collector never visits the objects created until now."""
    if gc.get_threshold()[0] == POSTPONED_THRESHOLD:
        freeze_objects()
        gc.set_threshold(USUAL_THRESHOLD)


class _Finder(PathFinder):
    """Finds a few modules as usual, but replaces their loaders to defer the compiler and to apply ``CHANGES``."""

    find_distributions = None  # type: ignore[assignment]  # PathFinder already lists them

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{COMPILER}.") and fullname not in INDEPENDENT:
            return _part_of_compiler(fullname)
        if fullname != COMPILER and fullname not in CHANGES:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        if fullname == COMPILER:
            spec.loader = cast(Loader, _DeferredLoader(spec.loader))
        else:
            spec.loader = cast(Loader, _ChangedLoader(spec.loader, CHANGES[fullname]))
        return spec


def _part_of_compiler(name: str) -> ModuleSpec | None:
    """Load the compiler before one of its submodules; return a spec if this imported the submodule too, else None."""
    if not isinstance(sys.modules[COMPILER], _DeferredModule):
        return None
    sys.modules[COMPILER]._load()
    loaded = sys.modules.get(name)
    return None if loaded is None else ModuleSpec(name, _LoadedLoader(loaded), is_package=hasattr(loaded, "__path__"))


class _LoadedLoader(Loader):
    """Loader of a module that is already imported."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _WrappedLoader:
    """Delegates to another loader; subclasses override what they change."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _ChangedLoader(_WrappedLoader):
    """Loads a module with another loader, then applies ``change`` to the module."""

    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        super().__init__(loader)
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


class _DeferredLoader(_WrappedLoader):
    """Loader of a package whose ``__init__`` only runs when an attribute that is not a submodule is accessed."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update({LOADER: self._loader, MARKS: []})


_load_lock = threading.RLock()
_pending_disables: list[Callable[[], None]] = []
"""Callbacks that run once the compiler is loaded; each disables it for one function."""


class _DeferredModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in MARKERS and LOADER in self.__dict__:
            return partial(self._mark_later, name)
        self._load()
        return getattr(self, name)

    def _load(self) -> None:
        with _load_lock:
            loader = self.__dict__.pop(LOADER, None)
            if loader is None:
                return
            self.__class__ = ModuleType  # type: ignore[assignment]
            try:
                loader.exec_module(self)
            except BaseException:  # the next use retries, as an ordinary import would
                self.__class__ = _DeferredModule
                self.__dict__[LOADER] = loader
                raise
            for marker, function in self.__dict__.pop(MARKS):
                getattr(self, marker)(function)
            while _pending_disables:
                _pending_disables.pop()()

    def _mark_later(self, marker: str, function: Any) -> Any:
        if LOADER not in self.__dict__:  # the compiler was loaded after the marker was looked up
            return getattr(self, marker)(function)
        self.__dict__[MARKS].append((marker, function))
        return function


def _lean_decorators(module: Any) -> None:
    """Defer the effect of ``torch.compiler.disable`` until something else has loaded the compiler.

    Before that, nothing is compiled, so there is nothing to disable.
    """
    original = getattr(module, "disable", None)
    if original is None:
        return

    @wraps(original)
    def disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        if fn is None:
            return lambda given: disable(given, recursive, **options)
        if not isinstance(fn, type(disable)):  # classes, modules
            return original(fn, recursive, **options)
        if _is_loaded(COMPILER):
            return original(fn, recursive, **options)
        called = fn

        @wraps(fn)
        def call(*given: Any, **named: Any) -> Any:
            return called(*given, **named)

        def switch_off() -> None:
            nonlocal called
            called = original(fn, recursive, **options)
            call.__dict__.update(called.__dict__)  # attributes by which the compiler recognizes disabled functions

        _pending_disables.append(switch_off)
        return call

    module.disable = disable


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and type(module) is not _DeferredModule


def _lean_structure(module: Any) -> None:
    """Make transformers use a cached scan of the names that its files define, and disable distributed tensors.

    The cached scan is valid while the names, sizes and modification times of all source files stay the same.
    """
    if hasattr(module, "is_torch_distributed_available"):
        module.is_torch_distributed_available = lambda: False
    original = getattr(module, "define_import_structure", None)
    if original is None:
        return

    @wraps(original)
    def define_import_structure(module_path: Any, prefix: str | None = None) -> Structure:
        try:
            folder = Path(module_path)
            folder = folder if folder.is_dir() else folder.parent
            record = CachedValue(import_structure_at_home(), {"prefix": prefix, "files": _signature(folder)})
            if (recorded := record.read(_structure_of)) is not None:
                return recorded
        except OSError:
            return original(module_path, prefix)  # type: ignore[no-any-return]
        made: Structure = original(module_path, prefix)
        record.write(
            [[sorted(needed), {name: sorted(has) for name, has in names.items()}] for needed, names in made.items()]
        )
        return made

    module.define_import_structure = define_import_structure


def _structure_of(rows: Any) -> Structure:
    return {frozenset(needed): {name: set(has) for name, has in names.items()} for needed, names in rows}


def _signature(folder: Path) -> str:
    """Return a hash of the names, sizes and modification times of all files in a package."""
    digest = blake2b(str(folder).encode(), digest_size=16)
    for line in _files(str(folder)):
        digest.update(line.encode())
    return digest.hexdigest()


def _files(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from _files(entry.path)
            else:
                stat = entry.stat()
                yield f"{entry.path} {stat.st_size} {stat.st_mtime_ns}\n"


def _lean_initialization(module: Any) -> None:
    """Skip normal initialization of meta tensors, because it would make torch load the compiler."""
    original = getattr(module, "_no_grad_normal_", None)
    if original is None:
        return

    @wraps(original)
    def normal(tensor: Any, *given: Any, **named: Any) -> Any:
        return tensor if tensor.is_meta else original(tensor, *given, **named)

    module._no_grad_normal_ = normal


CHANGES: dict[str, Callable[[Any], None]] = {
    "torch.compiler": _lean_decorators,
    "torch.nn.init": _lean_initialization,
    "transformers.utils.import_utils": _lean_structure,
}
"""Functions that change a module once it is loaded, by module name."""
