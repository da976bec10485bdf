"""A server over hdtool's own loop, with the APIs of OpenAI and Anthropic.

A request goes through ``app`` (HTTP), ``requests``, ``preparation``, ``answers`` and ``engine``; its answer returns
through ``answers`` and ``formats``. ``responses_api`` and ``messages_api`` turn other requests into those of chats, and
write their answers. Only ``app``, ``launch`` and ``monitoring`` import libraries of HTTP. The server
may import everything in ``runtime``; ``starlette``, ``uvicorn``, ``pydantic`` and ``prometheus_client`` are the extra
``server``.
"""
