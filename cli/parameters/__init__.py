"""What the commands share: their options, their panels and examples in ``--help``, and options without effect.

Imports `data` and `runtime/config`; the registry of sources only where a command runs.
"""
