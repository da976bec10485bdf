"""Where a model's weights are stored, how they are read into memory, and how a model is built from them."""

from __future__ import annotations
