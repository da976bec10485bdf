"""Draws the draft tree of each step of an answer, with the source of each node; accepted nodes are marked.

python -m tests.benchmarks.draft_tree --model smollm2 --draft-tokens 8 --tokens 40
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hdtool.builders.evaluation.contenders import FreshDrafters
from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answering.answer_plan import plan_answer
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter, WrappedDrafter
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.session import decode_request
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import load
from tests.benchmarks.laboratory import parser_of


class DrawnTrees(WrappedDrafter):
    """Draws the trees of another drafter after their verification."""

    def __init__(self, drafter: Drafter, tokenizer: Any) -> None:
        super().__init__(drafter)
        self._tokenizer = tokenizer
        self._tree: DraftTree | None = None

    def draft(self, context: Sequence[int]) -> DraftTree:
        self._tree = tree = super().draft(context)
        return tree

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        if self._tree is not None:  # the pass over the prompt verifies none
            print(f"after {self._tokenizer.decode([self._tree.root])!r}:", *self._lines(self._tree, accepted), sep="\n")
        super().observe(accepted, verified)

    def _lines(self, tree: DraftTree, accepted: Accepted, parent: int = ROOT, depth: int = 1) -> Iterator[str]:
        for node in (node for node in range(len(tree)) if tree.parents[node] == parent):
            mark = "*" if node in accepted.path else " "
            text = f"{mark} {'  ' * depth}{self._tokenizer.decode([int(tree.tokens[node])])!r}"
            yield f"{text:40}{SourceId(int(tree.sources[node])).name.lower()}"
            yield from self._lines(tree, accepted, node, depth + 1)


def main() -> None:
    options = parser_of(__doc__, model="smollm2", draft_tokens=8, tokens=40, task=0).parse_args()
    loaded = load(ModelConfig(options.model))
    prompt = read_prompts(demo.TASKS)[options.task]
    config = DecodeConfig(draft_tokens=options.draft_tokens)
    drafter = DrawnTrees(FreshDrafters(loaded.target, loaded.store_opener().open())(config), loaded.tokenizer)
    ids = encode_conversation(loaded.tokenizer, prompt.messages)
    request = plan_answer(loaded, SamplingConfig(), ids, options.tokens).request(None, drafter)
    for _ in decode_request(loaded.target, request):
        pass


if __name__ == "__main__":
    main()
