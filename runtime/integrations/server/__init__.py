"""A server over hdtool's own loop, with the APIs of OpenAI and Anthropic.

A request goes through ``app`` (HTTP), ``requests``, ``preparation``, ``answers`` and ``engine``; its answer returns
through ``answers`` and ``formats``. ``responses_api`` and ``messages_api`` convert other requests to chats and write
their answers. Only ``app``, ``launch`` and ``engine`` import HTTP and metrics libraries; ``starlette``, ``uvicorn``,
``pydantic`` and ``prometheus_client`` are the extra ``server``.
"""
