"""Compile Triton kernels ahead of time for GPUs that need not be present, and read their use of resources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

COMPILE = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from hdtool.runtime.engines.cuda import mixer_kernels, race_kernels, triton_kernels
from hdtool.runtime.engines.cuda.triton_operations import TileSizes, padded
folder, capability, widths = sys.argv[1], int(sys.argv[2]), list(map(int, sys.argv[3:]))

def compiled(case, kernel, kinds, constants, warps, stages=2):
    names = kernel.arg_names
    kinds = kinds | dict.fromkeys(constants, "constexpr")
    signature = {one: kinds.get(one, "i32") for one in names}
    whole = {"width", "stride", "queries", "keys"}
    aligned = [
        one for one in names if kinds.get(one, "").startswith("*") or one in whole or one.endswith("_stride")
    ]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(one),): value for one, value in constants.items()},
        {(names.index(one),): [["tt.divisibility", 16]] for one in aligned},
    )
    made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages})
    open(f"{folder}/{case}.cubin", "wb").write(made.asm["cubin"])
    print(case, made.metadata.shared)
"""

SHARED_MEMORY = {80: 163, 89: 99, 90: 227, 100: 227}
"""KiB of shared memory that a block may have, by compute capability."""


class Compiled(NamedTuple):
    """Resources of a multiprocessor that a kernel uses."""

    registers: int
    spilled: int
    """Bytes per thread."""
    shared: int
    """Bytes per block."""


def compiled(code: str, capability: int, widths: tuple[int, ...], folder: Path) -> dict[str, Compiled]:
    """Compile the kernels of ``code`` for a GPU in another process; return their resources by case."""
    import triton

    command = [sys.executable, "-c", COMPILE + code, str(folder), str(capability), *map(str, widths)]
    compiling = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    made = subprocess.run(command, env=compiling, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = {}
    for case, shared in (line.split() for line in made.stdout.splitlines()):
        resources = subprocess.run(
            [tool, "--dump-resource-usage", folder / f"{case}.cubin"], capture_output=True, text=True, check=True
        ).stdout
        numbers = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", resources)
        assert numbers, resources
        registers, stack, local = map(int, numbers.groups())
        found[case] = Compiled(registers, max(0, stack - 8) + local, int(shared))
    return found
