"""The report as one self-contained HTML page, rendered from a template, and its tables as Markdown."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hdtool.data.files.ownership import MARKDOWN_ENTRY
from hdtool.runtime.evaluation.report.figures import Figure, ReportData, figures_of, missing
from hdtool.runtime.evaluation.report.findings import Finding, findings
from hdtool.runtime.evaluation.report.tables import Table
from hdtool.runtime.evaluation.report.theme import DARK, LIGHT

TEMPLATES = Path(__file__).parent / "templates"
LABELS = {"none": "the model itself"}
"""Labels of sources where they differ from the name."""

Pictures = Mapping[str, Mapping[str, bytes]]
"""PNG files by the names of figure and theme."""


@dataclass(frozen=True)
class Page:
    """The content of a report."""

    title: str
    lead: str
    command: str
    """The command line that made the report."""
    facts: Mapping[str, str]
    data: ReportData

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        return findings(self.data.shares, self.data.coverage, self.data.subsets, self.data.orders)

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(figures_of(self.data))

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        return tuple(missing(self.data))

    def html(self, pictures: Pictures) -> str:
        environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
        environment.filters["base64"] = lambda data: b64encode(data).decode()
        return environment.get_template("page.html.j2").render(
            page=self, pictures=pictures, light=LIGHT, dark=DARK, labels=LABELS, version=metadata.version("hdtool")
        )

    def markdown(self) -> str:
        """The tables, for use in documentation."""
        facts = "\n".join(f"- {name}: {value}" for name, value in self.facts.items())
        verdicts = [(one.claim, one.verdict, "; ".join(one.evidence)) for one in self.findings]
        parts = [
            MARKDOWN_ENTRY.decode(),
            f"# {self.title}",
            f"```\n{self.command}\n```",
            self.lead,
            facts,
            Table("", ("claim", "", "here"), tuple(verdicts)).markdown(),
        ]
        for table in [*self.data.tables, *(one.table for one in self.figures if one.table)]:
            parts += [f"## {table.title}", table.markdown(), *([table.note] if table.note else [])]
        return "\n\n".join(parts) + "\n"
