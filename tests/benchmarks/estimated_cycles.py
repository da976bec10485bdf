"""Estimates the time of packed matmuls on other processors, with LLVM's machine code analyzer.

    python -m tests.benchmarks.estimated_cycles neoverse-n1 --mca llvm-mca-19
    python -m tests.benchmarks.estimated_cycles znver4 --features +avx2,+fma,+f16c --mca llvm-mca-19

The code of a tile is compiled for the processor, and ``llvm-mca`` computes the cycles of its innermost loop from a
model of the processor's execution units, for data in the L1 cache. Nothing is executed. To judge the accuracy, compare
an estimate for this machine with what ``packed_products`` measures.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import binding, ir  # type: ignore[import-untyped]
from llvmlite.binding.targets import FeatureMap  # type: ignore[import-untyped]

FORMATS = ("Q8_0", "Q4_1", "Q4_K")
ROWS = (1, 2, 4, 8)
ITERATIONS = 200
ARM, X86 = "aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"
X86_NAMES = ("znver", "skylake", "icelake", "haswell", "sapphirerapids", "alderlake")


class Processor(NamedTuple):
    name: str
    features: str
    """Extensions that the code may use, in LLVM's notation; empty for all that the processor has."""

    @property
    def triple(self) -> str:
        return X86 if self.name.startswith(X86_NAMES) else ARM

    def machine(self) -> Any:
        return binding.Target.from_triple(self.triple).create_target_machine(
            cpu=self.name, features=self.features, opt=3
        )


def _pretend(processor: Processor) -> None:
    """Make the code generators target a processor; call it before importing them, as they read its features then."""
    names = [name[1:] for name in processor.features.split(",") if name]
    found = FeatureMap(dict.fromkeys(names, True))
    binding.get_host_cpu_features = lambda: found


def assembly_of(processor: Processor, tile: Any, kind: Any) -> str:
    """Return the assembly of a tile for a processor; ``kind`` is the type of the matrix."""
    module = ir.Module()
    module.triple = processor.triple
    index = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [index] * 5), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    matrix, *others = function.args
    tile(builder, kind, matrix, *others)
    builder.ret_void()
    parsed, machine = binding.parse_assembly(str(module)), processor.machine()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def _innermost(assembly: str) -> str:
    """Return the longest block that ends with a jump to its own start."""
    blocks = re.split(r"^(\.?L?[\w.]+):", assembly, flags=re.MULTILINE)
    loops = []
    for label, block in zip(blocks[1::2], blocks[2::2], strict=True):
        jump = re.search(rf"^\s+(b\.\w+|cbn?z|tbn?z|j\w+)\s.*{re.escape(label)}\s*$", block, re.MULTILINE)
        if jump:
            loops.append(block[: jump.end()].replace(label, "again"))
    return "again:\n" + max(loops, key=len)


def _cycles(processor: Processor, loop: str, program: str) -> float:
    """Return the cycles per iteration."""
    command = [program, f"-mtriple={processor.triple}", f"-mcpu={processor.name}", f"-iterations={ITERATIONS}"]
    if processor.triple == ARM:
        command.append("-mattr=+dotprod")
    run = subprocess.run(command, input=loop, capture_output=True, text=True, check=False)
    found = re.search(r"Total Cycles:\s+(\d+)", run.stdout)
    if not found:
        raise SystemExit(f"{program}: {run.stderr.strip()[:500]}")
    return int(found[1]) / ITERATIONS


class Case(NamedTuple):
    name: str
    rows: int
    tile: Any
    kind: Any
    weights: int
    """Number of weights that an iteration of the tile multiplies by each input row."""
    together: int
    """Number of input rows of the tile."""


def _cases(dot: str) -> Iterator[Case]:
    from hdtool.runtime.engines.cpu.int8_code import PANEL_ROWS, PART
    from hdtool.runtime.engines.cpu.int8_tiles import INT8_TILE_ROWS, panel_tile
    from hdtool.runtime.kernels.gemm_tiles import tile, tile_out_features
    from hdtool.runtime.kernels.matrix_formats import FORMAT_OF_TYPE

    for kind, form in FORMAT_OF_TYPE.items():
        if form.name not in FORMATS:
            continue
        for rows in ROWS:
            outs = tile_out_features(rows)
            yield Case(form.name, rows, tile(outs, rows), kind, outs * form.block_size, rows)
            together = min(rows, INT8_TILE_ROWS)
            panel = panel_tile(together, dot)
            yield Case(f"{form.name}, int8 activations", rows, panel, kind, PANEL_ROWS * PART, together)


def _best_dot(processor: Processor) -> str:
    from hdtool.runtime.engines.cpu import int8_code
    from hdtool.runtime.engines.cpu.int8_code import has_dot_of_octets

    if processor.triple == X86:
        return int8_code.best_dot()
    has = has_dot_of_octets(processor.triple, processor.name, processor.features)
    return int8_code.DOT_OF_SIGNED if has else int8_code.ANY_PROCESSOR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processor", help="a name of LLVM, such as neoverse-n1")
    parser.add_argument("--features", default="", help="extensions of x86 that code may use, such as +avx2,+fma,+f16c")
    parser.add_argument("--any", action="store_true", help="without instructions for products of octets")
    parser.add_argument("--mca", default="llvm-mca", help="the analyzer; LLVM 19 has models of recent processors")
    options = parser.parse_args()
    processor = Processor(options.processor, options.features)
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    _pretend(processor)
    dot = "any" if options.any else _best_dot(processor)
    print(f"{processor.name} {processor.features}, {dot}: cycles for 1,000 weights, by rows")
    table: dict[str, dict[int, float]] = {}
    for case in _cases(dot):
        cycles = _cycles(processor, _innermost(assembly_of(processor, case.tile, case.kind)), options.mca)
        table.setdefault(case.name, {})[case.rows] = cycles / case.weights * 1000 * (case.rows / case.together)
    print("| product | " + " | ".join(str(rows) for rows in ROWS) + " |")
    print("|---" * (len(ROWS) + 1) + "|")
    for name, found in table.items():
        print(f"| {name} | " + " | ".join(f"{found[rows]:.0f}" for rows in ROWS) + " |")


if __name__ == "__main__":
    main()
