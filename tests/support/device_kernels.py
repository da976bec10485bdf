"""Triton kernels on a simulated CUDA device, where Triton's interpreter computes them.

``python -m tests.support.device_kernels GROUP,... [ARGUMENT ...]``
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from transformers import PreTrainedModel

from hdtool.runtime.core import tolerances
from hdtool.runtime.engines.captured.fused_pass import fuse
from hdtool.runtime.engines.captured.static_steps import _Buffers
from hdtool.runtime.engines.captured_functions import never
from hdtool.runtime.engines.cuda import (
    mixer_kernels,
    race_kernels,
    triton_kernels,
    triton_mixers,
    triton_operations,
    triton_races,
)
from hdtool.runtime.model.pass_inputs import StepInput
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import answers_of, request as asked
from tests.support.device_scenarios import GREEDY, PROMPT, diagnostics, hierarchy, main, plain, watched, wrong_drafter
from tests.support.families import DELTA, MAMBA, model_of, random_model
from tests.support.simulated_cuda.graphs import CUDAGraph
from tests.support.simulated_cuda.install import install, on_device
from tests.support.simulated_cuda.queue import DEVICE
from tests.support.simulated_cuda.triton_launches import DeviceKernels

TOKENS = 6
HYBRIDS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_5": lambda: random_model(
        "Qwen3_5Text",
        **{**DELTA, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8},
        num_hidden_layers=32,
    ),
    "nemotron_h": lambda: random_model(
        "NemotronH",
        num_hidden_layers=42,
        layers_block_type=[*["mamba", "mlp"] * 9, "attention", "mlp", "mamba"] * 2,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        time_step_min=1e-9,
    ),
    "falcon_h1": lambda: random_model("FalconH1", **MAMBA, mamba_d_ssm=64, num_hidden_layers=36),
    "lfm2": lambda: random_model(
        "Lfm2", num_hidden_layers=16, layer_types=["conv", "conv", "full_attention", "conv"] * 4, conv_L_cache=3
    ),
}
"""Models with as many layers of each kind as a published one: Qwen3.5-4B, Nemotron-H-4B, Falcon-H1-1.5B-Deep, LFM2."""


def launch_on_device() -> None:
    """Install the simulated device, and let it launch all Triton kernels."""
    install()
    vars(triton_operations)["triton_kernels"] = DeviceKernels(triton_kernels)
    vars(triton_mixers)["mixer_kernels"] = DeviceKernels(mixer_kernels)
    vars(triton_races)["race_kernels"] = DeviceKernels(race_kernels)


def kernels(*names: str) -> dict[str, Any]:
    """Count the kernels of steps of bfloat16 models by number of rows; no step is computed."""
    # Many layers of random weights amplify rounding, by how much depends on the CPU. Kernels don't depend on values.
    vars(tolerances)["LOW_PRECISION_TOLERANCE"] = math.inf
    models = {name: HYBRIDS[name]().bfloat16() for name in names}
    launch_on_device()
    return {name: {rows: step_kernels(target, rows) for rows in (1, 64)} for name, target in targets(models)}


def targets(models: dict[str, Any]) -> list[tuple[str, Target]]:
    return [(name, Target(on_device(model), never)) for name, model in models.items()]


@torch.inference_mode()
def step_kernels(target: Target, rows: int) -> Counter[str]:
    """Capture a step, and return its kernels by name."""
    program = fuse(target.stock, target.facts)
    assert program and not program.reads_extent
    storage, step, buffers = target.allocate(1).storage, StepInput(target.device), _Buffers(target.device, rows)
    DEVICE.capture = graph = CUDAGraph()
    buffers.write(program.run(step.tensors(1, rows), storage, 0))
    DEVICE.capture = None
    return Counter(operation.name for operation in graph.operations)


def answers(*families: str) -> dict[str, Any]:
    """Answer on the CPU and by kernels on the device."""
    expected = {family: plain(model_of(family), GREEDY)[:TOKENS] for family in families}
    launch_on_device()
    found = {}
    for family in families:
        target = Target(on_device(model_of(family)))
        ways = {"plain": None, "lying drafter": wrong_drafter(expected[family])}
        answered = {way: watched(target, GREEDY, drafter, max_new_tokens=TOKENS) for way, drafter in ways.items()}
        found[family] = {"expected": expected[family], "answers": answered, "fused": target.is_fused}
    return {"found": found} | diagnostics()


SAMPLINGS = {
    "T 1": SamplingConfig(temperature=1.0, seed=3),
    "T 0.7, top-p 0.95, min-p 0.001": SamplingConfig(temperature=0.7, top_p=0.95, min_p=0.001, seed=6),
}
OTHERS = {
    "greedy": GREEDY,
    "penalised": SamplingConfig(temperature=0.7, repetition_penalty=1.2, seed=7),
    "top-k 100": SamplingConfig(temperature=1.0, top_k=100, seed=8),
}
"""Samplings that no race decides."""


def sampled(family: str) -> dict[str, Any]:
    """Answer on the CPU and on the device with draws that races decide, alone and beside others in a batch."""
    every = SAMPLINGS | OTHERS
    expected = {name: plain(model_of(family), sampling)[:TOKENS] for name, sampling in every.items()}
    launch_on_device()
    target = Target(on_device(model_of(family)))
    found = {}
    for name, sampling in SAMPLINGS.items():
        ways = {"plain": None, "lying drafter": wrong_drafter(expected[name]), "hd": hierarchy()}
        found[name] = {way: watched(target, sampling, drafter, max_new_tokens=TOKENS) for way, drafter in ways.items()}
    requests = (asked(name, PROMPT, wrong_drafter(expected[name]), every[name]) for name in every)
    batch = answers_of(target, requests, 3, TOKENS)
    found["T 1"]["undecided"] = undecided_answer(target, SAMPLINGS["T 1"])
    return {"expected": expected, "found": found, "batch": batch, "captures": target.captures} | diagnostics()


def undecided_answer(target: Target, sampling: SamplingConfig) -> dict[str, Any]:
    """Answer while the device draws other numbers than the host, so that no race decides."""
    usual = StepInput.draw

    def draw(step: StepInput, slot: int, rows: int, seed: int, options: int) -> None:
        usual(step, slot, rows, seed + 1, options)

    StepInput.draw = draw  # type: ignore[assignment,method-assign]
    try:
        return watched(target, sampling, max_new_tokens=TOKENS)
    finally:
        StepInput.draw = usual  # type: ignore[method-assign]


if __name__ == "__main__":
    main({group.__name__: group for group in (kernels, answers, sampled)}, sys.argv[1:], keeps_triton=True)
