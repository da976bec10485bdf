"""An OpenAI-compatible server over hdtool's own loop: requests, the engine that answers them, and HTTP.

It may import everything in ``runtime``; ``starlette``, ``uvicorn``, ``pydantic`` and ``prometheus_client`` are the
extra ``server``.
"""
