"""Measurements: benchmarks, replays of recorded answers, verification of losslessness, and reports.

Imports all of `runtime` except `integrations`.
"""
