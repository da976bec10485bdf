"""The demo's held-out prompts: ``python -m hdtool.builders.demo_prompts --gsm8k DIR --out FILE``.

Questions from pages and source files that the demo model never read, as many of each kind, in an
order that a hash decides. ``reference`` is the text that was held out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from hdtool.builders.demo_corpus import DEFAULT_DOCS, Document, documents, stable_hash

KINDS = ("math", "explain", "write", "edit")
OF_EACH = 50


def prompts(everything: Iterable[Document], of_each: int = OF_EACH) -> Iterator[dict[str, Any]]:
    """Prompts of all kinds in turn, so that any number of them from the top holds every kind."""
    held_out = sorted((d for d in everything if d.held_out and d.question), key=lambda d: stable_hash(d.name))
    once = {document.question: document for document in held_out}
    for number, row in enumerate(in_turn(once.values(), of_each), start=1):
        for document in row:
            yield {
                "id": f"{document.kind}-{number:02}",
                "category": document.kind,
                "messages": [{"role": "user", "content": document.question}],
                "reference": document.answer,
                "from": document.name,
            }


def in_turn(ordered: Collection[Document], of_each: int) -> Iterator[tuple[Document, ...]]:
    """The first documents of all kinds that ask, one of each kind at a time."""
    return zip(*([d for d in ordered if d.kind == kind][:of_each] for kind in KINDS), strict=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--docs", type=Path, default=DEFAULT_DOCS, help="Python's documentation as reStructuredText")
    parser.add_argument("--out", type=Path, required=True, help="where the prompts go")
    options = parser.parse_args()
    rows = list(prompts(documents(options.gsm8k, options.docs)))
    options.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} prompts in {options.out}")


if __name__ == "__main__":
    main()
