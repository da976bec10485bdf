"""Writes the demo's held-out prompts: ``python -m hdtool.builders.demo.prompts --gsm8k DIR --out FILE``.

The questions come from pages and source files that the demo model was not trained on, equally many of each kind, in an
order given by a hash. ``reference`` is the held-out answer. ``--learned N`` writes N questions of each kind from the
training data instead, none of them held out, to collect the model's answers to them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hdtool.builders.demo.corpus import TrainingDocument, demo_arguments, documents, stable_hash
from hdtool.data.errors import PromptError
from hdtool.data.output_files import OutputFile, is_json_lines_with
from hdtool.data.prompts import Prompt

PROMPT_KINDS = ("math", "explain", "write", "edit")
PROMPTS_PER_KIND = 50
PROMPT_KEYS = ("id", "category", "messages", "reference", "from")
"""Keys of a line; lines of training questions have only the first three."""


def prompts(everything: Iterable[TrainingDocument], of_each: int = PROMPTS_PER_KIND) -> Iterator[dict[str, Any]]:
    """Yield held-out prompts, alternating between kinds so that the first ones cover every kind."""
    held_out = sorted((d for d in everything if d.held_out and d.question), key=lambda d: stable_hash(d.name))
    once = {document.question: document for document in held_out}
    for number, row in enumerate(one_of_each_kind(once.values(), of_each), start=1):
        for document in row:
            yield {
                "id": f"{document.kind}-{number:02}",
                "category": document.kind,
                "messages": [{"role": "user", "content": document.question}],
                "reference": document.answer,
                "from": document.name,
            }


def one_of_each_kind(ordered: Collection[TrainingDocument], of_each: int) -> Iterator[tuple[TrainingDocument, ...]]:
    """Yield tuples of one document per kind, at most ``of_each`` of them."""
    return zip(*([d for d in ordered if d.kind == kind][:of_each] for kind in PROMPT_KINDS), strict=False)


def learned_questions(everything: Sequence[TrainingDocument], of_each: int) -> Iterator[Prompt]:
    """Yield distinct training questions, alternating between kinds, in an order given by a hash."""
    held_out = {document.question for document in everything if document.held_out}
    learned = {d.question: d for d in everything if d.question and not d.held_out and d.question not in held_out}
    # Sorting by name would put the two tasks of a function next to each other.
    ordered = sorted(learned.values(), key=lambda document: stable_hash(document.question))
    for number, row in enumerate(one_of_each_kind(ordered, of_each), start=1):
        for document in row:
            message = {"role": "user", "content": document.question}
            yield Prompt((message,), id=f"{document.kind}-{number:03}", category=document.kind)


def prompts_file(path: Path) -> OutputFile:
    """Return the prompts file, which may be replaced only if this script wrote it."""
    held_out, learned = (is_json_lines_with(keys) for keys in (PROMPT_KEYS, PROMPT_KEYS[:3]))

    def is_ours(candidate: Path) -> bool:
        return held_out(candidate) or learned(candidate)

    return OutputFile(path, "a file of demo prompts", is_ours, PromptError)


def main() -> None:
    parser = demo_arguments(__doc__, "where the prompts go")
    parser.add_argument("--learned", type=int, help="so many questions of each kind that the model learned from")
    options = parser.parse_args()
    out = prompts_file(options.out)
    out.check()
    everything = list(documents(options.gsm8k, options.docs))
    rows = list(prompts(everything))
    if options.learned is not None:
        questions = learned_questions(everything, options.learned)
        rows = [{"id": q.id, "category": q.category, "messages": list(q.messages)} for q in questions]
    out.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {options.out}")


if __name__ == "__main__":
    main()
