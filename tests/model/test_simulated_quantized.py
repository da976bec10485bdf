"""Quantized weights in captured steps on a simulated device: the tokens of the same weights on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.model.test_simulated_cuda import scenarios
from tests.support.compressed_checkpoints import SCHEMES as COMPRESSED

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is not None,
    reason="a device is simulated on Linux, in a build of torch without CUDA",
)
SCHEMES = ("int8", "int4", "float8", "int8 with activations")


def test_weights_of_torchao_are_captured_and_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="not installed: pip install 'hdtool[quantized]'")
    told = scenarios(tmp_path, "torchao", *SCHEMES, module="device_quantized")["torchao"]
    assert not told["faults"]
    assert tuple(told["found"]) == SCHEMES
    for name, answer in told["found"].items():
        assert answer["tokens"] == told["expected"][name], name
        assert answer["captures"] and answer["fused"], name


def test_weights_of_compressed_tensors_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    """With inputs of 8 bits, its code makes a tensor of a range of numbers in each layer, which cannot be captured."""
    pytest.importorskip(
        "compressed_tensors", reason="compressed-tensors is not installed: pip install 'hdtool[quantized]'"
    )
    told = scenarios(tmp_path, "compressed", *COMPRESSED, module="device_quantized")["compressed"]
    for name, answer in told["found"].items():
        assert answer["tokens"] == told["expected"][name], name
        assert answer["captures"] == (name == "W4A16"), name
    assert all(fault.startswith("cannot copy from memory that is not pinned") for fault in told["faults"])
