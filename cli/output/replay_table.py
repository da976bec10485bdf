"""Results of a replay as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hdtool.cli.output.tables import filled, rounded, table
from hdtool.data.tally import counted
from hdtool.runtime.evaluation.report.tables import Table

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.evaluation.replay_results import ReplayedTurn, ReplayResult

Results = Mapping[str, "ReplayResult"]


def record(played: Results, curve: CostCurve | None, warm: Sequence[str] = ()) -> dict[str, Any]:
    """What ``--json`` prints; names stay as they are once they have shipped. ``warm`` are the files of ``--warm``."""
    shown: dict[str, Any] = {"methods": {name: _method(one, curve) for name, one in played.items()}}
    shown["warm"] = list(warm)
    if curve:
        of_any = next(iter(played.values())).predict(curve)
        shown["plain"] = {"tokens_per_second": round(of_any.plain_tokens_per_second, 2)}
        shown["cost"] = {"device": curve.device, "model": curve.model, "dtype": curve.dtype}
    return shown


def _method(one: ReplayResult, curve: CostCurve | None) -> dict[str, Any]:
    predicted = one.predict(curve) if curve else None
    forecast = {**rounded(predicted, tokens_per_second=2, speedup=3), "pays": predicted.pays} if predicted else {}
    return {
        **_rates(one),
        **rounded(one, accepted_share=4),
        "draft_us_p50": round(one.draft_us(50), 1),
        "draft_us_p99": round(one.draft_us(99), 1),
        "observe_us_p50": round(one.observe_us(50), 1),
        "observe_us_p99": round(one.observe_us(99), 1),
        **forecast,
        **_memory(one),
        "by_category": {name: _rates(part) for name, part in one.by_category().items()},
        "by_source": {
            str(source): {
                "drafted": share.drafted,
                "accepted": share.accepted,
                "hits": share.hits,
                "unique": share.unique,
                "microseconds": round(share.seconds * 1e6, 1),
            }
            for source, share in one.by_source().items()
        },
    }


def _rates(one: ReplayResult) -> dict[str, Any]:
    return {
        **rounded(one, tokens_per_step=3, nodes_per_step=2),
        "tokens": one.tokens,
        "steps": one.steps,
        "turns": len(one.turns),
    }


def _memory(one: ReplayResult) -> dict[str, Any]:
    return {"history": "growing" if one.history else "none", "warm_tokens": one.warm_tokens}


def turn_record(one: ReplayResult, turn: ReplayedTurn) -> dict[str, Any]:
    """A line of ``--steps``."""
    from hdtool.runtime.source_names import SourceName

    return {
        "method": one.method,
        "conversation": turn.conversation,
        "category": turn.category,
        "turn": turn.number,
        "prompt_tokens": turn.prompt_tokens,
        "tokens": len(turn.tokens),
        "steps": len(turn.accept_lengths),
        "accept_lengths": turn.accept_lengths.tolist(),
        "nodes": turn.nodes.tolist(),
        "sources": [str(SourceName(source)) for source in turn.sources.tolist()],
        **_memory(one),
    }


def in_words(played: Results, curve: CostCurve | None, warm: Sequence[str] = ()) -> str:
    from hdtool.runtime.evaluation.report.pages import forecast, memory_of

    first = next(iter(played.values()))
    conversations = len({turn.conversation for turn in first.turns})
    blocks = [
        f"{counted(conversations, 'conversation')}, {counted(len(first.turns), 'answer')}, "
        f"{counted(first.tokens, 'token')}\n" + filled("history: " + "; ".join(memory_of(played, warm))),
        table(_overview(played).lines),
    ]
    if len(first.by_category()) > 1:
        blocks.append("Tokens per step by category\n\n" + table(_categories(played).lines))
    if (sources := _sources(played)).rows:
        blocks.append("By source\n\n" + table(sources.lines, left=2))
    if curve:
        predicted = forecast(played, curve)
        blocks += [filled(predicted.title), table(predicted.lines), *filter(None, [predicted.note])]
    return "\n\n".join(blocks)


def _overview(played: Results) -> Table:
    columns = {"tokens/step": ".3f", "nodes/step": ".1f", "accepted": ".1%", "drafting µs p50": ".0f", "p99": ".0f"}
    rows = (
        (
            name,
            one.tokens_per_step,
            one.nodes_per_step,
            one.accepted_share if one.nodes else None,
            one.draft_us(50),
            one.draft_us(99),
        )
        for name, one in played.items()
    )
    return Table.of("", {"method": "", **columns}, rows)


def _categories(played: Results) -> Table:
    parts = [one.by_category() for one in played.values()]
    rows = (
        (name or "(none)", len(first.turns), *(part[name].tokens_per_step for part in parts))
        for name, first in parts[0].items()
    )
    return Table.of("", {"category": "", "answers": ",", **dict.fromkeys(played, ".3f")}, rows)


def _sources(played: Results) -> Table:
    columns = {"drafted": ",", "accepted": ",", "share": ".1%", "in steps": ".0%", "µs a step": ".0f"}
    rows = (
        (
            name,
            str(source),
            share.drafted,
            share.accepted,
            share.accepted / share.drafted if share.drafted else None,
            share.hits / max(1, one.drafted_steps),
            share.seconds / max(1, one.drafted_steps) * 1e6,
        )
        for name, one in played.items()
        for source, share in one.by_source().items()
    )
    return Table.of("", {"method": "", "source": "", **columns}, rows)
