"""Results of a replay as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hdtool.cli.output.tables import Row, table

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.evaluation.replay_results import ReplayedTurn, ReplayResult

Results = Mapping[str, "ReplayResult"]


def record(played: Results, curve: CostCurve | None) -> dict[str, Any]:
    """What ``--json`` prints; names stay as they are once they have shipped."""
    shown: dict[str, Any] = {"methods": {name: _method(one, curve) for name, one in played.items()}}
    if curve:
        of_any = next(iter(played.values())).predict(curve)
        shown["plain"] = {"tokens_per_second": round(of_any.plain_tokens_per_second, 2)}
        shown["cost"] = {"device": curve.device, "model": curve.model, "dtype": curve.dtype}
    return shown


def _method(one: ReplayResult, curve: CostCurve | None) -> dict[str, Any]:
    predicted = one.predict(curve) if curve else None
    forecast = (
        {
            "tokens_per_second": round(predicted.tokens_per_second, 2),
            "speedup": round(predicted.speedup, 3),
            "pays": predicted.pays,
        }
        if predicted
        else {}
    )
    return {
        **_rates(one),
        "accepted_share": round(one.accepted_share, 4),
        "draft_us_p50": round(one.draft_us(50), 1),
        "draft_us_p99": round(one.draft_us(99), 1),
        "observe_us_p50": round(one.observe_us(50), 1),
        "observe_us_p99": round(one.observe_us(99), 1),
        **forecast,
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
        "tokens_per_step": round(one.tokens_per_step, 3),
        "nodes_per_step": round(one.nodes_per_step, 2),
        "tokens": one.tokens,
        "steps": one.steps,
        "turns": len(one.turns),
    }


def turn_record(method: str, turn: ReplayedTurn) -> dict[str, Any]:
    """A line of ``--steps``."""
    from hdtool.runtime.source_names import SourceName

    return {
        "method": method,
        "conversation": turn.conversation,
        "category": turn.category,
        "turn": turn.number,
        "prompt_tokens": turn.prompt_tokens,
        "tokens": len(turn.tokens),
        "steps": len(turn.accept_lengths),
        "accept_lengths": turn.accept_lengths.tolist(),
        "nodes": turn.nodes.tolist(),
        "sources": [str(SourceName(source)) for source in turn.sources.tolist()],
    }


def in_words(played: Results, curve: CostCurve | None) -> str:
    first = next(iter(played.values()))
    conversations = len({turn.conversation for turn in first.turns})
    blocks = [
        f"{conversations:,} conversations, {len(first.turns):,} answers, {first.tokens:,} tokens",
        table(_overview(played)),
    ]
    if len(first.by_category()) > 1:
        blocks.append("Tokens per step by category\n\n" + table(_categories(played)))
    if len(sources := _sources(played)) > 1:
        blocks.append("By source\n\n" + table(sources, left=2))
    if curve:
        blocks.append(_forecast(played, curve))
    return "\n\n".join(blocks)


def _overview(played: Results) -> list[Row]:
    rows: list[Row] = [("method", "tokens/step", "nodes/step", "accepted", "drafting µs p50", "p99")]
    for name, one in played.items():
        times = (f"{one.draft_us(percentile):.0f}" for percentile in (50, 99))
        share = f"{one.accepted_share:.1%}" if one.nodes else "-"
        rows.append((name, f"{one.tokens_per_step:.3f}", f"{one.nodes_per_step:.1f}", share, *times))
    return rows


def _categories(played: Results) -> list[Row]:
    parts = [one.by_category() for one in played.values()]
    rows: list[Row] = [("category", "answers", *played)]
    for name, first in parts[0].items():
        rates = (f"{part[name].tokens_per_step:.3f}" for part in parts)
        rows.append((name or "(none)", f"{len(first.turns):,}", *rates))
    return rows


def _sources(played: Results) -> list[Row]:
    rows: list[Row] = [("method", "source", "drafted", "accepted", "share", "in steps", "µs a step")]
    for name, one in played.items():
        steps = max(1, one.drafted_steps)
        for source, share in one.by_source().items():
            rows.append(
                (
                    name,
                    str(source),
                    f"{share.drafted:,}",
                    f"{share.accepted:,}",
                    f"{share.accepted / share.drafted:.1%}" if share.drafted else "-",
                    f"{share.hits / steps:.0%}",
                    f"{share.seconds / steps * 1e6:.0f}",
                )
            )
    return rows


def _forecast(played: Results, curve: CostCurve) -> str:
    predicted = {name: one.predict(curve) for name, one in played.items()}
    plain = next(iter(predicted.values())).plain_tokens_per_second
    rows: list[Row] = [("method", "tokens/s", "times plain"), ("plain", f"{plain:.1f}", "1.00")]
    rows += [(name, f"{one.tokens_per_second:.1f}", f"{one.speedup:.2f}") for name, one in predicted.items()]
    where = ", ".join(part for part in (curve.model, curve.device, curve.dtype) if part)
    title = "Predicted from what forward passes take" + (f" ({where})" if where else "")
    refused = (
        f"{name}: {one.speedup:.2f} times plain decoding: do not use it here"
        for name, one in predicted.items()
        if not one.pays and played[name].nodes
    )
    return "\n\n".join(filter(None, (title, table(rows), "\n".join(refused))))
