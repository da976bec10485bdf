"""A family is one row: a model unlike Llama is compiled, captured and proved by a description alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hdtool.runtime.program.hybrid_families import DESCRIBED
from hdtool.runtime.program.llama_like_families import Family
from hdtool.runtime.target.target import Target
from tests.support.described import assert_right
from tests.support.fused import widen, with_compiled_layers
from tests.support.made_up import PACKAGE, ROW, made_up_model
from tests.support.rehearsed import direct

SIZES = ((6, 0, 20), (20, 6), (30, 4, 9))


def describe(monkeypatch: pytest.MonkeyPatch, row: Family = ROW) -> None:
    widen(monkeypatch)
    monkeypatch.setitem(DESCRIBED, PACKAGE, row)


def compiled_target() -> Target:
    target = with_compiled_layers(made_up_model())
    target.compile()
    return target


def test_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    describe(monkeypatch)
    target = compiled_target()
    assert target.compiled
    before = target.compiled.passes
    assert_right(target.model, target, SIZES)
    assert target.compiled.passes > before


def test_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    describe(monkeypatch)
    model = made_up_model()
    target = Target(model, direct)
    assert target.is_fused
    assert_right(model, target, SIZES)
    assert target.is_fused


@pytest.mark.parametrize(
    "row",
    [
        replace(ROW, attention=replace(ROW.attention, gates_heads=False)),
        replace(ROW, attention=replace(ROW.attention, shared_kv_attribute="")),
        replace(ROW, experts=None),
    ],
)
def test_a_wrong_row_is_not_used(row: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    describe(monkeypatch, row)
    assert not compiled_target().compiled
    assert not Target(made_up_model(), direct).is_fused


def test_without_a_row_transformers_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    widen(monkeypatch)
    assert not compiled_target().compiled
    target = Target(made_up_model(), direct)
    assert target.captures and not target.is_fused
    assert_right(target.model, target, SIZES)
