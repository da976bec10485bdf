"""Options of structured output and tools, joined with what the lines of a prompts file ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hdtool.data.prompts import Prompt
from hdtool.data.tools import read_tools
from hdtool.runtime.config import GrammarConfig


def structured(prompts: Sequence[Prompt], structure: GrammarConfig, tools: Path | None) -> list[Prompt]:
    """Prompts with the grammar and the tools of the options, where a line does not have its own."""
    grammar, offered = structure.read(), read_tools(tools) if tools is not None else ()
    return [replace(one, grammar=one.grammar or grammar, tools=one.tools or offered) for one in prompts]
