"""Memory of compiled code: arrays by their address, outputs that are used again, objects that are not copied.

Imports no other part of hdtool.
"""
