"""Mixtures of experts: passes report how many experts their rows wake."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import Module

from hdtool.runtime.core.tree import DraftTree
from tests.support.described import compiled_of, model_of

pytestmark = pytest.mark.usefixtures("wide")

PROMPT, ROOT = [3, 5, 8, 13, 21], 34


@torch.inference_mode()
def active_experts_by_library(model: Any, context: list[int], rows: int) -> int:
    """The distinct experts that the library's routers choose for the last rows, over all layers."""
    chosen: list[torch.Tensor] = []

    def note(router: Module, given: Any, found: tuple[torch.Tensor, ...]) -> None:
        chosen.extend(one[-rows:] for one in found if not one.is_floating_point())

    routers = [one for name, one in model.named_modules() if type(one).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(note) for router in routers]
    model(torch.tensor([context]))
    for hook in hooks:
        hook.remove()
    assert len(chosen) == len(routers) > 0
    return sum(one.unique().numel() for one in chosen)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "gemma4, experts beside MLPs"])
def test_a_pass_reports_the_experts_that_its_rows_choose(name: str) -> None:
    target = compiled_of(name)
    library = deepcopy(model_of(name))
    for drafted in ([], [7], [7, 40, 90, 11, 62]):
        target.prefill(target.cache, 0, PROMPT)
        target.verify(target.cache, [DraftTree.of(ROOT, drafted, range(-1, len(drafted) - 1))])
        expected = active_experts_by_library(library, [*PROMPT, ROOT, *drafted], 1 + len(drafted))
        assert target.log.experts == expected


def test_equal_rows_wake_the_experts_of_one() -> None:
    target = compiled_of("qwen3_moe")
    target.prefill(target.cache, 0, PROMPT)
    active_experts = []
    for siblings in (1, 9):
        target.verify(target.cache, [DraftTree.of(ROOT, [7] * siblings, [-1] * siblings)])
        active_experts.append(target.log.experts)
    assert active_experts[0] == active_experts[1]
    with target.log.unchanged():
        target.verify(target.cache, [DraftTree.bare(ROOT)])
    assert target.log.experts == active_experts[1]


def test_a_model_without_experts_reports_none() -> None:
    target = compiled_of("gemma2")
    target.prefill(target.cache, 0, PROMPT)
    target.verify(target.cache, [DraftTree.bare(ROOT)])
    assert target.log.nodes == 0 and target.log.experts == 0
