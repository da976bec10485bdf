"""Compiles forward passes and the drafter in another process, while this one loads a model and answers.

The process keeps the code, and later processes load it. It runs with low priority and goes on if this one ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from threading import Condition, Thread
from typing import IO

from hdtool.data.isolated_processes import isolated_python
from hdtool.data.notes import note, tell
from hdtool.data.progress import progress_bar
from hdtool.runtime.kernels.code_folder import is_compiled, keeps_code

PASSES, DRAFTER = PARTS = ("passes", "drafter")
"""Parts of the program that the process can compile, in this order."""
STEPS = {PASSES: ("attention and MLPs", "forward passes"), DRAFTER: ("look-ups and tree growth",)}
"""The steps of each part, as progress shows them."""
NOUNS = {PASSES: "forward passes", DRAFTER: "the drafter"}
MAX_SECONDS = 600.0
"""Seconds after which the process is killed if this one waits for it."""
PROGRAM = "hdtool.runtime.compile_passes_and_drafter"
"""Module that the process runs."""


class CompileProcess:
    """A process that compiles parts of the program, and its progress."""

    def __init__(self, parts: list[str]) -> None:
        self._process = Popen(
            isolated_python("-m", PROGRAM, *parts),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C ends this process, and the code will be needed again
        )
        self._began = time.monotonic()
        self._changed = Condition()
        self._steps = dict.fromkeys(parts, 0)
        """Number of completed steps by part."""
        self._is_running = True
        assert self._process.stdout is not None
        self._reader = Thread(target=self._read, args=[self._process.stdout], daemon=True)
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        reason = "it was killed"
        with lines:
            for line in map(str.strip, lines):
                if line not in self._steps:
                    reason = line or reason  # the last line of a traceback
                    continue
                with self._changed:
                    self._steps[line] += 1
                    self._changed.notify_all()
        if self._process.wait():
            note(f"the process that compiles ahead failed ({reason}): compiling here")
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def is_compiling(self, part: str) -> bool:
        return self._is_running and self._steps.get(part, len(STEPS[part])) < len(STEPS[part])

    def wait(self, part: str, on_step: Callable[[int], None] = lambda done: None) -> bool:
        """Wait until a part is compiled, or the process has ended; return True if the part is compiled.

        Once all parts are compiled, also wait until the process has ended, so that it slows down nothing that is timed
        later. After ``MAX_SECONDS``, kill it. ``on_step`` is called repeatedly with the number of completed steps.
        """
        number = len(STEPS[part])
        while (done := self._steps[part]) < number and self._is_running:
            on_step(done)
            with self._changed:
                self._changed.wait(timeout=1.0)
            if time.monotonic() > self._began + MAX_SECONDS:
                self._process.kill()
        if not any(map(self.is_compiling, self._steps)):
            self._reader.join(max(0.0, self._began + MAX_SECONDS - time.monotonic()))
        on_step(self._steps[part])
        return self._steps[part] == number

    def show_until_compiled(self, part: str) -> None:
        """Wait as ``wait`` does, with a progress bar on a terminal; if the part is compiled, say how long this took."""
        began, steps = time.monotonic(), STEPS[part]
        with progress_bar(len(steps), f"compiling {NOUNS[part]} for this processor, once", unit="steps") as progress:

            def show(done: int) -> None:
                progress.show("".join(steps[done : done + 1]))
                progress.to(done)

            is_compiled = self.wait(part, show)
        if is_compiled:
            seconds = time.monotonic() - began
            tell(f"compiled {NOUNS[part]} for this processor, once: waited {seconds:.0f} s")


_processes: list[CompileProcess] = []
"""The process that this one has started; at most one."""


def start_compiling(*parts: str) -> None:
    """Start a process that compiles those of the ``parts`` whose code isn't kept yet.

    Do nothing if a process was started before, if there is only one core, or if code can't be kept.
    """
    missing = [part for part in PARTS if part in parts and not is_compiled(part)]
    if missing and not _processes and _cores() > 1 and keeps_code():
        with suppress(OSError):  # this process compiles when it needs the code
            _processes.append(CompileProcess(missing))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this platform
        return os.cpu_count() or 1


def is_compiling(part: str) -> bool:
    """Return True while the process that ``start_compiling`` started has yet to finish a part."""
    return any(process.is_compiling(part) for process in _processes)


def wait_until_compiled(part: str, *, shown: bool = True) -> None:
    """Wait until ``start_compiling``'s process, if any, has compiled a part or failed; show progress if ``shown``."""
    for process in _processes:
        if process.is_compiling(part):
            process.show_until_compiled(part) if shown else process.wait(part)


@contextmanager
def core_left_free() -> Iterator[None]:
    """In this block, let torch use one thread fewer if ``start_compiling``'s process is compiling when it begins.

    Threads of torch wait for each other: with one on the compiler's core, each operation takes ten times as long.
    """
    import torch  # not above, so that the process can import it leanly

    threads = torch.get_num_threads()
    if any(map(is_compiling, PARTS)):
        torch.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
