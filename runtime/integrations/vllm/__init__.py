"""Runs hdtool's drafter inside vLLM: as a ``custom_class`` in the V1 runner, as a speculator in the V2 runner.

Every worker of vLLM imports the class that the speculative configuration names, and after each pass asks the class
for draft tokens for each row of the batch. Only `speculator` and `plugin` import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hdtool.runtime.integrations.vllm.speculator import HierarchyProposer

__all__ = ["HierarchyProposer"]


def __getattr__(name: str) -> object:
    """Import ``HierarchyProposer`` at its first use: all processes of vLLM import this package for its plug-in."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hdtool.runtime.integrations.vllm.speculator import HierarchyProposer

    return HierarchyProposer
