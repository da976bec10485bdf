"""The embedded model, loaded once for each module of tests."""

from __future__ import annotations

import pytest

from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import Loaded, load


@pytest.fixture(scope="module")
def embedded() -> Loaded:
    return load(ModelConfig())
