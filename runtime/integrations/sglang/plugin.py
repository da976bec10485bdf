"""Plug-in in the entry point group ``sglang.srt.plugins`` that makes SGLang draft with hdtool.

SGLang loads the plug-in in each of its processes before reading its options, so this module imports little. The plug-in
registers the algorithm ``HDTOOL``, whose worker is only imported if ``--speculative-algorithm`` names ``HDTOOL``.
"""

from __future__ import annotations

import logging
from importlib import metadata

LOGGER = logging.getLogger("sglang.hdtool")
ALGORITHM = "HDTOOL"
SUPPORTED = "0.5.23"
"""Version of SGLang whose n-gram worker hdtool extends; the worker is no public interface."""


def register() -> None:
    """Register the algorithm, or log a warning if this version of SGLang is not ``SUPPORTED``."""
    version = metadata.version("sglang")
    if version != SUPPORTED:
        LOGGER.warning(
            "hdtool drafts in SGLang %s, and this is %s: install sglang==%s for --speculative-algorithm %s",
            SUPPORTED,
            version,
            SUPPORTED,
            ALGORITHM,
        )
        return
    from hdtool.runtime.integrations.sglang.algorithm import register_in

    register_in(ALGORITHM)
