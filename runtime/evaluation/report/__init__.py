"""What drafting brought, told in pictures: one page that needs nothing beside it.

Plain tables stand between what was measured and what is shown. `study.py`, `repeats.py` and `measured.py` fill
them from replays, texts and benchmarks; `plots.py` draws them, `findings.py` judges by them, `page.py` tells them.
"""
