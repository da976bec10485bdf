"""Runs another benchmark with the instructions of a processor that has fewer.

    python -m tests.benchmarks.narrow_registers avx2 packed_weights activations --model FILE.gguf
    python -m tests.benchmarks.narrow_registers 128 packed_weights activations --model FILE.gguf

128 stands for registers of so many bits, as ARM has them. Code for products and layers is generated for these; the
libraries still use what the processor has.
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
