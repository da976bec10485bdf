"""Report of a replay or a benchmark: one self-contained HTML page with tables and figures.

`replayed_sources.py` and `measurements.py` compute the data classes of `tables.py`, `figures.py` and `plots.py` present
them, and `pages.py` renders the page. Imports `data` and `runtime`.
"""
