"""Report of a replay or a benchmark: one self-contained HTML page with tables and figures.

``tables.py``, ``source_shares.py`` and ``typical_case.py`` define the data, which ``measurements.py`` computes from a
benchmark. ``figures.py`` and ``plots.py`` draw the figures, and ``pages.py`` renders the page.
"""
