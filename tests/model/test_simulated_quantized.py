"""Quantized weights in captured steps on a simulated device: the tokens of the same weights on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compressed_checkpoints import SCHEMES as COMPRESSED
from tests.support.device_processes import needs_no_cuda, scenarios

pytestmark = needs_no_cuda
SCHEMES = ("int8", "int4", "float8", "int8 with activations")


def test_weights_of_torchao_are_captured_and_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="not installed: pip install 'hdtool[quantized]'")
    told = scenarios(tmp_path, "torchao", *SCHEMES, module="device_quantized")["torchao"]
    assert not told["faults"]
    assert tuple(told["found"]) == SCHEMES
    for name, answer in told["found"].items():
        assert answer["tokens"] == told["expected"][name], name
        assert answer["tokens"][0] == answer["tokens"][2] == told["generated"][name], name
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
