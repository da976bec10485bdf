"""Report pages of replays and benchmarks, written as HTML, Markdown tables and PNG files."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import PreTrainedTokenizerBase

from hdtool.builders.evaluation.llama_cpp_peer import build_notes
from hdtool.builders.evaluation.replay import ReplayResult
from hdtool.builders.evaluation.report.figures import Figure, ReportData, figures_of, missing_figures
from hdtool.builders.evaluation.report.measurements import BenchMeasurements, run_temperature
from hdtool.builders.evaluation.report.plots import DARK_THEME, LIGHT_THEME, THEMES, render_png
from hdtool.builders.evaluation.report.source_shares import replayed_shares
from hdtool.builders.evaluation.report.tables import Table
from hdtool.builders.evaluation.report.typical_case import DraftedAnswer, typical_case
from hdtool.builders.evaluation.scores import ALL_TASKS, DEFAULT_METHOD
from hdtool.data.errors import ResultError, os_errors_as
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import MARKDOWN_ENTRY, is_own_html, is_own_markdown, is_own_png
from hdtool.data.progress import count_of
from hdtool.data.prompts import Prompt
from hdtool.data.stores.kinds import CORPUS_KIND, MODEL_KIND
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.draft_token_limits import FIXED_BUDGET
from hdtool.runtime.stores.store_set import StoreSet

TEMPLATES = Path(__file__).parent / "templates"
SOURCE_LABELS = {"none": "the model itself"}
"""Labels of the sources whose label differs from their name."""

STORE_NAMES = {MODEL_KIND: "model store", CORPUS_KIND: "corpus index"}

Pictures = Mapping[str, Mapping[str, bytes]]
"""PNG files by figure name and theme name."""


@dataclass(frozen=True)
class Page:
    """Content of a report."""

    title: str
    lead: str
    command: str
    """Command line that made the report."""
    facts: Mapping[str, str]
    data: ReportData

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(figures_of(self.data))

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        return tuple(missing_figures(self.data))

    def html(self, pictures: Pictures) -> str:
        environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
        environment.filters["base64"] = lambda data: b64encode(data).decode()
        return environment.get_template("page.html.j2").render(
            page=self,
            pictures=pictures,
            light=LIGHT_THEME,
            dark=DARK_THEME,
            labels=SOURCE_LABELS,
            version=metadata.version("hdtool"),
        )

    def markdown(self) -> str:
        """Return the tables as Markdown, for use in documentation."""
        facts = "\n".join(f"- {name}: {value}" for name, value in self.facts.items())
        parts = [
            MARKDOWN_ENTRY.decode(),
            f"# {self.title}",
            f"```\n{self.command}\n```",
            self.lead,
            facts,
        ]
        for table in [*self.data.tables, *(item.table for item in self.figures if item.table)]:
            parts += [f"## {table.title}", table.markdown(), *([table.note] if table.note else [])]
        return "\n\n".join(parts) + "\n"


def replay_page(
    results: Mapping[str, ReplayResult],
    curve: CostCurve | None,
    warm: Sequence[str],
    store_set: StoreSet,
    draft_tokens: int | None,
    questions: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    command: str,
) -> Page:
    """Return the page of a replay; ``warm`` names the files of ``--warm``, and ``questions`` has one text per turn."""
    first, shown = next(iter(results.values())), headline_result(results, curve)
    most = FIXED_BUDGET if draft_tokens is None else draft_tokens
    by_cost = draft_tokens is None and curve is not None
    conversations = len({turn.conversation for turn in first.turns})
    facts = {
        "answers": f"{conversations:,} conversations, {len(first.turns):,} answers, {first.tokens:,} tokens",
        "stores": _stores({kind: store.manifest.counts["tokens"] for kind, store in store_set.opened.items()}),
        "history": "; ".join(memory_notes(results, warm)),
        "drafting": "as many draft tokens a step as pay" if by_cost else f"at most {most} draft tokens a step",
        "hdtool": metadata.version("hdtool"),
        "machine": machine(torch.device("cpu")),
    }
    lead = (
        f"{headline(results, curve)} The model did not run: the recorded answers determine which draft tokens it "
        "accepts."
    )
    answers = (
        DraftedAnswer(question, turn.tokens, turn.sources, len(turn.accept_lengths))
        for question, turn in zip(questions, shown.turns, strict=True)
    )
    data = ReportData(
        tables=(_rates(results), *([speed_forecast(results, curve)] if curve else [])),
        shares=(replayed_shares(shown),),
        case=typical_case(shown.method, answers, tokenizer),
    )
    return Page("Replay", lead, command, facts, data)


def bench_page(
    measured: BenchMeasurements, questions: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, command: str
) -> Page:
    """Return the page of a benchmark of ``questions``."""
    run, scores = measured.results.run, measured.scores
    about, options = run.surroundings, run.options
    first = next(iter(scores.tasks[ALL_TASKS].values()))
    most = options.get("draft_tokens")
    facts = {
        "model": f"{about['model']}, {about['dtype']} on {about['device']}",
        "threads of every method": f"{about['threads']}",
        "questions": f"{first.questions:,} of {run.questions:,}",
        "tokens of an answer": f"{options['max_new_tokens']:,} at most",
        "temperature": f"{run_temperature(measured.results):g}",
        "rounds": f"{options['rounds']}",
        "stores": _stores({kind: store["tokens"] for kind, store in about["stores"].items()}),
        "drafters": str(options.get("drafters", "warm, without a history")),
        "draft tokens a step": "as many as pay" if most is None else f"{most} at most",
        "hdtool": about["hdtool"],
        "machine": about["machine"],
        "begun": run.started,
    }
    lead = f"{scores.headline()} Measured on {count_of(first.questions, 'question')}."
    if llama_cpp := build_notes(about):
        facts["llama.cpp"] = "; ".join(llama_cpp)
    method = scores.headline_method
    data = ReportData(
        tables=measured.tables(),
        speedups=measured.speedups(),
        durations=measured.durations(),
        temperatures=measured.temperatures(),
        shares=measured.shares(),
        case=typical_case(method, measured.drafted_answers(method, questions), tokenizer),
    )
    return Page("Benchmark", lead, command, facts, data)


def headline_result(results: Mapping[str, ReplayResult], curve: CostCurve | None) -> ReplayResult:
    """Return the result of the default method or, if it was not replayed, of the best method."""
    return results.get(DEFAULT_METHOD) or max(results.values(), key=partial(_gain, curve=curve))


def _gain(result: ReplayResult, curve: CostCurve | None) -> float:
    return result.predict(curve).speedup if curve else result.tokens_per_step


def headline(results: Mapping[str, ReplayResult], curve: CostCurve | None) -> str:
    """Return a sentence on the gain of the default method or, if it was not replayed, of the best method."""
    result = headline_result(results, curve)
    where = f"on {count_of(len(result.turns), 'answer')} that a model gave"
    rate = f"{result.tokens_per_step:.2f} tokens a forward pass from {result.nodes_per_step:.1f} draft tokens"
    if not curve:
        return f"{result.method} gets {rate} {where}; plain decoding gets 1."
    verdict = "" if _gain(result, curve) > 1 else ": drafting does not pay here"
    speed = f"{result.method} is predicted to decode {_gain(result, curve):.2f} times as fast as plain decoding"
    return f"{speed} {where}, with {rate}{verdict}."


def memory_notes(results: Mapping[str, ReplayResult], warm: Sequence[str]) -> list[str]:
    """Return phrases that describe the methods' histories; ``warm`` lists the files replayed first."""
    growing = [name for name, result in results.items() if result.history]
    only = f" ({', '.join(growing)})" if len(growing) < len(results) else ""
    parts = [f"growing over the recordings, in their order{only}" if growing else "none"]
    warmed = max(result.warm_tokens for result in results.values())
    return parts + [f"warm, {warmed:,} tokens of {', '.join(warm)} before"] * bool(warmed)


def _stores(tokens: Mapping[str, int]) -> str:
    """Name the stores, given the number of tokens of each kind."""
    return ", ".join(f"{STORE_NAMES[kind]} of {number:,} tokens" for kind, number in tokens.items()) or "none"


def _rates(results: Mapping[str, ReplayResult]) -> Table:
    parts = {method: result.by_category() for method, result in results.items()}
    first = next(iter(parts.values()))
    categories = list(first) if len(first) > 1 else []
    columns = {"method": "", "all": ".3f", **dict.fromkeys(categories, ".2f"), "nodes a step": ".1f"}
    rows = (
        (
            method,
            result.tokens_per_step,
            *(parts[method][name].tokens_per_step for name in categories),
            result.nodes_per_step,
            f"{result.draft_us(50):.0f} / {result.draft_us(99):.0f}",
        )
        for method, result in results.items()
    )
    note = "Drafting with the tree's mask and positions."
    return Table.of("Tokens per step", {**columns, "drafting, µs p50 / p99": ""}, rows, note)


def speed_forecast(results: Mapping[str, ReplayResult], curve: CostCurve) -> Table:
    """Return a table of predicted tokens per second; its note lists the methods that would not speed up decoding."""
    predicted = {method: result.predict(curve) for method, result in results.items()}
    plain = next(iter(predicted.values())).plain_tokens_per_second
    rows = [("plain", plain, 1.0)]
    rows += [(method, result.tokens_per_second, result.speedup) for method, result in predicted.items()]
    where = ", ".join(part for part in (curve.model, curve.device, curve.dtype) if part)
    title = "Predicted from what forward passes take" + (f" ({where})" if where else "")
    refused = (
        f"{name}: {result.speedup:.2f} times plain decoding: do not use it here"
        for name, result in predicted.items()
        if not result.pays and results[name].nodes
    )
    return Table.of(title, {"method": "", "tokens/s": ".1f", "times plain": ".2f"}, rows, "\n".join(refused))


INDEX_PAGE = "index.html"
TABLES_FILE = "tables.md"
PICTURE_NAME = re.compile(r"(speed-up|generation-time|temperatures|sources-[a-z+-]+)(\.dark)?\.png")
"""Matches the file names of all pictures that a report may have."""


def write_page(folder: Path, page: Page) -> Path:
    """Write a report and return the path of its HTML page; raise a ``ResultError`` if a file can't be written."""
    check_report_folder(folder)
    contents: dict[str, bytes | str] = {}
    pictures = {
        figure.name: {theme.name: render_png(figure.draw, theme, figure.height) for theme in THEMES}
        for figure in page.figures
    }
    for name, themes in pictures.items():
        for theme, data in themes.items():
            contents[f"{name}{'' if theme == LIGHT_THEME.name else f'.{theme}'}.png"] = data
    contents |= {TABLES_FILE: page.markdown(), INDEX_PAGE: page.html(pictures)}
    for name in contents:  # check all files before replacing any
        _file(folder, name).check()
    for name, content in contents.items():
        _file(folder, name).write(content)
    return folder / INDEX_PAGE


def check_report_folder(folder: Path) -> None:
    """Check in advance: create the folder, and raise a ``ResultError`` if the report cannot be written to it."""
    with os_errors_as(ResultError, f"{folder} cannot be written", "choose another --report"):
        folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in folder.iterdir() if PICTURE_NAME.fullmatch(path.name)]
    for name in (INDEX_PAGE, TABLES_FILE, *names):
        _file(folder, name).check()


def _file(folder: Path, name: str) -> OutputFile:
    """Return an ``OutputFile`` of the report, which never replaces a file that no report wrote."""
    is_ours = {INDEX_PAGE: is_own_html, TABLES_FILE: is_own_markdown}.get(name, is_own_png)
    advice = "choose another --report, or move it away"
    return OutputFile(folder / name, "a file of an hdtool report", is_ours, ResultError, advice)
