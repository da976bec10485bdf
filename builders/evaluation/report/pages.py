"""Writing a report into a folder: the page, the tables and the figures as PNG."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hdtool.builders.evaluation.llama_cpp_peer import notes_of
from hdtool.builders.evaluation.replay import ReplayResult
from hdtool.builders.evaluation.report.ablations import Study
from hdtool.builders.evaluation.report.figures import Figure, ReportData, figures_of, missing
from hdtool.builders.evaluation.report.measurements import Measured, temperature_of
from hdtool.builders.evaluation.report.plots import DARK, LIGHT, THEMES, render_png
from hdtool.builders.evaluation.report.tables import Finding, Table, findings
from hdtool.builders.evaluation.scores import DEFAULT, OVERALL
from hdtool.data.errors import ResultError, worded
from hdtool.data.output_files import MARKDOWN_ENTRY, OutputFile, is_own_html, is_own_markdown, is_own_png
from hdtool.data.progress import counted
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.environment import machine

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


def page_of_replay(
    study: Study,
    results: Mapping[str, ReplayResult],
    curve: CostCurve | None,
    warm: Sequence[str],
    command: str,
    data: ReportData,
) -> Page:
    """``warm`` are the files of ``--warm``."""
    first = next(iter(results.values()))
    facts = {
        "answers": f"{len(study.conversations):,} conversations, {len(first.turns):,} answers, {first.tokens:,} tokens",
        "stores": _stores(study),
        "history": "; ".join((*memory_of(results, warm), "no history in the replays of sources and orders")),
        "drafting": study.draft_tokens,
        "hdtool": metadata.version("hdtool"),
        "machine": machine(torch.device("cpu")),
    }
    lead = (
        f"{headline(results, curve)} The model did not run: the recorded answers determine which draft tokens it "
        "accepts."
    )
    data = replace(data, replayed=f"Replayed with {study.draft_tokens}, as in the tables.")
    tables = (_rates(results), *([forecast(results, curve)] if curve else []))
    return Page("Replay", lead, command, facts, replace(data, tables=tables))


def page_of_bench(measured: Measured, study: Study, replayed: str, command: str, data: ReportData) -> Page:
    """``replayed`` is the method that gave the replayed answers."""
    run, scores = measured.results.run, measured.scores
    about, options = run.surroundings, run.options
    whole = scores.tasks[OVERALL]
    first = next(iter(whole.values()))
    facts = {
        "model": f"{about['model']}, {about['dtype']} on {about['device']}, {counted(about['threads'], 'thread')}",
        "questions": f"{first.questions:,} of {run.questions:,}",
        "tokens of an answer": f"{options['max_new_tokens']:,} at most",
        "temperature": f"{temperature_of(measured.results):g}",
        "rounds": f"{options['rounds']}",
        "stores": _stores(study),
        "drafters": str(options.get("drafters", "warm, without a history")),
        "draft tokens a step": "as many as pay" if study.budget is None else f"{study.budget} at most",
        "replays": f"of the answers of {replayed}, with {study.draft_tokens}, without a history",
        "hdtool": about["hdtool"],
        "machine": about["machine"],
        "begun": run.started,
    }
    lead = f"{scores.headline()} Measured on {counted(first.questions, 'question')}."
    measured_shares = measured.shares()
    paid = "; the measured answers had as many as pay" if study.budget is None else ""
    if llama_cpp := notes_of(about):
        facts["llama.cpp"] = "; ".join(llama_cpp)
    data = replace(
        data,
        tables=measured.tables(),
        speedups=measured.speedups(),
        durations=measured.durations(),
        temperatures=measured.temperatures(),
        shares=measured_shares or data.shares,
        shares_are_measured=bool(measured_shares),
        replayed=f"Replayed with {study.draft_tokens}{paid}.",
    )
    return Page("Benchmark", lead, command, facts, data)


def headline(results: Mapping[str, ReplayResult], curve: CostCurve | None) -> str:
    """What the default method gains, or the best one if that was not replayed."""

    def gain(one: ReplayResult) -> float:
        return one.predict(curve).speedup if curve else one.tokens_per_step

    one = results.get(DEFAULT) or max(results.values(), key=gain)
    where = f"on {counted(len(one.turns), 'answer')} that a model gave"
    rate = f"{one.tokens_per_step:.2f} tokens a forward pass from {one.nodes_per_step:.1f} draft tokens"
    if not curve:
        return f"{one.method} gets {rate} {where}; plain decoding gets 1."
    verdict = "" if gain(one) > 1 else ": drafting does not pay here"
    speed = f"{one.method} is predicted to decode {gain(one):.2f} times as fast as plain decoding"
    return f"{speed} {where}, with {rate}{verdict}."


def memory_of(results: Mapping[str, ReplayResult], warm: Sequence[str]) -> list[str]:
    """What the methods knew of other conversations, in words; ``warm`` are the files replayed before."""
    growing = [name for name, one in results.items() if one.history]
    only = f" ({', '.join(growing)})" if len(growing) < len(results) else ""
    parts = [f"growing over the recordings, in their order{only}" if growing else "none"]
    warmed = max(one.warm_tokens for one in results.values())
    return parts + [f"warm, {warmed:,} tokens of {', '.join(warm)} before"] * bool(warmed)


def _stores(study: Study) -> str:
    named = {"model store": study.store_set.model, "corpus index": study.store_set.corpus}
    parts = (f"{name} of {store.manifest.counts['tokens']:,} tokens" for name, store in named.items() if store)
    return ", ".join(parts) or "none"


def _rates(results: Mapping[str, ReplayResult]) -> Table:
    parts = {method: one.by_category() for method, one in results.items()}
    first = next(iter(parts.values()))
    categories = list(first) if len(first) > 1 else []
    columns = {"method": "", "all": ".3f", **dict.fromkeys(categories, ".2f"), "nodes a step": ".1f"}
    rows = (
        (
            method,
            one.tokens_per_step,
            *(parts[method][name].tokens_per_step for name in categories),
            one.nodes_per_step,
            f"{one.draft_us(50):.0f} / {one.draft_us(99):.0f}",
        )
        for method, one in results.items()
    )
    note = "Drafting with the tree's mask and positions."
    return Table.of("Tokens per step", {**columns, "drafting, µs p50 / p99": ""}, rows, note)


def forecast(results: Mapping[str, ReplayResult], curve: CostCurve) -> Table:
    """Tokens per second with passes of this cost, and the methods that do not pay."""
    predicted = {method: one.predict(curve) for method, one in results.items()}
    plain = next(iter(predicted.values())).plain_tokens_per_second
    rows = [("plain", plain, 1.0)]
    rows += [(method, one.tokens_per_second, one.speedup) for method, one in predicted.items()]
    where = ", ".join(part for part in (curve.model, curve.device, curve.dtype) if part)
    title = "Predicted from what forward passes take" + (f" ({where})" if where else "")
    refused = (
        f"{name}: {one.speedup:.2f} times plain decoding: do not use it here"
        for name, one in predicted.items()
        if not one.pays and results[name].nodes
    )
    return Table.of(title, {"method": "", "tokens/s": ".1f", "times plain": ".2f"}, rows, "\n".join(refused))


INDEX = "index.html"
TABLES = "tables.md"
PICTURE = re.compile(
    r"(speed-up|generation-time|temperatures|repeated-4-grams|4-gram-distances|database-size"
    r"|(sources|subsets|orders|coverage)-[a-z+-]+)(\.dark)?\.png"
)
"""The names of all figures that a report may have."""


def write(folder: Path, page: Page) -> Path:
    """Write a report and return the path of its page."""
    prepare(folder)
    contents: dict[str, bytes | str] = {}
    pictures = {
        one.name: {theme.name: render_png(one.draw, theme, one.height) for theme in THEMES} for one in page.figures
    }
    for name, themes in pictures.items():
        for theme, data in themes.items():
            contents[f"{name}{'' if theme == LIGHT.name else f'.{theme}'}.png"] = data
    contents |= {TABLES: page.markdown(), INDEX: page.html(pictures)}
    for name in contents:  # check all files before replacing the first
        _file(folder, name).check()
    for name, content in contents.items():
        _file(folder, name).write(content)
    return folder / INDEX


def prepare(folder: Path) -> None:
    """Refuse a folder that cannot take the report, before anything is measured for it."""
    with worded(ResultError, f"{folder} cannot be written", "choose another --report"):
        folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in folder.iterdir() if PICTURE.fullmatch(path.name)]
    for name in (INDEX, TABLES, *names):
        _file(folder, name).check()


def _file(folder: Path, name: str) -> OutputFile:
    """A file of the report, replaced only if an earlier report wrote it."""
    is_ours = {INDEX: is_own_html, TABLES: is_own_markdown}.get(name, is_own_png)
    advice = "choose another --report, or move it away"
    return OutputFile(folder / name, "a file of an hdtool report", is_ours, ResultError, advice)
