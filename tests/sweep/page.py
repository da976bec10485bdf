"""Write the table of all types into the docs' page of model families."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill

import transformers

from tests.support.project import ROOT
from tests.sweep.result import CHAINS, FAILS, NOT_BUILT, OTHER, REFUSED, SAME, TREES, WRONG, Result

PAGE = ROOT / "docs" / "reference" / "model-families.md"
BEGIN, END = "<!-- table of tests.sweep: begin -->", "<!-- table of tests.sweep: end -->"
TITLES = {
    TREES: "Exact, with draft trees",
    CHAINS: "Exact, with one draft sequence",
    WRONG: "Known faults",
    REFUSED: "Refused types",
    FAILS: "Types that answer no prompt of text alone",
    NOT_BUILT: "Not checked",
    OTHER: "Types that are not decoders",
}
"""Headings by verdict, in the order of the page."""
SUMMARIES = {
    TREES: "are exact with draft trees",
    CHAINS: "are exact with one draft sequence",
    WRONG: "have known faults",
    REFUSED: "are refused",
    FAILS: "can't answer text-only prompts",
    NOT_BUILT: "are not checked",
    OTHER: "are not decoders",
}
"""How the first line of the table describes the types of each verdict."""
WITH_COLUMNS = TREES, CHAINS
COLUMNS = {"hook": "hook", "batch": "batch", "load": "command line", "sampled": "sampled"}
"""Checks whose failure the page shows, with their names there."""
TYPE = re.compile(r"`([^`]+)`")
CELLS = re.compile(r"(?<!\\)\|")
PUBLISHED_SIZES = frozenset({
    "bailing_hybrid", "bamba", "deepseek_v2", "deepseek_v3", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "granitemoehybrid", "kimi_linear", "lfm2_moe", "nemotron_h", "phi", "qwen2_moe", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "youtu",
})  # fmt: skip
"""Types whose models are compiled on CPUs, unless they are as narrow as those of the sweep."""
MAX_REASON_LENGTH = 160
"""Maximum length of a reason in characters."""


def write(results: Iterable[Result], page: Path = PAGE) -> None:
    """Replace the table between its marks, and leave the rest of the page unchanged."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + "\n\n" + table(list(results)) + "\n" + END + after, encoding="utf-8")


def table(results: list[Result]) -> str:
    """Return all groups, with the types of each in alphabetical order."""
    groups = {verdict: [one for one in results if one.verdict == verdict] for verdict in TITLES}
    counts = "; ".join(f"{len(found)} {SUMMARIES[verdict]}" for verdict, found in groups.items() if found)
    summary = f"{len(results)} types of `transformers` {transformers.__version__}: {counts}."
    lines = [fill(summary, 120, break_long_words=False, break_on_hyphens=False), ""]
    for verdict, found in groups.items():
        if found:
            lines += [f"### {TITLES[verdict]}", "", *_group(verdict, sorted(found, key=lambda one: one.kind)), ""]
    return "\n".join(lines)


def _group(verdict: str, results: list[Result]) -> Iterator[str]:
    """Yield a row for all types that agree in every column except the last, which lists them."""
    with_columns = verdict in WITH_COLUMNS
    titles = ["compiled on CPUs", "captured on GPUs", "prompt lookup of `transformers`", "fails"]
    yield from _head([*(titles if with_columns else ["reason"]), "types"])
    rows: dict[tuple[str, ...], list[str]] = {}
    for one in results:
        rows.setdefault(_columns(one) if with_columns else (reason_for_page(one),), []).append(one.kind)
    for cells, kinds in sorted(rows.items(), key=lambda row: -len(row[1])):
        yield _row([*cells, ", ".join(f"`{kind}`" for kind in kinds)])


def _columns(one: Result) -> tuple[str, ...]:
    failed = ", ".join(title for name, title in COLUMNS.items() if one.checks.get(name) != SAME)
    compiled = "yes" if one.compiled else "in published sizes" if one.kind in PUBLISHED_SIZES else "no"
    return compiled, one.captured or "no", _lookup(one.lookup), failed


def _head(titles: list[str]) -> Iterator[str]:
    yield _row(titles)
    yield "|" + "---|" * len(titles)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _lookup(found: str) -> str:
    return {SAME: "same", "other tokens": "other tokens"}.get(found, "fails")


def reason_for_page(result: Result) -> str:
    """Return in one line why a type is refused or which checks it fails, without measured numbers."""
    failed = "; ".join(f"{name}: {found}" for name, found in result.checks.items() if found != SAME)
    reason = result.reason.removeprefix("this one ") or failed
    reason = re.sub(r" \(its logits are off by [^)]*\)|/\S*hdtool-sweep-\S*", "", reason).partition(". Use generate")[0]
    return reason if len(reason) <= MAX_REASON_LENGTH else reason[: MAX_REASON_LENGTH - 1] + "…"


def verdicts_of(page: Path = PAGE) -> Mapping[str, str]:
    """Return the page's verdict about each type."""
    text = page.read_text(encoding="utf-8")
    titles = {title: verdict for verdict, title in TITLES.items()}
    found: dict[str, str] = {}
    verdict = ""
    for line in text.partition(BEGIN)[2].partition(END)[0].splitlines():
        if line.startswith("### "):
            verdict = titles[line.removeprefix("### ")]
        elif line.startswith("| "):
            found |= dict.fromkeys(TYPE.findall(CELLS.split(line)[-2]), verdict)
    return found
