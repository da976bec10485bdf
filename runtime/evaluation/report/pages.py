"""The pages of the two commands: of a replay, and of a benchmark whose answers were replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata

import torch

from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.environment import machine
from hdtool.runtime.evaluation.replay_results import Played
from hdtool.runtime.evaluation.report.ablations import Study
from hdtool.runtime.evaluation.report.figures import Shown, exhibits, missing
from hdtool.runtime.evaluation.report.findings import findings
from hdtool.runtime.evaluation.report.measured import Measured, temperature_of
from hdtool.runtime.evaluation.report.page import Page
from hdtool.runtime.evaluation.report.tables import Table
from hdtool.runtime.evaluation.scores import OVERALL


def page_of_replay(
    command: str, study: Study, shown: Shown, played: Mapping[str, Played], curve: CostCurve | None
) -> Page:
    best = max(played.values(), key=lambda one: one.tokens_per_step)
    answers = f"{len(best.turns):,} answers"
    facts = {
        "answers": f"{len(study.conversations):,} conversations, {answers}, {best.tokens:,} tokens",
        "stores": _stores(study),
        "draft nodes a step": "as many as pay" if curve else f"{study.nodes} at most",
        "hdtool": metadata.version("hdtool"),
        "machine": machine(torch.device("cpu")),
    }
    lead = (
        f"{best.method} gets {best.tokens_per_step:.2f} tokens a forward pass on {answers} that a model gave, where "
        "plain decoding gets 1. Nothing was measured on the model itself: what it would have taken of every draft "
        "follows from what it said."
    )
    tables = (_rates(played), *([_forecast(played, curve)] if curve else []))
    return _page("Replay", lead, command, facts, replace(shown, tables=tables))


def page_of_bench(command: str, measured: Measured, study: Study, shown: Shown, replayed: str) -> Page:
    """``replayed`` is the method whose answers were replayed."""
    run, scores = measured.results.run, measured.scores
    about, options = run.surroundings, run.options
    whole = scores.tasks[OVERALL]
    best = max(whole, key=lambda method: whole[method].tokens_per_second)
    facts = {
        "model": f"{about['model']}, {about['dtype']} on {about['device']}, {about['threads']} threads",
        "questions": f"{whole[best].questions:,} of {run.questions:,}",
        "tokens of an answer": f"{options['max_new_tokens']:,} at most",
        "temperature": f"{temperature_of(measured.results):g}",
        "rounds": f"{options['rounds']}",
        "stores": _stores(study),
        "replays": f"of the answers of {replayed}, at most {study.nodes} draft nodes a step",
        "hdtool": about["hdtool"],
        "machine": about["machine"],
        "begun": run.started,
    }
    lead = (
        f"{best} answers {whole[best].speedup:.2f} times as fast as {scores.baseline} and gets "
        f"{whole[best].tokens_per_step:.2f} tokens a forward pass, over {whole[best].questions:,} questions."
    )
    shown = replace(
        shown,
        tables=measured.tables(),
        speedups=measured.speedups(),
        durations=measured.durations(),
        warmth=measured.warmth(),
        shares=measured.shares() or shown.shares,
    )
    return _page("Benchmark", lead, command, facts, shown)


def _page(title: str, lead: str, command: str, facts: Mapping[str, str], shown: Shown) -> Page:
    return Page(
        title=title,
        lead=lead,
        command=command,
        facts=facts,
        findings=findings(shown.shares, shown.coverage, shown.subsets, shown.orders),
        tables=shown.tables,
        exhibits=tuple(exhibits(shown)),
        case=shown.case,
        missing=tuple(missing(shown)),
    )


def _stores(study: Study) -> str:
    named = {"model store": study.store_set.model, "corpus index": study.store_set.corpus}
    told = (f"{name} of {store.manifest.counts['tokens']:,} tokens" for name, store in named.items() if store)
    return ", ".join(told) or "none"


def _rates(played: Mapping[str, Played]) -> Table:
    parts = {method: one.by_category() for method, one in played.items()}
    first = next(iter(parts.values()))
    categories = list(first) if len(first) > 1 else []
    rows = (
        (
            method,
            f"{one.tokens_per_step:.3f}",
            *(f"{parts[method][name].tokens_per_step:.2f}" for name in categories),
            f"{one.nodes_per_step:.1f}",
            f"{one.draft_us(50):.0f} / {one.draft_us(99):.0f}",
        )
        for method, one in played.items()
    )
    columns = ("method", "all", *categories, "nodes a step", "drafting, µs p50 / p99")
    return Table("Tokens per step", columns, tuple(rows), "Drafting with the tree's mask and positions.")


def _forecast(played: Mapping[str, Played], curve: CostCurve) -> Table:
    predicted = {method: one.predict(curve) for method, one in played.items()}
    plain = next(iter(predicted.values())).plain_tokens_per_second
    rows = [("plain decoding", f"{plain:.1f}", "1.00")]
    rows += [(method, f"{one.tokens_per_second:.1f}", f"{one.speedup:.2f}") for method, one in predicted.items()]
    where = ", ".join(part for part in (curve.model, curve.device, curve.dtype) if part)
    note = f"From what forward passes take{f' ({where})' if where else ''}."
    return Table("Predicted speed", ("method", "tokens per second", "times plain"), tuple(rows), note)
