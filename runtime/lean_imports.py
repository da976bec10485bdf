"""Speeds up importing torch and transformers by deferring torch's compiler, distributed tensors and a file scan.

``transformers`` imports torch's compiler for decorators that switch it off, and its distributed tensors, which import
sympy. It also reads a thousand source files to find which names they define. Together, that takes as long as the import
of torch. Whatever is deferred here is loaded at its first use.

Every part is optional: where a library lacks the function that is replaced, the import is an ordinary one.
"""

from __future__ import annotations

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

from hdtool.data.kept_records import CachedValue
from hdtool.data.stores.home import import_structure_at_home

COMPILER = "torch._dynamo"
MARKERS = ("assume_constant_result", "allow_in_graph")
"""Decorators of the compiler that mark a function for it and return this function."""
INDEPENDENT = (f"{COMPILER}._trace_wrapped_higher_order_op",)
"""Modules of the compiler that need nothing of it, and that models import."""
LOADER, MARKS = "_deferred_loader", "_deferred_marks"
Structure = dict[frozenset[str], dict[str, set[str]]]
"""Names by the module that has them, by the libraries that this module needs."""


def import_leanly() -> None:
    """Leave out what no command uses in the imports of torch and transformers that follow in this process."""
    if not {"torch", "transformers"} & sys.modules.keys():
        sys.meta_path.insert(0, _Finder())


class _Finder(PathFinder):
    """Finds a few modules as usual and changes how they are loaded."""

    find_distributions = None  # type: ignore[assignment]  # PathFinder itself lists them

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
            spec.loader = cast(Loader, _DeferredLoader(spec))
        else:
            spec.loader = cast(Loader, _ChangedLoader(spec.loader, CHANGES[fullname]))
        return spec


def _part_of_compiler(name: str) -> ModuleSpec | None:
    """Load the compiler before one of its modules, which the compiler may load itself."""
    if not isinstance(sys.modules[COMPILER], _DeferredModule):
        return None
    sys.modules[COMPILER]._load()
    loaded = sys.modules.get(name)
    return None if loaded is None else ModuleSpec(name, _LoadedLoader(loaded), is_package=hasattr(loaded, "__path__"))


class _LoadedLoader(Loader):
    """Returns a module that is already imported."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _ChangedLoader:
    """Loads a module, then changes it."""

    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        self._loader, self._change = loader, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


class _DeferredLoader:
    """Makes a package whose ``__init__`` runs when anything but its own submodules is asked for."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._loader: Any = spec.loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update({LOADER: self._loader, MARKS: []})


_running = threading.RLock()
_undisabled: list[Callable[[], None]] = []
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
        with _running:
            loader = self.__dict__.pop(LOADER, None)
            if loader is None:
                return
            self.__class__ = ModuleType  # type: ignore[assignment]
            try:
                loader.exec_module(self)
            except BaseException:  # the next use tries again, as an ordinary import would
                self.__class__ = _DeferredModule
                self.__dict__[LOADER] = loader
                raise
            for marker, function in self.__dict__.pop(MARKS):
                getattr(self, marker)(function)
            while _undisabled:
                _undisabled.pop()()

    def _mark_later(self, marker: str, function: Any) -> Any:
        if LOADER not in self.__dict__:  # loaded since the marker was taken
            return getattr(self, marker)(function)
        self.__dict__[MARKS].append((marker, function))
        return function


def _lean_decorators(module: Any) -> None:
    """Have ``torch.compiler.disable`` load the compiler only once something else has loaded it.

    Before that nothing is compiled, so there is nothing to switch off.
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
            call.__dict__.update(called.__dict__)  # by which the compiler recognises what it must leave alone

        _undisabled.append(switch_off)
        return call

    module.disable = disable


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and type(module) is not _DeferredModule


def _lean_structure(module: Any) -> None:
    """Read which names transformers has from a record of the last scan, and do without distributed tensors.

    The record belongs to the names, sizes and times of all source files.
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
    """Changes with the source files of a package."""
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
    """Leave tensors without memory as they are: torch loads the compiler for random numbers in them."""
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
"""What is changed in a module once it is loaded."""
