"""OpenAI's API: the bodies of requests, the JSON of answers and errors, and calls of tools.

It may import ``runtime`` and ``server.engine``, but nothing of HTTP.
"""
