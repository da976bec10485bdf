"""Measures seconds and memory of a fresh process until its first token: ``python -m tests.benchmarks.start``.

    python -m tests.benchmarks.start [--model FILE_OR_FOLDER ...]

Each contender is a process that generates one token. Contenders take turns, and medians over rounds are printed. The
bare import is what any program needs that loads a model with transformers. The first round only fills caches and is not
counted. CPU seconds are summed over all threads, and the memory peak includes pages of mapped files that were read.
``--first`` adds the first start of each model, once: that of the first model with an empty home folder, those of others
when the passes are compiled. ``--also`` names the Python of another hdtool installation, such as an earlier version,
which starts with the same models and has a home folder of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from hdtool.data import demo
from hdtool.data.demo import EMBEDDED, SMOLLM2
from hdtool.runtime.kernels.machine_name import machine
from tests.benchmarks.laboratory import Table, parser_of

BARE = "import torch; from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer"
PROMPT = "hi"
PROGRAMS = ("hdtool", "other hdtool", "llama.cpp")
KIB = 1024 if sys.platform == "linux" else 1
"""Unit of ``ru_maxrss`` in bytes."""
RUNNER = (
    "import json, resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, "
    "stdout=subprocess.DEVNULL, stderr=subprocess.PIPE); used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    "sys.stderr.buffer.write(code.stderr) if code.returncode else None; "
    "print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss])); sys.exit(code.returncode)"
)
"""Program that prints a command's CPU seconds and memory peak; a process knows only the joint peak of its children."""


@dataclass(frozen=True)
class Start:
    """Resources used by one start."""

    seconds: float
    cpu_seconds: float
    bytes: int


def hdtool_generate(model: str, python: str = sys.executable) -> list[str]:
    asked = ["generate", "--model", model, "--prompt", PROMPT, "--max-new-tokens", "1"]
    return [python, "-m", "hdtool.cli", *asked]


def llama_cpp(binary: str, file: Path) -> list[str]:
    return [binary, "-m", str(file), "-p", PROMPT, "-n", "1", "-no-cnv", "--no-warmup"]


def started(command: Sequence[str], home: Path) -> Start:
    """Run a command in a fresh process, outside the working copy so that another installation uses its own modules."""
    began = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", RUNNER, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "HDTOOL_HOME": str(home), "PYTHONPATH": ""},
        cwd=home,
    )
    seconds = time.perf_counter() - began
    if run.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr}")
    cpu, peak = run.stdout.strip("[]\n ").split(",")
    return Start(seconds, float(cpu), int(peak) * KIB)


def size_of(file: Path) -> int:
    return file.stat().st_size


def cells(*starts: Start, bare: Start | None, size: int | None) -> list[str]:
    seconds, cpu = (median(getattr(one, field) for one in starts) for field in ("seconds", "cpu_seconds"))
    spread = f"{min(one.seconds for one in starts):.2f} to {max(one.seconds for one in starts):.2f}"
    peak = max(one.bytes for one in starts)
    ratio = f"{seconds / bare.seconds:.2f}" if bare else "1.00"
    of_file = f"{peak / size:.2f}" if size else ""
    return [f"{seconds:.2f}", spread, ratio, f"{cpu:.2f}", f"{peak / 1e6:.0f}", of_file]


def main() -> None:
    parser = parser_of(__doc__, rounds=5, first=False)
    parser.add_argument("--model", type=Path, nargs="*", default=[], help="GGUF files and folders to start with, too")
    parser.add_argument("--llama-cpp", help="llama-completion or llama-cli of llama.cpp, for the same files")
    parser.add_argument("--also", help="the Python of another installation of hdtool")
    options = parser.parse_args()
    files: dict[str, Path | None] = {EMBEDDED: None}
    if smollm2 := demo.smollm2_file():
        files[SMOLLM2] = smollm2
    files |= {str(path.resolve()): path.resolve() for path in options.model}
    commands = {"import of torch and transformers": [sys.executable, "-c", BARE]}
    sizes: dict[str, int] = {}
    for model, file in files.items():
        short = file.name if file else model
        commands[f"hdtool, {short}"] = hdtool_generate(model)
        if options.also:
            commands[f"other hdtool, {short}"] = hdtool_generate(model, options.also)
        if file and file.is_file() and options.llama_cpp:
            commands[f"llama.cpp, {short}"] = llama_cpp(options.llama_cpp, file)
        if file:
            weights = [file] if file.is_file() else file.glob("*.safetensors")
            sizes |= dict.fromkeys([f"{program}, {short}" for program in PROGRAMS], sum(map(size_of, weights)))
    print(f"{machine()}; load average {os.getloadavg()[0]:.1f}; {options.rounds} rounds\n")
    table = Table("contender", "seconds", "range", "to the import", "CPU seconds", "peak, MB", "to the file")
    with TemporaryDirectory(prefix="hdtool-start-") as home:
        homes = {name: Path(home) / name.partition(",")[0] for name in commands}
        for folder in homes.values():
            folder.mkdir(exist_ok=True)
        first, *rounds = (
            {name: started(command, homes[name]) for name, command in commands.items()}
            for _ in range(1 + options.rounds)
        )
    bare_name = next(iter(commands))
    bare = Start(median(one[bare_name].seconds for one in rounds), 0.0, 0)
    for name in commands:
        starts = [one[name] for one in rounds]
        table.row(name, *cells(*starts, bare=None if name == bare_name else bare, size=sizes.get(name)))
    if options.first:
        for name, start in first.items():
            if not name.startswith(("import", "llama.cpp")):
                table.row(f"{name}, the first time", *cells(start, bare=bare, size=sizes.get(name)))


if __name__ == "__main__":
    main()
