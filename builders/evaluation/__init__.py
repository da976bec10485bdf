"""Measurements: benchmarks, replays of recorded answers, verification of losslessness, and reports.

Imports neither other folders of ``builders`` nor ``runtime/integrations``.
"""
