"""A server that offers the OpenAI and Anthropic APIs and generates with hdtool's own decoding loop.

A request passes through ``endpoints`` (HTTP), ``openai_requests``, ``request_preparation``, ``choice_stream`` and
``engine_thread``. Its answer returns through ``choice_stream`` and ``openai_formats``. ``responses_api`` and
``messages_api`` convert the requests of other APIs to chat requests, and split the answers by ``answer_sections``.
``message_content`` reads the contents of all messages. ``chat_page`` returns ``page.html``, which needs no other file
and no other host.
"""
