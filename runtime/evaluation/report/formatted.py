"""The figures once more, as tables."""

from __future__ import annotations

from hdtool.runtime.evaluation.report.tables import Coverage, Durations, Repeats, Shares, Sizes, Table, Trials, Warmth


def durations(data: Durations) -> Table:
    lines = {method: data.line(method) for method in data.answers}
    return Table(
        "Generation time",
        ("method", "ms a token", "ms before the first", "answers"),
        tuple(
            (method, f"{slope * 1e3:.3f}", f"{start * 1e3:.1f}", f"{len(data.answers[method]):,}")
            for method, (slope, start) in lines.items()
        ),
    )


def warmth(data: Warmth) -> Table:
    return Table(
        "Tokens per second over temperatures",
        ("method", *(f"{temperature:g}" for temperature in data.temperatures)),
        tuple((method, *(f"{speed:,.1f}" for speed in speeds)) for method, speeds in data.methods.items()),
    )


def shares(data: Shares) -> Table:
    return Table(
        f"Sources of {data.method}",
        ("source", "drafts in", "of these, accepted from in", "tokens drafted", "accepted", "of the drafted"),
        tuple(
            (
                name,
                f"{one.hits / max(1, data.steps):.1%}",
                f"{one.won:.1%}",
                f"{one.drafted:,}",
                f"{one.accepted:,}",
                f"{one.verified:.1%}",
            )
            for name, one in data.sources.items()
        ),
        f"Of {data.steps:,} steps.",
    )


def trials(data: Trials, title: str) -> Table:
    return Table(
        title,
        ("databases", "tokens per step", "nodes a step", "drafting, µs a step"),
        tuple(
            (row.databases, f"{row.tokens_per_step:.3f}", f"{row.nodes_per_step:.1f}", f"{row.draft_us:.0f}")
            for row in data.rows
        ),
        "Drafting: the median of the steps, the tree's mask included.",
    )


def coverage(data: Coverage) -> Table:
    return Table(
        f"Token coverage of {data.method}",
        ("only database", "accepted", "from no other", "different tokens", "from no other"),
        tuple(
            (name, f"{one.positions:,}", f"{one.alone:,}", f"{one.words:,}", f"{one.words_alone:,}")
            for name, one in data.databases.items()
        ),
        f"Of {data.positions:,} tokens; {data.nobody:,} were accepted from none.",
    )


def repeats(data: Repeats) -> Table:
    return Table(
        "4-grams seen before, percent",
        ("up to generation", *data.places),
        tuple(
            (f"{last:,}", *(f"{100 * values[at]:.1f}" for values in data.places.values()))
            for at, last in enumerate(data.generations)
        ),
    )


def distances(data: Repeats) -> Table:
    return Table(
        "4-grams said at most so many tokens ago",
        ("tokens", "percent"),
        tuple((f"{far:,}", f"{100 * share:.1f}") for far, share in zip(data.distances, data.within, strict=True)),
    )


def sizes(data: Sizes) -> Table:
    return Table(
        f"Size of the corpus index of {data.method}",
        ("tokens", "tokens per step", "drafting, µs p50", "p90", "in the corpus index, mean"),
        tuple(
            (
                f"{row.tokens:,}",
                f"{row.tokens_per_step:.3f}",
                f"{row.draft_us:.0f}",
                f"{row.draft_us_p90:.0f}",
                f"{row.corpus_us:.0f}",
            )
            for row in data.rows
        ),
    )
