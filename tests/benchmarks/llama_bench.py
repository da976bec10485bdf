"""Runs llama.cpp's ``llama-bench``, which times passes of given lengths without the overhead of a Python binding."""

from __future__ import annotations

import json
import resource
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hdtool.data.errors import ModelError

SHORTEST_RUN = ("-p", "0", "-n", "0", "-pg", "1,1")


@dataclass(frozen=True)
class LlamaBench:
    program: Path
    file: Path
    threads: int

    def seconds(self, prompt: int, answer: int) -> tuple[float, float]:
        """Return wall-clock and CPU seconds for a prompt and an answer of the given numbers of tokens."""
        row, cpu = self._run("-p", "0", "-n", "0", "-pg", f"{prompt},{answer}")
        return row["avg_ns"] / 1e9, max(cpu - self._start, 1e-9)

    @cached_property
    def build(self) -> str:
        row, _ = self._run(*SHORTEST_RUN)
        return f"commit {row['build_commit']} (build {row['build_number']}), backends {row['backends']}"

    @cached_property
    def _start(self) -> float:
        """CPU seconds of an almost empty run, which starts the program and loads the file."""
        self._run(*SHORTEST_RUN)  # loads the file into the page cache
        return min(self._run(*SHORTEST_RUN)[1] for _ in range(3))

    def _run(self, *lengths: str) -> tuple[dict[str, Any], float]:
        options = ("-t", str(self.threads), *lengths, "-r", "1", "--no-warmup", "-o", "json")
        command = (str(self.program), "-m", str(self.file), *options)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            (row,) = json.loads(done.stdout)
        except OSError as error:
            raise ModelError(f"--llama-bench names {self.program}, which does not run: {error.strerror}") from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["it prints nothing"])[-1]
            raise ModelError(f"{self.program} fails on {self.file} ({last}): leave out --llama-bench") from None
        except ValueError:
            raise ModelError(f"{self.program} prints no JSON of one test: is it llama-bench?") from None
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return row, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
