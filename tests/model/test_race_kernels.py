"""Kernels that run races: leaders and sums of weights by Triton's interpreter, and compiled ahead for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdtool.runtime.core.race_leaders import RACE, draw_among_leaders, race_input
from hdtool.runtime.core.top_k_top_p import ALL_TOKENS, UNDECIDED, DrawOptions, draw_row
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.model.pass_inputs import StepInput
from tests.support.compiled_kernels import SHARED_MEMORY, compiled
from tests.support.interpreted import interpreted_kernels
from tests.support.races import race_of

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinities are subtracted
CPU, ROWS, LENGTH = torch.device("cpu"), 4, 100


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    with interpreted_kernels():
        yield


def raced(logits: torch.Tensor, draws: list[DrawOptions | None]) -> Array:
    """Run the races of slots with ``ROWS`` rows, after contexts of ``LENGTH`` tokens: a root, its child and so on."""
    from hdtool.runtime.engines.cuda.triton_races import run_races

    step, slots = StepInput(CPU, len(draws), ROWS), len(draws)
    for slot, each in enumerate(draws):
        step.fill(slot, DraftTree.of(1, [2] * (ROWS - 1), range(-1, ROWS - 2)), ROWS, LENGTH)
        if each:
            step.draw(slot, ROWS, *race_input(each))
    step.send(slots, ROWS)
    races = torch.zeros((len(logits), RACE.itemsize // 8), dtype=torch.int64)
    run_races(logits, logits.argmax(-1), step.tensors(slots, ROWS).buffer, races)
    return races.numpy().reshape(-1).view(RACE)


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(vocabulary)
    logits = 4 * torch.randn(rows, vocabulary)
    logits[torch.rand(rows, vocabulary) < 0.1] = -torch.inf
    logits[:, 1] = 1.0
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [2, 300, 5000])
@pytest.mark.parametrize("temperature", [1e-3, 0.7, 3.0])
def test_races_are_those_of_the_host(vocabulary: int, temperature: float, dtype: torch.dtype) -> None:
    logits = logits_of(2 * ROWS, vocabulary, dtype)
    draws = [DrawOptions(np.uint64(2**64 - 1 - slot), np.float32(temperature), 0, 0.9, 0.0) for slot in range(2)]
    decided = 0
    for at, race in enumerate(raced(logits, [*draws])):
        row, own, position = logits[at].float().numpy(), draws[at // ROWS], LENGTH + 1 + at % ROWS
        expected = race_of(row, position, own)
        lead = expected["keys"] > -30
        assert np.array_equal(race["tokens"][lead], expected["tokens"][lead])
        assert np.array_equal(race["scores"][lead], expected["scores"][lead]) and race["highest"] == row.max()
        np.testing.assert_allclose(race["keys"][lead], expected["keys"][lead], atol=1e-4)
        for field in ("certain", "possible", "total"):
            places = () if field == "total" else lead
            np.testing.assert_allclose(race[field][places], expected[field][places], rtol=1e-4, atol=1e-30)
        for draw in (own, own._replace(top_p=1.0)):
            found = draw_among_leaders(position, race, draw)
            assert found in (UNDECIDED, draw_row(position, row, ALL_TOKENS, draw))
            decided += found != UNDECIDED
    assert decided >= 2 * len(logits) - 2


def test_slots_that_do_not_draw_are_left_out() -> None:
    draws = DrawOptions(np.uint64(1), np.float32(1.0), 0, 1.0, 0.0)
    logits = logits_of(2 * ROWS, 300, torch.float32)
    alone, both = raced(logits, [None, draws]), raced(logits, [draws, draws])
    assert not alone["tokens"][:ROWS].any() and not alone["keys"][:ROWS].any()
    assert np.array_equal(alone["tokens"][ROWS:], both["tokens"][ROWS:])


def test_what_is_not_a_number_is_left_to_the_host() -> None:
    draws = DrawOptions(np.uint64(1), np.float32(1.0), 0, 1.0, 0.0)
    logits = logits_of(ROWS, 300, torch.float32)
    logits[0, 7], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    races: Any = raced(logits, [draws])
    assert not np.isfinite(races["highest"][:3]).any() and np.isfinite(races["highest"][3])


KERNELS = """
from hdtool.runtime.core.race_leaders import LEADERS
from hdtool.runtime.engines.cuda.triton_races import BLOCK, SUMS
for name in ("bf16", "fp16", "fp32"):
    kinds = {"logits": "*" + name, "sums": "*fp32"} | dict.fromkeys(("best", "step", "found", "races"), "*i64")
    compiled(f"lead-{name}", race_kernels.lead_kernel, kinds, dict(LEADERS=LEADERS, BLOCK=BLOCK), 4)
    for width in (64, 1024):
        compiled(f"select-{name}-{width}", race_kernels.select_kernel, kinds, dict(LEADERS=LEADERS, BLOCK=width), 4)
    compiled(f"weigh-{name}", race_kernels.weigh_kernel, kinds, dict(LEADERS=LEADERS, SUMS=SUMS, BLOCK=BLOCK), 4)
"""


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(each, marks=pytest.mark.long if each in (89, 90) else pytest.mark.exhaustive)
        for each in SHARED_MEMORY
    ],
)
def test_races_compile_without_spills(capability: int, tmp_path: Path) -> None:
    cases = compiled(KERNELS, capability, (), tmp_path)
    assert len(cases) == 12
    for case, found in cases.items():
        assert not found.spilled and found.shared <= SHARED_MEMORY[capability] * 1024, (case, found)
