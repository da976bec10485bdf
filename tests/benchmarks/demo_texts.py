"""Writes the texts that the demo's models and stores are made from: GSM8K, Python's documentation and its library.

    python -m tests.benchmarks.demo_texts prompts --gsm8k DIR --out FILE    # held-out questions, with their answers
    python -m tests.benchmarks.demo_texts questions --gsm8k DIR --out FILE [--per-kind 300]    # not held out
    python -m tests.benchmarks.demo_texts documents --gsm8k DIR --out FILE    # of the corpus index, not held out

All of it is openly licensed (GSM8K: MIT; Python's documentation and standard library: PSF-2.0). A document is a
conversation or plain text. A stable hash of a document's page name decides whether the document is held out, so that
training data never overlaps with prompts or with the data of the held-out loss.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer

DEFAULT_DOCS = Path(f"/usr/share/doc/python3.{sys.version_info.minor}/html/_sources")
DOC_FOLDERS = ("tutorial", "library", "howto", "faq", "reference", "using", "installing", "extending")
MAX_ANSWER_CHARACTERS = 2000
"""Maximum number of characters of an answer; the training window would cut longer answers."""


@dataclass(frozen=True)
class TrainingDocument:
    """Conversation of one question and its answer, or plain text if ``question`` is empty."""

    kind: str
    name: str
    answer: str
    question: str = ""

    @property
    def page(self) -> str:
        """Documentation page, source file or dataset split that the document comes from."""
        return self.name.partition("#")[0]

    @property
    def held_out(self) -> bool:
        """True for GSM8K's test split, and for all documents from one in forty pages or source files."""
        return self.page == "gsm8k/test" if self.kind == "math" else stable_hash(self.page) % 40 == 0


def arguments_of_texts(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that name the sources of the texts, and ``--out``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--docs", type=Path, default=DEFAULT_DOCS, help="Python's documentation as reStructuredText")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def documents(gsm8k: Path, docs: Path, library: Path | None = None) -> Iterator[TrainingDocument]:
    """Yield every document once. ``library`` defaults to the running Python's standard library."""
    yield from worked_problems(gsm8k)
    yield from documentation(docs)
    yield from library_code(library or Path(sysconfig.get_path("stdlib")))


def worked_problems(folder: Path) -> Iterator[TrainingDocument]:
    for split in ("train", "test"):
        with open(folder / f"{split}.jsonl", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                row = json.loads(line)
                yield TrainingDocument("math", f"gsm8k/{split}#{number}", row["answer"], row["question"])


# Python's documentation ------------------------------------------------------------------------

ENTRY_DIRECTIVE = re.compile(
    r"^( *)\.\. (?:function|method|class|classmethod|staticmethod|attribute|data|exception)::\s+(.+)$"
)
SECTION_TITLE = re.compile(r"^(\S[^\n]*)\n([=\-*~^\"#.])\2{2,} *$", re.MULTILINE)
DROPPED_DIRECTIVES = re.compile(
    r"^\.\. (?:index|module|moduleauthor|sectionauthor|testsetup|testcleanup|only|highlight|toctree|image|figure"
    r"|include|literalinclude|audit-event|availability|currentmodule|productionlist|versionadded|versionchanged"
    r"|deprecated|deprecated-removed|impl-detail|raw|contents|tabularcolumns|rubric|cmdoption|option|_|\|)"
)
LABELLED_DIRECTIVES = {"note": "Note:", "warning": "Warning:", "seealso": "See also:", "tip": "Tip:"}
RST_ROLE = re.compile(r":[a-zA-Z][\w+:.-]*:`[~!]?([^`<]*?)\s*(?:<[^`>]*>)?`")
RST_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?")


def documentation(folder: Path) -> Iterator[TrainingDocument]:
    for part in DOC_FOLDERS:
        for path in sorted((folder / part).rglob("*.rst*")):
            text = path.read_text(encoding="utf-8").expandtabs()
            page = f"docs/{part}/{path.name.split('.rst')[0]}"
            yield from entries(page, text)
            yield from sections(page, text, is_faq=part == "faq")
    for glossary in folder.glob("glossary.rst*"):
        yield from terms(glossary.read_text(encoding="utf-8"))


def entries(page: str, text: str) -> Iterator[TrainingDocument]:
    """Yield questions about the names in directives such as ``.. function::``, answered by the directives' text."""
    lines = text.splitlines()
    module = next((line.split("::")[1].strip() for line in lines if line.startswith(".. module::")), "")
    for number, line in enumerate(lines):
        if not (match := ENTRY_DIRECTIVE.match(line)):
            continue
        body = indented_block(lines, number + 1, len(match[1]))
        answer = plain_text(body)
        signature = match[2].strip()
        name = re.split(r"[(\s]", signature)[0]
        if module and not name.startswith(module):
            name = f"{module}.{name}"
        if 40 <= len(answer) <= MAX_ANSWER_CHARACTERS:
            questions = f"What does `{name}` do?", f"Explain `{name}`.", f"How do I use `{name}`?"
            question = questions[stable_hash(name) % len(questions)]
            yield TrainingDocument("explain", f"{page}#{name}", f"`{signature}`\n\n{answer}", question)


def sections(page: str, text: str, *, is_faq: bool) -> Iterator[TrainingDocument]:
    """Yield each titled section as prose, or as a conversation if its title is a question in an FAQ."""
    marks = list(SECTION_TITLE.finditer(text))
    for mark, following in zip(marks, [*marks[1:], None], strict=False):
        title = plain_text(mark[1])
        body = plain_text(text[mark.end() : following.start() if following else len(text)])
        if len(body) < 200:
            continue
        if is_faq and title.endswith("?") and len(body) <= MAX_ANSWER_CHARACTERS:
            yield TrainingDocument("explain", f"{page}#{title}", body, title)
        else:
            yield TrainingDocument("prose", f"{page}#{title}", f"# {title}\n\n{body}")


def terms(text: str) -> Iterator[TrainingDocument]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.match(r"^   \S", line) and number + 1 < len(lines) and lines[number + 1].startswith("      "):
            answer = plain_text(indented_block(lines, number + 1, 3))
            if 40 <= len(answer) <= MAX_ANSWER_CHARACTERS:
                term = plain_text(line)
                yield TrainingDocument(
                    "explain", f"docs/glossary#{term}", answer, f"What is meant by {term} in Python?"
                )


def indented_block(lines: list[str], start: int, indent: int) -> str:
    """Return the block that begins at line ``start`` and is indented deeper than ``indent``, dedented."""
    block: list[str] = []
    for line in lines[start:]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        block.append(line)
    depth = min((len(line) - len(line.lstrip()) for line in block if line.strip()), default=0)
    return "\n".join(line[depth:] for line in block)


def plain_text(text: str) -> str:
    """Strip the markup from reStructuredText."""
    kept_lines: list[str] = []
    dropped_below: int | None = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if dropped_below is not None and line.strip() and indent <= dropped_below:
            dropped_below = None
        if dropped_below is not None:
            continue
        stripped = line.lstrip()
        if ENTRY_DIRECTIVE.match(line) or DROPPED_DIRECTIVES.match(stripped) or stripped == "..":
            dropped_below = indent
        elif directive := re.match(r"\.\. ([\w-]+)::\s*(.*)", stripped):
            label = LABELLED_DIRECTIVES.get(directive[1], "")
            kept_lines.append(" " * indent + f"{label} {directive[2] if label else ''}".strip())
        elif not re.match(r":[\w -]+:( |$)", stripped):
            kept_lines.append(line)
    joined = RST_ROLE.sub(r"`\1`", "\n".join(kept_lines)).replace("``", "`")
    joined = RST_LINK.sub(r"\1", joined).replace("::\n", ":\n").replace("\\ ", "").replace("`None`", "None")
    return re.sub(r"\n\s*\n+", "\n\n", joined).strip()


# Python's library ------------------------------------------------------------------------------

SKIPPED_CODE = re.compile(r"/(?:site-packages|test|tests|idlelib|lib2to3|turtledemo|encodings|__pycache__|ensurepip)/")


def library_code(folder: Path) -> Iterator[TrainingDocument]:
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED_CODE.search(path.as_posix()) or path.name.startswith(("_sysconfigdata", "test_")):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        page = "lib/" + path.relative_to(folder).as_posix()
        lines = text.splitlines()
        classes = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
        for node in chain(tree.body, *classes):
            if isinstance(node, ast.FunctionDef):
                yield from function_tasks(page, lines, node)
        if len(text) > 200:
            yield TrainingDocument("code", page, text)


def function_tasks(page: str, lines: list[str], node: ast.FunctionDef) -> Iterator[TrainingDocument]:
    """Yield a task to write a documented function and, if the function is short, a task to add its docstring."""
    doc = ast.get_docstring(node)
    first = node.body[0]
    if not doc or len(node.body) < 2 or first.end_lineno is None or node.end_lineno is None:
        return
    indent = node.col_offset
    source = [line[indent:] for line in lines[node.lineno - 1 : node.end_lineno]]
    whole = "\n".join(source)
    if not 80 <= len(whole) <= MAX_ANSWER_CHARACTERS:
        return
    summary = doc.split("\n\n")[0].replace("\n", " ")
    name = f"{page}#{node.name}:{node.lineno}"
    answer = f"```python\n{whole}\n```"
    yield TrainingDocument("write", name, answer, f"Write a Python function `{node.name}`. {summary}")
    if len(whole) <= MAX_ANSWER_CHARACTERS // 2:
        bare = "\n".join(source[: first.lineno - node.lineno] + source[first.end_lineno - node.lineno + 1 :])
        yield TrainingDocument("edit", name, answer, f"Add a docstring to this function.\n\n```python\n{bare}\n```")


def stable_hash(text: str) -> int:
    """Return a hash that is the same on every machine and in every run, unlike ``hash``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


KINDS = ("math", "explain", "write", "edit")
"""Kinds of documents with a question."""
INDEX_KINDS = ("math", "explain", "write")
"""Kinds of documents in the corpus index. Answers of kind ``edit`` repeat ``write``; prose and code help less."""
TOKENS_PER_KIND = 200_000
LICENCE_WORDS = re.compile("copyright|licen[cs]e", re.IGNORECASE)
"""Source files that match may have other license terms than the library, so the index omits them."""


def prompts(everything: Iterable[TrainingDocument], per_kind: int = 50) -> Iterator[dict[str, Any]]:
    """Yield held-out prompts, alternating between kinds so that the first prompts cover every kind."""
    held_out = sorted((d for d in everything if d.held_out and d.question), key=lambda d: stable_hash(d.name))
    once = {document.question: document for document in held_out}
    for row, document in in_turn(once.values(), per_kind):
        yield row | {"reference": document.answer, "from": document.name}


def questions(everything: Sequence[TrainingDocument], per_kind: int) -> Iterator[dict[str, Any]]:
    """Yield distinct training questions, alternating between kinds; each kind is ordered by hash."""
    held_out = {document.question for document in everything if document.held_out}
    learned = {d.question: d for d in everything if d.question and not d.held_out and d.question not in held_out}
    # Sorting by name would put the two tasks of a function next to each other.
    ordered = sorted(learned.values(), key=lambda document: stable_hash(document.question))
    yield from (row for row, _ in in_turn(ordered, per_kind))


def in_turn(ordered: Collection[TrainingDocument], per_kind: int) -> Iterator[tuple[dict[str, Any], TrainingDocument]]:
    """Yield rows of a prompts file, a document of each kind in turn, with their documents."""
    kinds = ([d for d in ordered if d.kind == kind][:per_kind] for kind in KINDS)
    for number, row in enumerate(zip(*kinds, strict=False), start=1):
        for document in row:
            message = {"role": "user", "content": document.question}
            yield {"id": f"{document.kind}-{number:03}", "category": document.kind, "messages": [message]}, document


def index_documents(
    everything: Sequence[TrainingDocument], tokenizer: Any, per_kind: int = TOKENS_PER_KIND
) -> Iterator[TrainingDocument]:
    """Yield whole documents that are not held out, up to ``per_kind`` tokens of each kind, chosen by hash."""
    left_out = {d.page for d in everything if d.held_out or (d.kind == "code" and LICENCE_WORDS.search(d.answer))}
    learned = sorted((d for d in everything if d.page not in left_out), key=lambda d: stable_hash(d.name))
    for kind in INDEX_KINDS:
        left = per_kind
        for document in {d.answer: d for d in learned if d.kind == kind}.values():
            size = len(tokenizer(document.answer, add_special_tokens=False, verbose=False)["input_ids"])
            if size <= left:
                left -= size
                yield document


def main() -> None:
    parser = arguments_of_texts(__doc__)
    parser.add_argument("what", choices=("prompts", "questions", "documents"))
    parser.add_argument("--per-kind", type=int, default=300, help="number of questions")
    options = parser.parse_args()
    everything = list(documents(options.gsm8k, options.docs))
    if options.what == "documents":
        rows = [{"text": d.answer} for d in index_documents(everything, load_tokenizer(ModelConfig()))]
    else:
        rows = list(prompts(everything) if options.what == "prompts" else questions(everything, options.per_kind))
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    options.out.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
