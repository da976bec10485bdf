"""A server that offers the OpenAI and Anthropic APIs and generates with hdtool's own decoding loop.

A request passes through ``app`` (HTTP), ``requests``, ``preparation``, ``answers`` and ``scheduler``. Its answer
returns through ``answers`` and ``formats``. ``responses_api`` and ``messages_api`` convert the requests of other APIs
to chat requests, and their answers to ``answer_sections``. ``content`` reads the contents of all messages.
``page`` returns the chat page, ``page.html``, which needs no other file and no other host.
"""
