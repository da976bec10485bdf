"""Matmuls with the blocks of GGUF files and of torchao: every bit is that of the library's numbers in float32."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from platform import machine

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings, strategies as st
from torch.nn.functional import embedding

from hdtool.runtime.kernels.compact_weight import CompactWeight, is_packed
from hdtool.runtime.kernels.int8_matmul import Panels
from hdtool.runtime.kernels.matrix_formats import ALL_FORMATS, FORMATS_BY_NAME, GGUF_FORMATS, BlockFormat
from hdtool.runtime.kernels.packed_matrix import PackedMatrix
from tests.support.packed_blocks import (
    MAX_BLOCK_SIZE,
    SCALES,
    expected,
    int8_linear,
    needs_blocks,
    set_scales,
    some_matrix,
)
from tests.support.project import ROOT

pytestmark = needs_blocks
ALL = [pytest.param(one, id=name) for name, one in FORMATS_BY_NAME.items()]
SPECIAL = [0.0, -0.0, 6e-8, -5.9e-5, float("inf"), -float("inf"), float("nan"), 65504.0, 1.0]
"""Zeros, subnormal numbers, infinities, NaN and the largest number of float16."""


def assert_same_bits(found: np.ndarray, numbers: np.ndarray) -> None:
    both_nan = np.isnan(found) & np.isnan(numbers)
    assert np.array_equal(np.where(both_nan, 0, found).view(np.int32), np.where(both_nan, 0, numbers).view(np.int32))


@pytest.mark.parametrize("format", GGUF_FORMATS, ids=lambda one: one.name)
def test_sizes_are_those_of_the_library(format: BlockFormat) -> None:
    kind = GGMLQuantizationType[format.name]
    assert GGML_QUANT_SIZES[kind] == (format.block_size, format.bytes)


@given(
    st.sampled_from(ALL_FORMATS),
    st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=16)), min_size=2, max_size=2),
    st.data(),
)
@settings(deadline=None)
def test_any_block_has_the_numbers_of_the_library(
    format: BlockFormat, scales: list[float], data: st.DataObject
) -> None:
    content = data.draw(st.binary(min_size=format.bytes, max_size=format.bytes))
    block = np.frombuffer(content, np.uint8).copy()[None]
    for first, scale in zip(SCALES[format.name], scales, strict=False):
        set_scales(block, format, first, scale)
    matrix = PackedMatrix(torch.from_numpy(block), format)
    assert_same_bits(matrix.float().numpy(), expected(matrix))


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("scale", SPECIAL)
def test_all_bytes_at_all_places(format: BlockFormat, scale: float) -> None:
    """Each byte of a block has each of its values."""
    blocks = (np.arange(256)[:, None] + 37 * np.arange(format.bytes)[None]).astype(np.uint8)
    for first in SCALES[format.name]:
        set_scales(blocks, format, first, np.full(256, scale))
    matrix = PackedMatrix(torch.from_numpy(blocks), format)
    assert_same_bits(matrix.float().numpy(), expected(matrix))


def test_all_exponents_and_all_numbers_of_mxfp4() -> None:
    format = FORMATS_BY_NAME["MXFP4"]
    blocks = (np.arange(256)[:, None] + 17 * np.arange(format.bytes)[None]).astype(np.uint8)
    blocks = np.repeat(blocks, 256, 0)
    blocks[:, 0] = np.tile(np.arange(256), 256)
    matrix = PackedMatrix(torch.from_numpy(blocks), format)
    assert_same_bits(matrix.float().numpy(), expected(matrix))


@pytest.mark.parametrize("format", ALL)
def test_rows_of_an_embedding(format: BlockFormat) -> None:
    matrix = some_matrix(format, 9, MAX_BLOCK_SIZE)
    weight, wide = CompactWeight(matrix), matrix.float()
    assert is_packed(weight)
    ids = torch.tensor([[0, 8, 3], [3, 3, 1]])
    assert torch.equal(embedding(ids, weight), embedding(ids, wide))
    assert torch.equal(weight[torch.tensor([-1, 2])], wide[[-1, 2]])
    assert torch.equal(weight.index_select(0, ids[0]), wide[ids[0]])
    assert torch.equal(weight.detach()[2:5] * 1, wide[2:5])
    assert weight.expansions.count == 1, "the last one alone expands what it reads"
    for wrong in (9, -1):
        with pytest.raises(IndexError):
            embedding(torch.tensor([wrong]), weight)
    assert torch.equal(weight.index_select(1, ids[0]), wide[:, ids[0]])
    assert torch.equal(weight[ids[0], ids[1]], wide[ids[0], ids[1]])


NARROW = """
from llvmlite import binding
from llvmlite.binding.targets import FeatureMap

features = FeatureMap({name: True for name in FEATURES})
binding.get_host_cpu_features = lambda: features
import torch
from hashlib import sha256
from hdtool.runtime.kernels.vector_code import LANES
from hdtool.runtime.kernels.int8_matmul import Panels
from hdtool.runtime.kernels.matrix_formats import ALL_FORMATS
from hdtool.runtime.kernels.linear_layers import compiled_linear
from tests.support.packed_blocks import expected, int8_linear, some_matrix

for format in [one for one in ALL_FORMATS if one.name in NAMES]:
    matrix, numbers = some_matrix(format, 11, 512), torch.randn(30, 512)
    wide = torch.from_numpy(expected(matrix))
    assert torch.equal(matrix.float(), wide), format
    alone = torch.cat([compiled_linear(row, wide) for row in numbers.split(1)])
    for rows in (1, 2, 3, 4, 5, 8, 9, 30):
        assert torch.equal(compiled_linear(numbers[:rows], matrix), alone[:rows]), (format, rows)
    numbers = torch.sin(torch.arange(5 * 512.0)).view(5, 512)
    print(sha256(int8_linear(numbers, Panels(matrix.blocks, format)).numpy()).hexdigest())
print(LANES)
"""


@pytest.mark.long
@pytest.mark.skipif(machine().lower() not in ("x86_64", "amd64"), reason="the processors are named")
@pytest.mark.parametrize(
    ("features", "lanes"),
    [(["avx", "avx2", "fma", "f16c"], 8), pytest.param(["sse4.2", "f16c"], 4, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize(
    "names", [["Q5_1", "IQ4_NL"], pytest.param(list(FORMATS_BY_NAME), marks=pytest.mark.exhaustive)]
)
def test_narrower_registers_give_the_same_bits(
    names: list[str], features: list[str], lanes: int, tmp_path: Path
) -> None:
    """The code for a processor without AVX-512, and with the registers of ARM."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", NARROW.replace("FEATURES", repr(features)).replace("NAMES", repr(names))]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    *hashes, found = run.stdout.split()
    assert int(found) == lanes
    numbers = torch.sin(torch.arange(5 * 512.0)).view(5, 512)
    for name, found in zip(names, hashes, strict=True):
        format = FORMATS_BY_NAME[name]
        matrix = some_matrix(format, 11, 512)
        assert sha256(int8_linear(numbers, Panels(matrix.blocks, format)).numpy().tobytes()).hexdigest() == found, (
            format
        )
