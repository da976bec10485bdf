"""Training text of the demo model: worked problems, Python's documentation and Python's standard library.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

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


def demo_arguments(description: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser with the options that the scripts in this folder share; ``out`` is the help text of ``--out``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--docs", type=Path, default=DEFAULT_DOCS, help="Python's documentation as reStructuredText")
    parser.add_argument("--out", type=Path, required=True, help=out)
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


TEXT_START_TOKEN, USER_TOKEN, ASSISTANT_TOKEN, TURN_END_TOKEN = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is a separate token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[TEXT_START_TOKEN, TURN_END_TOKEN, USER_TOKEN, ASSISTANT_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    start = (TEXT_START_TOKEN, bpe.token_to_id(TEXT_START_TOKEN))
    bpe.post_processor = processors.TemplateProcessing(single=f"{TEXT_START_TOKEN} $A", special_tokens=[start])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=TEXT_START_TOKEN,
        eos_token=TURN_END_TOKEN,
        pad_token=TEXT_START_TOKEN,
        additional_special_tokens=[USER_TOKEN, ASSISTANT_TOKEN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )


def as_text(document: TrainingDocument) -> str:
    if not document.question:
        return TEXT_START_TOKEN + document.answer
    question = f"{USER_TOKEN}{document.question}{TURN_END_TOKEN}"
    return f"{TEXT_START_TOKEN}{question}{ASSISTANT_TOKEN}{document.answer}{TURN_END_TOKEN}"
