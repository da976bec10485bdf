"""Every engine gives the tokens and logits of transformers, with every family that it computes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.conformance import CHECKS, FURTHER_CHECKS, OF_BITS, Check, assert_conforms, drafts_that_lie, requests
from tests.support.engines import CORE, OF_FAMILIES, engine_of

ALONE = drafts_that_lie, requests
"""Checks in which an engine that rounds activations is compared with itself."""


def cases(engines: Iterable[str], checks: Iterable[Check]) -> list[Any]:
    return [
        pytest.param(engine, check, id=f"{engine}: {check.__name__}")
        for engine in engines
        for check in checks
        if check in ALONE or (engine.startswith("compiled") if check in OF_BITS else "int8" not in engine)
    ]


@pytest.mark.parametrize(("engine", "check"), cases(CORE, CHECKS + FURTHER_CHECKS))
@pytest.mark.one_in(2)
def test_each_engine_does_what_transformers_does(engine: str, check: Check) -> None:
    assert_conforms(engine_of(engine), check)


@pytest.mark.parametrize(("engine", "check"), cases(OF_FAMILIES, CHECKS))
@pytest.mark.one_in(50)
def test_each_family_is_computed_as_by_transformers(engine: str, check: Check) -> None:
    assert_conforms(engine_of(engine), check)
