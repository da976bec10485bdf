"""Writes prompts of a programmer's day as JSON Lines: chats, whole-file edits, questions about a file, tests, an agent.

    python -m tests.benchmarks.coding_questions > measured.jsonl
    python -m tests.benchmarks.coding_questions --half other > other.jsonl

The files are modules of the Python that runs this. Both halves have the same kinds of tasks about other modules and
topics, so that stores built from one half's answers can be measured on the other. ``--trace`` adds turns of a recorded
conversation with an agent, each with everything before it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from hdtool.data.texts_and_traces import read_traces
from tests.benchmarks.laboratory import parser_of

MEASURED, OTHER = "measured", "other"
CHATS = (
    "Write a Python function that merges overlapping intervals, with an example call.",
    "How do I read a large CSV file in chunks with pandas and sum one column per group?",
    "Write a Rust function that counts the words of a text and returns the ten most frequent.",
    "Explain the difference between a process and a thread, with a short Python example of each.",
    "Write a SQL query that returns the second highest salary of each department, and explain it.",
    "Write a small HTTP server in Go that answers /health with JSON and shuts down gracefully.",
    "Write a Python class for a least-recently-used cache with get and put in constant time.",
    "How do I make a Python script that retries an HTTP request with exponential backoff?",
    "Write a Rust function that parses a line of key=value pairs into a hash map.",
    "Explain what a race condition is, with a short Python example and its fix.",
    "Write a SQL query that returns all customers without an order in the last 30 days, and explain it.",
    "Write a command-line program in Go that counts the lines of the files it is given.",
)
EDITS = (
    ("bisect", "Add type hints to all functions."),
    ("_sitebuiltins", "Add a docstring of one line to every method that has none."),
    ("token", "Rename the function ISEOF to is_end_of_file."),
    ("colorsys", "Add a function rgb_to_hex(r, g, b) after the imports, and change nothing else."),
    ("signal", "Add type hints to all functions."),
    ("secrets", "Add a docstring of one line to every function that has none."),
    ("keyword", "Rename iskeyword to is_keyword."),
    ("nturl2path", "Add a function is_drive(path) after the docstring, and change nothing else."),
)
ABOUT_FILES = (
    ("sched", "How does `run` decide how long to sleep, and what happens when an event raises an exception?"),
    ("reprlib", "List the methods of the class Repr and say in one line each what they do."),
    ("crypt", "Which errors can `mksalt` raise? Quote the lines that raise them."),
    ("genericpath", "Explain `_splitext` step by step, quoting the code."),
    ("codeop", "What does `_maybe_compile` do? Quote the lines and explain them."),
    ("chunk", "List the methods of the class Chunk and say in one line each what they do."),
    ("getpass", "Which errors can `unix_getpass` raise? Quote the lines that raise them."),
    ("_compression", "Explain `readinto` and `read` step by step, quoting the code."),
)
TESTED = ("fnmatch", "colorsys", "genericpath", "bisect", "linecache", "reprlib", "keyword", "nturl2path")


def source_of(module: str) -> str:
    return Path(os.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")


def file_prompt(module: str, request: str) -> str:
    return f"{request}\n\n```python\n# {module}.py\n{source_of(module)}```"


def tasks() -> dict[str, list[str]]:
    """Return the prompts of each kind."""
    whole = "Answer with the whole file and nothing else."
    return {
        "chat": list(CHATS),
        "edit": [file_prompt(name, f"{change} {whole}") for name, change in EDITS],
        "file": [file_prompt(name, question) for name, question in ABOUT_FILES],
        "tests": [file_prompt(name, "Write unit tests with pytest for this module.") for name in TESTED],
    }


def prompts(half: str, number: int, trace: Path | None, turns: int) -> Iterator[dict[str, object]]:
    for category, texts in tasks().items():
        middle = len(texts) // 2
        for place, text in enumerate((texts[:middle] if half == MEASURED else texts[middle:])[:number]):
            yield {"id": f"{category}-{place}", "category": category, "messages": [{"role": "user", "content": text}]}
    if trace:
        recorded = [one for one in read_traces([trace]) if one.answers]
        chosen = recorded[0 if half == MEASURED else -1]
        for place, answer in enumerate(chosen.answers[:turns]):
            yield {"id": f"agent-{place}", "category": "agent", "messages": chosen.messages[: answer.message_index]}


def main() -> None:
    options = parser_of(__doc__, half=MEASURED, number=12, trace=Path(), turns=4).parse_args()
    if options.half not in (MEASURED, OTHER):
        sys.exit(f"error: --half is {options.half}: {MEASURED} or {OTHER}")
    trace = options.trace if options.trace.name else None
    for row in prompts(options.half, options.number, trace, options.turns):
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
