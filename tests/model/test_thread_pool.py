"""Threads that share a matmul: the same bits as one thread, whichever of them computes a part."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from hdtool.runtime.kernels.int8_matmul import Panels
from hdtool.runtime.kernels.linear_layers import compiled_linear
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_NAME
from hdtool.runtime.kernels.thread_pool import MIN_PARALLEL_WEIGHTS, ThreadPool, shared_thread_pool
from tests.support.packed_blocks import MAX_BLOCK_SIZE, int8_linear, needs_blocks, some_matrix
from tests.support.project import ROOT

pytestmark = [needs_blocks, pytest.mark.usefixtures("torch_threads")]
COLUMNS = MAX_BLOCK_SIZE
OUTS = MIN_PARALLEL_WEIGHTS // COLUMNS + 5
Q4_1 = FORMATS_BY_NAME["Q4_1"]


def results(threads: int) -> list[torch.Tensor]:
    torch.set_num_threads(threads)
    matrix = some_matrix(Q4_1, OUTS, COLUMNS)
    wide, panels = matrix.float(), Panels(matrix.blocks, Q4_1)
    found = []
    for rows in (1, 3, 9, 33):
        torch.manual_seed(rows)
        numbers, bias = torch.randn(rows, COLUMNS), torch.randn(OUTS)
        found += [
            compiled_linear(numbers, wide, bias),
            compiled_linear(numbers, matrix),
            int8_linear(numbers, panels, bias),
        ]
        found += [compiled_linear(numbers, wide.bfloat16())]
    return found


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    for one, many in zip(results(1), results(threads), strict=True):
        assert torch.equal(one, many)


def test_two_passes_at_once() -> None:
    """One of them has the threads, the other computes by itself."""
    torch.set_num_threads(3)
    matrix, numbers = some_matrix(Q4_1, OUTS, COLUMNS), torch.randn(2, COLUMNS)
    expected = compiled_linear(numbers, matrix)
    wrong: list[int] = []

    def compute(place: int) -> None:
        torch.set_num_threads(3)  # each thread of the interpreter has a number of its own
        for _ in range(200):
            if not torch.equal(compiled_linear(numbers, matrix), expected):
                wrong.append(place)

    both = [threading.Thread(target=compute, args=(place,)) for place in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not wrong


def test_a_team_of_one_and_a_team_that_is_busy_are_closed() -> None:
    with ThreadPool(1).open() as alone:
        assert alone == 0
    team = ThreadPool(2)
    for _ in range(3):
        with team.open() as first, team.open() as second:
            assert first != 0 and second == 0
    assert shared_thread_pool(2) is shared_thread_pool(2)


FORKED = """
import os, torch
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_NAME
from hdtool.runtime.kernels.linear_layers import compiled_linear
from tests.support.packed_blocks import some_matrix

torch.set_num_threads(3)
matrix, numbers = some_matrix(FORMATS_BY_NAME["Q4_1"], 500, 256), torch.ones(2, 256)
expected = compiled_linear(numbers, matrix)
child = os.fork()
if not child:
    os._exit(0 if torch.equal(compiled_linear(numbers, matrix), expected) else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_computes_all_parts_itself() -> None:
    run = subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "0", run.stderr
