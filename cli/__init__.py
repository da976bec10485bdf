"""Command line of hdtool, with one thin module per command.

Each command turns its options into the frozen settings of the runtime, runs, and prints. Heavy packages are imported
inside the commands, so that ``--help`` answers at once.
"""
