"""Program of the process that compiles hdtool's forward passes and drafter ahead of use, for ``CompileProcess``.

It prints a part's name after each completed step. numba caches the code for other processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from hdtool.data.durable_files import file_lock
from hdtool.data.errors import StoreError
from hdtool.runtime.kernels.code_folder import code_folder, is_compiled, mark_compiled, remove_outdated
from hdtool.runtime.kernels.compile_process import PASSES, STEPS
from hdtool.runtime.model.lean_imports import import_leanly

NICENESS = 5
"""Niceness of the compiler, so that it yields to other processes, such as one that answers meanwhile."""


def compile_part(part: str) -> None:
    """Compile one of the parts in ``STEPS``, print its name after each step, and mark it as compiled."""
    for _, step in zip(STEPS[part], _pass_steps() if part == PASSES else _drafter_steps(), strict=True):
        step()
        _report(part)
    mark_compiled(part)


def _pass_steps() -> list[Callable[[], None]]:
    # Imported step by step: a second saved here is one that the first answer does not wait.
    from hdtool.runtime.engines.cpu.layer_kernel import compile_layers
    from hdtool.runtime.engines.cpu.pass_kernel import compile_passes

    return [compile_layers, compile_passes]


def _drafter_steps() -> list[Callable[[], None]]:
    from hdtool.runtime.drafters.drafter_factory import compile_hierarchy

    return [compile_hierarchy]


def _report(part: str) -> None:
    with suppress(OSError):  # the process that began this one has ended, and the next one needs the code
        print(part, flush=True)


def prepare() -> None:
    """Lower this process's priority, postpone garbage collection, which slows numba down, and delete outdated code."""
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    import_leanly()
    remove_outdated()


def main(parts: list[str]) -> NoReturn:
    """Compile those of the ``parts`` that are not compiled yet, report all of them, and exit the process.

    The process exits with the lock held, so that whoever waits for the lock can time passes as soon as it is free.
    Freeing the compiler's objects would keep a core busy for seconds.
    """
    prepare()
    busy = StoreError(f"another process compiles into {code_folder()}")
    with file_lock(code_folder() / "lock", busy, seconds=-1):
        for part in parts:
            if is_compiled(part):
                for _ in STEPS[part]:
                    _report(part)
            else:
                compile_part(part)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
