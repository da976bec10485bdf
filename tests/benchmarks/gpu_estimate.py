"""Estimates milliseconds per step of hdtool's fused pass on GPUs: ``python -m tests.benchmarks.gpu_estimate``.

The pass runs on meta tensors, and each operation counts its kernels and the bytes it reads and writes. This shows the
effect of a change without a GPU. The constants of the H200 were fitted to docs/benchmarks/gpu.md. No H100 was measured:
it gets the H200's, with the bandwidth of its data sheet. Those of the RTX 4090 are not measured either.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn import Module, functional
from transformers import AutoModelForCausalLM, LlamaConfig

from hdtool.runtime.caches.kv_cache import HeadShape, KVTensors, LayerShape
from hdtool.runtime.engines.reference.operations import HeadLayout, HeadNorms, KeysAndValues, Norm, Operations, Residual
from hdtool.runtime.engines.reference.program_pass import Matmul, ProgramPass
from hdtool.runtime.model.hidden_states import HiddenStates
from hdtool.runtime.model.pass_inputs import FULL, AttentionWindow, StepInput, StepTensors
from hdtool.runtime.program.embedding_and_head import Rotary
from hdtool.runtime.program.model_parts import EngineSupport, model_parts
from hdtool.runtime.settings.measuring import SHAPES

META = torch.device("meta")
PROCESSORS_FILLED = 16
"""Number of key splits that write partial results."""


class Gpu(NamedTuple):
    """Bandwidth and efficiency of a GPU."""

    bandwidth: float
    """Bytes per second, from the data sheet."""
    matmul: float
    """Share of the bandwidth that matmuls of few rows reach."""
    attention: float
    """Share of the bandwidth that attention reaches."""
    kernel: float
    """Seconds of a small kernel in a CUDA graph."""
    rest: float
    """Seconds per step outside the layers."""
    host: float = 2.3e-4
    """Seconds per plain step outside the pass, in which the host accepts tokens and prepares the next step."""


GPUS = {
    "H200": Gpu(4.8e12, 0.79, 0.6, 2.3e-6, 1e-4),
    "H100": Gpu(3.35e12, 0.79, 0.6, 2.3e-6, 1e-4),
    "RTX 4090": Gpu(1.008e12, 0.93, 0.7, 1.5e-6, 1e-4),
}


@dataclass
class Counted(Operations):
    """Operations that count the kernels and bytes of one pass instead of computing."""

    length: int
    reads_extent: bool = False
    kernels: int = 0
    small_bytes: int = 0
    weight_bytes: int = 0
    key_bytes: int = 0
    _shape: tuple[int, int] = field(default=(1, 1))

    def prepare(self, residuals: Sequence[Residual], head_norms: Sequence[HeadNorms]) -> None:
        pass

    def begin(self, step: StepTensors, extent: int) -> None:
        self._shape = step.tokens.shape[0], step.tokens.shape[1]

    def _small(self, *tensors: torch.Tensor) -> None:
        self.kernels += 1
        self.small_bytes += sum(tensor.nbytes for tensor in tensors)

    def add_norm(self, hidden: torch.Tensor, added: torch.Tensor | None, residual: Residual) -> torch.Tensor:
        weights = [norm.weight for norm in (residual.after, residual.before) if norm]
        self._small(hidden, hidden, hidden, *weights)
        return torch.empty_like(hidden) if residual.before else hidden

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: Rotary | None,
        norms: HeadNorms,
        cache: KeysAndValues | None,
        layout: HeadLayout,
    ) -> torch.Tensor:
        self._small(qkv, qkv, *(rotary[:2] if rotary else ()))
        return qkv

    def rotate_and_store_latents(
        self, queries: torch.Tensor, latents: torch.Tensor, rotary: Rotary | None, norm: Norm, cache: KeysAndValues
    ) -> torch.Tensor:
        raise NotImplementedError("only models of Llama's structure are counted")

    def attention(self, queries: torch.Tensor, cache: KeysAndValues, layout: HeadLayout) -> torch.Tensor:
        slots, rows = self._shape
        mixed = queries.new_empty((slots * rows, layout.query_heads * layout.width))
        one = layout.key_heads * layout.width * queries.itemsize
        self.key_bytes += 2 * slots * (self.length + rows) * one
        self.kernels += 1
        self._small(mixed, *[mixed.float()] * PROCESSORS_FILLED)
        return mixed

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gated = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        self._small(gate_up, gated)
        return gated

    def move(self, tensors: list[torch.Tensor]) -> None:
        self._small()

    def linear(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.kernels += 1
        self.weight_bytes += weight.nbytes
        return rows.new_empty((rows.shape[0], weight.shape[0]))

    def seconds(self, gpu: Gpu) -> float:
        matmuls = self.weight_bytes / (gpu.bandwidth * gpu.matmul)
        keys = self.key_bytes / (gpu.bandwidth * gpu.attention)
        return matmuls + keys + self.kernels * gpu.kernel + self.small_bytes / gpu.bandwidth + gpu.rest

    def limit(self, gpu: Gpu) -> float:
        return (self.weight_bytes + self.key_bytes) / gpu.bandwidth


def count(shape: str, slots: int, rows: int, length: int, layers: int | None = None) -> Counted:
    """Count one pass of a shape in bfloat16; ``layers`` reduces the number of layers."""
    config = LlamaConfig(**SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers}))
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    kind: EngineSupport[Module] = EngineSupport(
        lambda module: hasattr(module, "in_features"), lambda weight: True, lambda module: True
    )
    parts = model_parts(model, kind)
    assert parts
    counted = Counted(length)

    def merged(modules: Sequence[Any]) -> Matmul:
        weight = torch.cat([module.weight for module in modules])
        return lambda rows: counted.linear(rows, weight)

    windows = [AttentionWindow(FULL)] * len(parts.layers)
    step_pass = ProgramPass(parts, windows, counted, HiddenStates(), merged)
    heads = HeadShape(parts.layers[0].heads, parts.layers[0].width, torch.bfloat16, META)
    storage = KVTensors.for_layers([LayerShape(heads, heads)] * len(parts.layers), length + rows, slots)
    told = StepInput(torch.device("cpu"), slots).tensors(slots, rows)
    step = StepTensors(*(part.to(META) for part in told))
    matmuls = sum(prod(weight.shape) for weight in model.parameters() if weight.dim() == 2)
    with mock.patch.object(functional, "linear", counted.linear):
        step_pass.run(step, storage, 0)
    assert counted.weight_bytes == 2 * (matmuls - model.get_input_embeddings().weight.numel())
    # Embedding, rotary embeddings, signs of the sines, and argmax.
    counted.kernels += 20
    return counted


class Drafting(NamedTuple):
    """Measured method: trained layer passes per step (0 without a trained layer) and tokens per step."""

    name: str
    passes: int
    tokens: float

    @classmethod
    def parsed(cls, text: str) -> Drafting:
        name, passes, tokens = text.split(":")
        return cls(name, int(passes), float(tokens))


def drafter_pass(shape: str, rows: int, length: int) -> Counted:
    """Count a pass of an MTP layer: one layer, the output layer, and the projection of token and hidden state."""
    counted = count(shape, 1, rows, length, layers=1)
    width = int(SHAPES[shape]["hidden_size"])
    counted.weight_bytes += 2 * 2 * width * width
    counted.kernels += 8  # norms, projection, top-k and copies
    return counted


def print_drafting(shape: str, methods: Sequence[Drafting], length: int = 1000) -> None:
    """Print the estimated tokens per second of methods, with trees of 32 rows."""
    print(f"\n{shape} in bfloat16 at {length:,} tokens: milliseconds of a step with its drafts, tokens per second")
    print("GPU        method       passes  tokens a step    step  tokens/s  speed-up")
    for name, gpu in GPUS.items():
        plain = count(shape, 1, 1, length).seconds(gpu)
        for method in methods:
            step = count(shape, 1, 32, length).seconds(gpu) + method.passes * drafter_pass(shape, 4, length).seconds(
                gpu
            )
            step = plain if method.tokens == 1 else step
            speed = method.tokens / step
            print(
                f"{name:10} {method.name:12} {method.passes:6} {method.tokens:14.2f} {1e3 * step:7.2f} {speed:9.1f} "
                f"{speed * plain:9.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--drafting",
        nargs="*",
        type=Drafting.parsed,
        default=(),
        metavar="METHOD:PASSES:TOKENS",
        help="methods with the passes of their trained layer in a step and the tokens of a step",
    )
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"], default="llama-3-8b")
    options = parser.parse_args()
    print(f"{options.shape} in bfloat16: estimated milliseconds of a step, and the share of the limit by bandwidth")
    print("GPU        slots  rows  context  kernels a layer   limit    step  share  outside the pass")
    layers = int(SHAPES[options.shape]["num_hidden_layers"])
    for name, gpu in GPUS.items():
        for slots, rows, length in ((1, 1, 1000), (1, 32, 1000), (1, 1, 8000), (1, 32, 8000), (8, 8, 1000)):
            counted = count(options.shape, slots, rows, length)
            step, limit = counted.seconds(gpu), counted.limit(gpu)
            print(
                f"{name:10} {slots:5} {rows:5} {length:8,} {counted.kernels // layers:16} {1e3 * limit:7.2f} "
                f"{1e3 * step:7.2f} {limit / step:6.0%} {gpu.host / (step + gpu.host):17.0%}"
            )
    if options.drafting:
        print_drafting(options.shape, options.drafting)


if __name__ == "__main__":
    main()
