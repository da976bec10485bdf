"""Runs another benchmark as if the processor supported fewer instructions.

    python -m tests.benchmarks.narrow_registers avx2 packed_weights activations --model FILE.gguf
    python -m tests.benchmarks.narrow_registers 128 packed_weights activations --model FILE.gguf

128 stands for 128-bit registers, as on ARM. Only hdtool's kernels are compiled for this instruction set; libraries
still use all instructions of the processor.
"""

from __future__ import annotations

import runpy
import sys

from llvmlite import binding  # type: ignore[import-untyped]
from llvmlite.binding.targets import FeatureMap  # type: ignore[import-untyped]

FEATURES = {"avx2": ("avx", "avx2", "fma", "f16c"), "128": ("sse4.2", "f16c")}


def main() -> None:
    found = FeatureMap(dict.fromkeys(FEATURES[sys.argv[1]], True))
    binding.get_host_cpu_features = lambda: found
    module = f"tests.benchmarks.{sys.argv[2]}"
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
