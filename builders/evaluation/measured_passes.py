"""Measures a model's forward passes, and saves the times for later runs."""

from __future__ import annotations

from hdtool.builders.evaluation.timing import Stopwatch, Timings, doubt
from hdtool.data.progress import progress_bar
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.measure_passes import check_saving, context_lengths_for, measure_cost_curve, save_at_home
from hdtool.runtime.settings.measuring import CostConfig
from hdtool.runtime.target.load import Loaded


def measured_passes(loaded: Loaded, config: CostConfig) -> tuple[CostCurve, str]:
    """Measure and save a model's cost curve; return it, and a sentence on why its times are unreliable, or ""."""
    target, lengths = loaded.target, context_lengths_for(loaded, config)
    check_saving(target)
    with progress_bar(len(lengths), "contexts") as progress, Stopwatch(target.device) as watch:
        curve = measure_cost_curve(loaded, lengths, progress.to)
    save_at_home(target, curve)
    return curve, doubt({"the passes": Timings.of([watch])})
