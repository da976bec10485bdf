"""Whether code for an ARM processor can have its dot products of octets (``sdot``)."""

from __future__ import annotations

from llvmlite import binding  # type: ignore[import-untyped]

SUM_OF_PRODUCTS = """
define i32 @sum_of_products(ptr %first, ptr %second) {
  %a = load <16 x i8>, ptr %first
  %b = load <16 x i8>, ptr %second
  %c = sext <16 x i8> %a to <16 x i32>
  %d = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %c, %d
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
  ret i32 %sum
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""


def has_dot_of_octets(triple: str, cpu: str, features: str) -> bool:
    """Whether LLVM takes ``sdot`` by itself for this processor.

    Its list of the host's features does not name the instruction, whose use ends the process where LLVM does not expect
    it. So it is shown a sum for which it chooses ``sdot`` wherever it can.
    """
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2)
    return "sdot" in machine.emit_assembly(binding.parse_assembly(SUM_OF_PRODUCTS))
