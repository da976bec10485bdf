"""Measurements: benchmarks, replays of recorded answers, verification of losslessness, and reports.

Imports everything of `runtime` but `integrations`.
"""
