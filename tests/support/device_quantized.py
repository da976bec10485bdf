"""Decode with quantized weights on a simulated CUDA device, in a separate process; see ``device_scenarios.py``.

``python -m tests.support.device_quantized torchao|compressed SCHEME ...``
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import Linear, Module
from transformers import AutoModelForCausalLM, PreTrainedModel

from hdtool.runtime.target.target import Target
from tests.support.compressed_checkpoints import save_compressed
from tests.support.device_scenarios import (
    GREEDY,
    MAX_NEW_TOKENS,
    PROMPT,
    SAMPLED,
    diagnostics,
    hierarchy,
    main,
    plain,
    watched,
)
from tests.support.families import model_of
from tests.support.simulated_cuda.install import install, on_device

INT4 = torch.int4  # type: ignore[attr-defined]
GROUP = 16
"""Number of columns of a weight that share a scale."""


def schemes() -> dict[str, Any]:
    """Return torchao's configurations by name."""
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
    )
    from torchao.quantization.granularity import PerGroup

    return {
        "int8": Int8WeightOnlyConfig(),
        "int4": IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(GROUP)),
        "float8": Float8WeightOnlyConfig(),
        "int8 with activations": Int8DynamicActivationInt8WeightConfig(),
    }


def quantized(scheme: Any) -> PreTrainedModel:
    """Return a model with quantized layers and an unquantized output layer, as transformers quantizes."""
    from torchao.quantization import quantize_

    def is_in_layer(module: Module, name: str) -> bool:
        return isinstance(module, Linear) and "lm_head" not in name

    model = copy.deepcopy(model_of("llama"))
    quantize_(model, scheme, filter_fn=is_in_layer)
    return model


def torchao(*names: str) -> dict[str, Any]:
    """Answer on the CPU and on the device with torchao's weights, by scheme."""
    return answered({name: quantized(scheme) for name, scheme in schemes().items() if name in names})


def compressed(*names: str) -> dict[str, Any]:
    """Answer on the CPU and on the device with compressed-tensors, which unpacks weights in the first pass."""
    from compressed_tensors.offload import remove_dispatch

    models = {}
    for name in names:
        with TemporaryDirectory() as folder:
            save_compressed(copy.deepcopy(model_of("llama")), name, Path(folder))
            loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        loaded(torch.tensor([PROMPT]))
        models[name] = remove_dispatch(loaded)  # otherwise weights move to another device by themselves
    return answered(models)


def answered(models: dict[str, PreTrainedModel]) -> dict[str, Any]:
    """Answer with each model, greedy and sampled, with and without drafts."""
    generated = {name: generated_by(model) for name, model in models.items()}
    expected = {name: [plain(model, sampling) for sampling in (GREEDY, SAMPLED)] for name, model in models.items()}
    install()
    found: dict[str, Any] = {}
    for name, model in models.items():
        target = Target(on_device(model))
        answers = [
            watched(target, sampling, drafter)["tokens"]
            for sampling, drafter in ((GREEDY, None), (SAMPLED, None), (GREEDY, hierarchy()), (SAMPLED, hierarchy()))
        ]
        found[name] = {"tokens": answers, "captures": target.captures, "fused": target.is_fused}
    expected = {name: answers * 2 for name, answers in expected.items()}
    return {"generated": generated, "expected": expected, "found": found} | diagnostics()


def generated_by(model: Any) -> list[int]:
    """Return the greedy answer of ``generate``."""
    answer = model.generate(torch.tensor([PROMPT]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    tokens: list[int] = answer[0, len(PROMPT) :].tolist()
    return tokens


if __name__ == "__main__":
    main({"torchao": torchao, "compressed": compressed}, sys.argv[1:])
