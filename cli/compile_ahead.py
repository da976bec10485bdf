"""``python -m hdtool.cli.compile_ahead METHOD``: compile a drafter, for another process that will load it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hdtool.data import demo


@contextmanager
def compiled_meanwhile(method: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that compiles the drafter of a method while this one loads a model; it ends with this block."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "hdtool.cli.compile_ahead", method]
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            yield process
        finally:
            process.kill()


def compile_drafter(method: str) -> None:
    from hdtool.runtime.budget.node_budget import FixedBudget
    from hdtool.runtime.config import DecodeConfig
    from hdtool.runtime.drafters.methods import drafter_within
    from hdtool.runtime.stores.corpus_index import CorpusIndex
    from hdtool.runtime.stores.history.history import History
    from hdtool.runtime.stores.model_store import ModelStore
    from hdtool.runtime.stores.store_set import StoreSet

    stores = StoreSet(ModelStore(demo.MODEL_STORE), CorpusIndex(demo.CORPUS_INDEX), history=History())
    drafter_within(FixedBudget, DecodeConfig(method), stores)


if __name__ == "__main__":
    compile_drafter(sys.argv[1])
