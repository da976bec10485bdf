"""What comes in and what ships.

Readers of prompts, chat templates, the errors that users see, and the embedded demo. This room
imports nothing else of hdtool, and nothing heavy before a function needs it.
"""
