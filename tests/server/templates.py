"""Chat templates that differ in which messages of the system they take."""

from __future__ import annotations

TURNS = "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}"
FIRST_ONLY = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system comes first') }}{% endif %}"
    "{{ '<' + message.role + '>' + message.content }}{% endfor %}"
)
ALTERNATING = (
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}{% for message in turns %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns alternate') }}{% endif %}"
    "{{ '<' + message.role + '>' + message.content }}{% endfor %}"
)
DROPPING = (
    "{% for message in messages %}{% if message.role != 'system' or loop.first %}"
    "{{ '<' + message.role + '>' + message.content }}{% endif %}{% endfor %}"
)
