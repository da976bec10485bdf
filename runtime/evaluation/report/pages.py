"""The pages of the two commands: a replay, and a benchmark with a replay of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata

import torch

from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.environment import machine
from hdtool.runtime.evaluation.llama_cpp_peer import notes_of
from hdtool.runtime.evaluation.replay_results import ReplayResult
from hdtool.runtime.evaluation.report.ablations import Study
from hdtool.runtime.evaluation.report.figures import ReportData
from hdtool.runtime.evaluation.report.measured import Measured, temperature_of
from hdtool.runtime.evaluation.report.page import Page
from hdtool.runtime.evaluation.report.tables import Table
from hdtool.runtime.evaluation.scores import OVERALL


def page_of_replay(
    study: Study,
    results: Mapping[str, ReplayResult],
    curve: CostCurve | None,
    warm: Sequence[str],
    command: str,
    data: ReportData,
) -> Page:
    """``warm`` are the files of ``--warm``."""
    best = max(results.values(), key=lambda one: one.tokens_per_step)
    answers = f"{len(best.turns):,} answers"
    facts = {
        "answers": f"{len(study.conversations):,} conversations, {answers}, {best.tokens:,} tokens",
        "stores": _stores(study),
        "history": "; ".join((*memory_of(results, warm), "no history in the replays of sources and orders")),
        "draft nodes a step": "as many as pay" if curve else f"{study.nodes} at most",
        "hdtool": metadata.version("hdtool"),
        "machine": machine(torch.device("cpu")),
    }
    lead = (
        f"{best.method} gets {best.tokens_per_step:.2f} tokens a forward pass on {answers} that a model gave, where "
        "plain decoding gets 1. The model did not run: the recorded answers determine which draft tokens it accepts."
    )
    tables = (_rates(results), *([forecast(results, curve)] if curve else []))
    return Page("Replay", lead, command, facts, replace(data, tables=tables))


def page_of_bench(measured: Measured, study: Study, replayed: str, command: str, data: ReportData) -> Page:
    """``replayed`` is the method that gave the replayed answers."""
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
        "drafters": str(options.get("drafters", "warm, without a history")),
        "replays": f"of the answers of {replayed}, at most {study.nodes} draft nodes a step, without a history",
        "hdtool": about["hdtool"],
        "machine": about["machine"],
        "begun": run.started,
    }
    if llama_cpp := notes_of(about):
        facts["llama.cpp"] = "; ".join(llama_cpp)
    lead = (
        f"{best} answers {whole[best].speedup:.2f} times as fast as {scores.baseline} and gets "
        f"{whole[best].tokens_per_step:.2f} tokens a forward pass, over {whole[best].questions:,} questions."
    )
    data = replace(
        data,
        tables=measured.tables(),
        speedups=measured.speedups(),
        durations=measured.durations(),
        temperatures=measured.temperatures(),
        shares=measured.shares() or data.shares,
    )
    return Page("Benchmark", lead, command, facts, data)


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
