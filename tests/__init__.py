"""Tests of hdtool. Compiled code is kept in the repository, because each run has a home of its own."""

import os
from pathlib import Path

os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".numba"))
