"""Code for ARM processors with and without dot products of octets. It is generated here and not executed."""

from __future__ import annotations

from typing import Any

import pytest
from llvmlite import binding, ir  # type: ignore[import-untyped]

from hdtool.runtime.kernels.int8_dot_products import DOT_OF_SIGNED, has_dot_of_octets
from hdtool.runtime.kernels.int8_tiles import INT8_TILE_ROWS, panel_tile
from hdtool.runtime.kernels.matrix_formats import ALL_FORMATS, BlockFormat

ARM, MAC = "aarch64-unknown-linux-gnu", "arm64-apple-darwin"


@pytest.fixture(scope="module", autouse=True)
def targets() -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        binding.Target.from_triple(ARM)
    except RuntimeError:
        pytest.skip("this llvmlite has no code for ARM")


@pytest.mark.parametrize(
    ("triple", "cpu", "expected"),
    [
        (ARM, "neoverse-n1", True),
        (ARM, "neoverse-v2", True),
        (ARM, "cortex-a76", True),
        (MAC, "apple-m1", True),
        (ARM, "cortex-a72", False),
        (ARM, "generic", False),
    ],
)
def test_the_instruction_is_used_where_the_processor_has_it(triple: str, cpu: str, expected: bool) -> None:
    assert has_dot_of_octets(triple, cpu, "") is expected


def test_extensions_that_numba_is_set_to_count() -> None:
    assert has_dot_of_octets(ARM, "generic", "+dotprod")
    assert not has_dot_of_octets(ARM, "neoverse-n1", "-dotprod")


def assembly_of(tile: Any, format: BlockFormat) -> str:
    """Return the assembly of a tile for a processor with the instruction; ``format`` is that of the matrix."""
    module = ir.Module()
    module.triple = ARM
    index = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [index] * 5), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    matrix, *others = function.args
    tile(builder, format, matrix, *others)
    builder.ret_void()
    parsed = binding.parse_assembly(str(module))
    machine = binding.Target.from_triple(ARM).create_target_machine(cpu="neoverse-n1", opt=3)
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


@pytest.mark.parametrize("rows", [1, INT8_TILE_ROWS])
@pytest.mark.parametrize("format", [pytest.param(one, id=one.name) for one in ALL_FORMATS])
@pytest.mark.one_in(4)
def test_every_format_is_multiplied_with_it(format: BlockFormat, rows: int) -> None:
    code = assembly_of(panel_tile(rows, DOT_OF_SIGNED), format)
    assert "sdot" in code and "smull" not in code
