"""Files that hdtool reads and writes (prompts, conversations, stores, results, the demo), its home, and its errors.

Imports no other package of hdtool, and imports heavy libraries, such as torch, only inside functions.
"""
