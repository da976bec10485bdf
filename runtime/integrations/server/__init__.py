"""An OpenAI-compatible server over hdtool's own loop.

A request goes through ``app`` (HTTP), ``requests``, ``preparation``, ``answers`` and ``engine``; its answer returns
through ``answers`` and ``responses``. Only ``app``, ``launch`` and ``monitoring`` import libraries of HTTP. The server
may import everything in ``runtime``; ``starlette``, ``uvicorn``, ``pydantic`` and ``prometheus_client`` are the extra
``server``.
"""
