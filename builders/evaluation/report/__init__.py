"""The report of a replay or a benchmark: one self-contained HTML page with tables and figures.

`ablations.py`, `repeats.py` and `measured.py` compute the data classes of `tables.py`; `figures.py`, `plots.py` and
`findings.py` present them, and `page.py` renders the page. Imports `data` and `runtime`.
"""
