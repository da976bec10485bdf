"""Report of a replay or a benchmark: one self-contained HTML page with tables and figures.

``tables.py`` defines the data, which ``replayed_sources.py`` and ``measurements.py`` compute. ``figures.py`` and
``plots.py`` draw the figures, and ``pages.py`` renders the page.
"""
