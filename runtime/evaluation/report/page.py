"""The report as a page that needs nothing beside it, and its tables as Markdown."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import metadata

from hdtool.data.files.ownership import MARKDOWN_ENTRY
from hdtool.runtime.evaluation.report.css import SHEET
from hdtool.runtime.evaluation.report.figures import Exhibit
from hdtool.runtime.evaluation.report.findings import Finding
from hdtool.runtime.evaluation.report.tables import Case, Table
from hdtool.runtime.evaluation.report.theme import THEMES, Theme

Pictures = Mapping[str, Mapping[str, bytes]]
"""By the names of exhibit and theme."""


@dataclass(frozen=True)
class Page:
    """All that a page says."""

    title: str
    lead: str
    command: str
    """That made it."""
    facts: Mapping[str, str]
    findings: Sequence[Finding]
    tables: Sequence[Table]
    exhibits: Sequence[Exhibit]
    case: Case | None
    missing: Sequence[tuple[str, str]]

    def html(self, pictures: Pictures) -> str:
        sections = (
            ("Does it hold?", self._findings()),
            ("Tables", "\n".join(map(_table, self.tables))),
            (
                "Figures",
                f'<div class="figures">{"".join(_figure(one, pictures[one.name]) for one in self.exhibits)}</div>',
            ),
            ("A case", _case(self.case) if self.case else ""),
            ("Measured on", f"<dl>{''.join(_fact(*fact) for fact in self.facts.items())}</dl>"),
            ("Not shown", self._missing() if self.missing else ""),
        )
        body = "\n".join(f"<section><h2>{name}</h2>\n{content}\n</section>" for name, content in sections if content)
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta name="generator" content="hdtool {escape(metadata.version("hdtool"))}">\n'
            f'<meta name="color-scheme" content="light dark">\n<title>{escape(self.title)}</title>\n'
            f"<style>\n{_colours()}\n{SHEET}</style>\n</head>\n<body>\n<header><h1>{escape(self.title)}</h1>\n"
            f'<p class="lead">{escape(self.lead)}</p>\n<pre class="command">{escape(self.command)}</pre></header>\n'
            f"{body}\n</body>\n</html>\n"
        )

    def markdown(self) -> str:
        """Its tables, as they go into docs."""
        facts = "\n".join(f"- {name}: {told}" for name, told in self.facts.items())
        verdicts = Table(
            "", ("claim", "", "here"), tuple((one.claim, one.verdict, "; ".join(one.evidence)) for one in self.findings)
        )
        tables = [*self.tables, *(one.table for one in self.exhibits if one.table)]
        parts = [
            MARKDOWN_ENTRY.decode(),
            f"# {self.title}",
            f"```\n{self.command}\n```",
            self.lead,
            facts,
            verdicts.markdown(),
        ]
        for table in tables:
            parts += [f"## {table.title}", table.markdown(), *([table.note] if table.note else [])]
        return "\n\n".join(parts) + "\n"

    def _findings(self) -> str:
        kinds = {True: "yes", False: "no", None: "open"}
        rows = (
            f'<li>{escape(one.claim)}: <b class="{kinds[one.holds]}">{one.verdict}</b>{_lines(one.evidence)}</li>'
            for one in self.findings
        )
        return (
            "<p>What the paper on Hierarchy Drafting found, and what this data says of it.</p>\n"
            f'<ul class="findings">{"".join(rows)}</ul>'
        )

    def _missing(self) -> str:
        rows = (f"<li>{escape(name)}: <code>{escape(command)}</code></li>" for name, command in self.missing)
        return f"<p>There was no data for these; this would add them:</p><ul>{''.join(rows)}</ul>"


def _lines(told: Sequence[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in told)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    note = f"<p class='note'>{escape(table.note)}</p>" if table.note else ""
    return (
        f'<div class="wide"><table><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}"
    )


def _figure(one: Exhibit, shown: Mapping[str, bytes]) -> str:
    sources = {name: f"data:image/png;base64,{b64encode(data).decode()}" for name, data in shown.items()}
    numbers = f"<details><summary>numbers</summary>{_table(one.table)}</details>" if one.table else ""
    return (
        f'<figure id="{escape(one.name)}"><h3>{escape(one.title)}</h3><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{sources["dark"]}">'
        f'<img src="{sources["light"]}" alt="{escape(one.alt)}"></picture>'
        f"<figcaption>{escape(one.caption)}</figcaption>{numbers}</figure>\n"
    )


def _case(case: Case) -> str:
    names = list(dict.fromkeys(source for _, source in case.pieces))
    legend = "".join(f'<span class="{name}">{OWN.get(name, name)}</span> ' for name in sorted(names, key=ORDER.index))
    told = "".join(
        f'<span class="{name}" title="{OWN.get(name, name)}">{escape(text)}</span>' for text, name in case.pieces
    )
    rate = case.tokens / case.steps
    return (
        f"<p>The answer whose tokens per step are nearest to those of all: {case.tokens:,} tokens in {case.steps:,} "
        f"steps of {escape(case.method)}, {rate:.2f} a step. Each token has the colour of what it was accepted "
        "from.</p>"
        f'<p class="legend">{legend}</p><blockquote class="asked">{escape(case.question)}</blockquote>'
        f'<div class="answer">{told}</div>'
    )


OWN = {"none": "the model itself"}
ORDER = list(THEMES[0].databases)


def _fact(name: str, told: str) -> str:
    return f"<dt>{escape(name)}</dt><dd>{escape(told)}</dd>"


def _colours() -> str:
    """The colours of all themes as variables."""
    light, dark = (";".join(_variables(theme)) for theme in THEMES)
    painted = "\n".join(f".{name}{{--own:var(--{name})}}" for name in ORDER)
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{painted}"


def _variables(theme: Theme) -> Iterator[str]:
    for name in ("paper", "ink", "faint"):
        yield f"--{name}:{getattr(theme, name)}"
    for name, colour in theme.databases.items():
        yield f"--{name}:{colour}"
