"""Settings classes with the defaults and help texts that the command line and the docs show.

Imports only `data`, and no heavy packages.
"""
