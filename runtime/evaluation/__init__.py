"""What drafting brings: benchmarks, replays of recorded answers, verification of losslessness, reports.

Imports everything of `runtime` but `integrations`.
"""
