"""Sizes of tiny models that compiled code takes."""

import pytest


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.fused import widen

    widen(monkeypatch)


@pytest.fixture
def wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a head is rotated in some models, so it has the numbers of four small vectors."""
    from tests.support.fused import widen

    widen(monkeypatch, head_dim=32)
