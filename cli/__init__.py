"""Command line of hdtool, with one thin module per command.

Each command turns its options into the runtime's frozen settings classes, runs, and prints the results. Heavy packages
are imported inside the commands, so that ``--help`` responds at once.
"""
