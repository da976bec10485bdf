"""What ``hdtool doctor`` checks: the machine, the packages, the folders, and whether a model would load and draft.

Imports `runtime/model`, `runtime/stores` and `data`; every check returns findings and raises nothing.
"""
