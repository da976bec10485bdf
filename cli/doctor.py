"""``hdtool doctor``: check the installation and say how to repair what does not work."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import quiet_libraries
from hdtool.cli.options_from_settings import only
from hdtool.data.progress import count_of
from hdtool.runtime.settings.model import ModelConfig

if TYPE_CHECKING:
    from hdtool.builders.doctor import Finding

STATE_SIGNS = {"ok": "✓", "note": "·", "mend": "✗"}
STATE_COLORS = {"ok": 32, "note": 33, "mend": 31}
ADVICE_INDENT = "  "
ADVICE_ARROW = "→ "
MIN_WIDTH, MAX_WIDTH = 40, 110
"""Minimum and maximum width of the text in columns."""


def findings_in_words(groups: Mapping[str, Sequence[Finding]]) -> str:
    """Format one table per group of findings, wrapped to the terminal's width, and a line with the verdict."""
    width = max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size().columns))
    names = max(len(finding.name) for findings in groups.values() for finding in findings)
    lines = [
        line
        for group, findings in groups.items()
        for line in (group, *(part for finding in findings for part in _lines(finding, names, width)), "")
    ]
    wrong, notes = (_count(groups, state) for state in ("mend", "note"))
    verdict = "all is well" if not wrong else f"{count_of(wrong, 'fault')} to mend"
    return "\n".join([*lines, verdict + (f", {count_of(notes, 'note')}" if notes else "")])


def _lines(finding: Finding, names: int, width: int) -> Iterator[str]:
    start = f"{ADVICE_INDENT}{_sign(finding.state)} {finding.name:{names}}  "
    margin = len(ADVICE_INDENT) + 2 + names + 2
    first, *others = _wrapped(finding.found, width - margin)
    yield start + first
    for line in others:
        yield " " * margin + line
    if finding.advice:
        for number, line in enumerate(_wrapped(finding.advice, width - margin - len(ADVICE_ARROW))):
            yield " " * margin + (ADVICE_INDENT if number else ADVICE_ARROW) + line


def _wrapped(text: str, width: int) -> list[str]:
    """Break a text between words only, so that paths and commands can be copied."""
    return textwrap.wrap(text, max(MIN_WIDTH // 2, width), break_long_words=False, break_on_hyphens=False) or [""]


def _sign(state: str) -> str:
    from hdtool.cli.answer_output import colors_shown

    return f"\033[{STATE_COLORS[state]}m{STATE_SIGNS[state]}\033[0m" if colors_shown() else STATE_SIGNS[state]


def _count(groups: Mapping[str, Sequence[Finding]], state: str) -> int:
    return sum(finding.state == state for findings in groups.values() for finding in findings)


def doctor(
    *,
    loading: Annotated[
        ModelConfig,
        only("model", "gguf_file", "revision", "trust_remote_code")
        .described(model="Check this model too: whether it would load, and what it would draft from. It is not loaded.")
        .as_argument(),
    ],
    as_json: options.JsonObject = False,
) -> int:
    """Check the installation, the stores and a model.

    Decodes ten tokens with the embedded model, with and without drafts. Prints what was found, and for what is missing
    or wrong the command that mends it. The exit code is 1 if something does not work.
    """
    from hdtool.builders.doctor import (
        FIX,
        decoding_findings,
        folder_findings,
        machine_findings,
        model_findings,
        package_findings,
        store_findings,
    )

    quiet_libraries()
    groups = {
        "machine": list(machine_findings()),
        "packages": list(package_findings()),
        "decoding": list(decoding_findings()),
        "folders": list(folder_findings()),
        "stores": list(store_findings()),
    }
    if loading.model is not None:
        groups[f"model {loading.name}"] = list(model_findings(loading))
    wrong = sum(finding.state == FIX for findings in groups.values() for finding in findings)
    if as_json:
        rows = {group: [asdict(finding) for finding in findings] for group, findings in groups.items()}
        print(json.dumps({"ok": not wrong, "checks": rows}, ensure_ascii=False))
    else:
        print(findings_in_words(groups))
    return 1 if wrong else 0
