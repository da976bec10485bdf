"""The command line: one thin module per command.

A command turns options into the frozen settings of the runtime, runs it, and prints. Nothing
heavy is imported before a command runs, so that ``--help`` answers at once.
"""
