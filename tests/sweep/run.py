"""Check each type in a separate process, so that a crash or hang does not end the sweep."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from tests.sweep.checks import check, warm_up
from tests.sweep.result import WRONG, Result

CPU_SECONDS = 90
"""CPU time after which a type is taken to loop. It does not depend on what else the machine computes."""
TIMEOUT_SECONDS = 900.0
"""Timeout of a type in seconds, for processes that wait forever."""


def sweep(kinds: Iterable[str], *, captures: bool = False) -> Iterator[Result]:
    """Yield the results of types one after another."""
    _quiet()
    warm_up()
    for kind in kinds:
        yield _alone(kind, captures)


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def _alone(kind: str, captures: bool) -> Result:
    """Check a type in a fork of this process, which has all libraries loaded."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, kind, captures))
    process.start()
    sender.close()
    try:
        if not wait([receiver], TIMEOUT_SECONDS):
            return Result(kind, WRONG, f"takes more than {TIMEOUT_SECONDS:.0f} seconds")
        found: dict[str, Any] = receiver.recv()
        return Result(**found)
    except EOFError:
        process.join()
        return Result(kind, WRONG, f"ends the process ({_end_of(process.exitcode)})")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _work(sender: Connection, kind: str, captures: bool) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)  # silences what libraries print about each model
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    sender.send(check(kind, captures=captures).as_dict())


def _end_of(code: int | None) -> str:
    return signal.Signals(-code).name if code and code < 0 else f"code {code}"


def use_own_home(home: Path) -> None:
    """Use a separate home, so that measurements are not kept for the user."""
    os.environ["HDTOOL_HOME"] = str(home)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.platform.startswith("linux"):
        raise SystemExit("the sweep makes processes by fork: run it on Linux")
