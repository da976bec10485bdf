"""Offline work: everything that is made once, before anybody asks the model anything.

So far the embedded demo model with the text it learns from; the stores and the heads are built
here too. This room uses ``data`` and the formats of ``runtime``, never the command line.
"""
