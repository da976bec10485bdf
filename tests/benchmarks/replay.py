"""What drafting from recorded answers would have saved, and what it costs, without running the model.

``python -m tests.benchmarks.replay --model NAME --traces FILE --generations FILE --corpus FILE`` builds the
stores of the tokenizer of ``NAME`` in a temporary folder (``--stores FOLDER`` keeps them and finds them
again), then lets drafters guess at greedy answers that were recorded.

Conventions: an answer's last token is the end of the turn and counts; the prompt's own forward pass is a
step and brings one token, as in the loop; a drafter lives through all conversations and is told of each
turn with its whole prompt. Even conversations are those that settings were tuned on, odd ones were held out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hdtool.builders.corpus_index import build_corpus_index
from hdtool.builders.model_store import build_model_store
from hdtool.builders.progress import bar
from hdtool.builders.tokenize import tokenized
from hdtool.data.records import Reading
from hdtool.data.store import TokenizerMark
from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget import FixedBudget
from hdtool.runtime.config import ModelConfig, PaperConfig
from hdtool.runtime.corpus_index import CorpusIndex
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.hierarchy import Hierarchy
from hdtool.runtime.load import load_tokenizer
from hdtool.runtime.masks import FULL, Reach, tree_mask
from hdtool.runtime.model_store import ModelStore
from hdtool.runtime.paper import PaperDrafter
from hdtool.runtime.sources.corpus import CorpusDrafter
from hdtool.runtime.sources.prompt_lookup import PromptLookup
from hdtool.runtime.surroundings import machine
from hdtool.runtime.tree import ROOT, DraftTree

WARM_UP = 100
"""Steps whose times are left out: the first ones compile."""
NO_LOGITS = torch.empty(0)


@dataclass
class Turn:
    """One recorded answer."""

    conversation: int
    category: str
    prompt: list[int]
    answer: list[int]


@dataclass
class Played:
    """What became of each turn, and how long each draft took."""

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    nodes: int = 0
    draft: list[float] = field(default_factory=list)
    with_mask: list[float] = field(default_factory=list)
    observe: list[float] = field(default_factory=list)

    def tokens_per_step(self, chosen: Sequence[bool]) -> float:
        of = np.array(chosen)
        return float(np.array(self.tokens)[of].sum() / np.array(self.steps)[of].sum())


def read_turns(path: Path, tokenizer: Any) -> list[Turn]:
    """The turns of recorded conversations, as the chat template renders them."""
    end = tokenizer.eos_token_id
    turns = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        for turn in range(0, len(row["messages"]), 2):
            asked, whole = (
                tokenizer(
                    tokenizer.apply_chat_template(
                        row["messages"][: turn + said], add_generation_prompt=said == 1, tokenize=False
                    ),
                    add_special_tokens=False,
                )["input_ids"]
                for said in (1, 2)
            )
            assert whole[: len(asked)] == asked, f"conversation {number} does not continue its own prompt"
            answer = whole[len(asked) :]
            while answer and answer[-1] == end:
                answer.pop()
            turns.append(Turn(number, row.get("category", ""), asked, [*answer, end]))
    return turns


def follow(tree: DraftTree, truth: Sequence[int]) -> Accepted:
    """What the target would have taken of a tree: the truth, as far as the tree holds it, and one token more."""
    path: list[int] = []
    node = ROOT
    for place, token in enumerate(truth):
        child = tree.child(node, token)
        if child is None or place == len(truth) - 1:
            break
        path.append(child)
        node = child
    return Accepted(path, list(truth[: len(path) + 1]))


def play(drafter: Drafter, turns: Sequence[Turn]) -> Played:
    """Let a drafter guess at recorded answers."""
    played, clock = Played(), time.perf_counter
    reaches, device = [Reach(FULL)], torch.device("cpu")
    for turn in turns:
        drafter.begin(turn.prompt)
        context = [*turn.prompt, turn.answer[0]]
        drafter.observe(Accepted([], turn.answer[:1]), NO_LOGITS)
        done, steps = 1, 1
        while done < len(turn.answer):
            started = clock()
            tree = drafter.draft(context)
            drafted = clock()
            tree_mask(tree, len(context) - 1, reaches, torch.float32, device)
            (len(context) - 1 + tree.depths).tolist()
            masked = clock()
            accepted = follow(tree, turn.answer[done:])
            before = clock()
            drafter.observe(accepted, NO_LOGITS)
            observed = clock()
            played.draft.append(drafted - started)
            played.with_mask.append(masked - started)
            played.observe.append(observed - before)
            played.nodes += len(tree)
            context += accepted.tokens
            done += len(accepted.tokens)
            steps += 1
        played.tokens.append(len(turn.answer))
        played.steps.append(steps)
    return played


def report(name: str, played: Played, turns: Sequence[Turn]) -> str:
    """A row of the table."""
    even = [turn.conversation % 2 == 0 for turn in turns]
    shares = ([True] * len(turns), even, [not one for one in even])
    rates = " | ".join(f"{played.tokens_per_step(chosen):.3f}" for chosen in shares)
    times = " | ".join(_spread(seconds) for seconds in (played.draft, played.with_mask, played.observe))
    nodes = played.nodes / max(1, len(played.draft))
    return f"| {name} | {rates} | {nodes:.1f} | {times} |"


def _spread(seconds: Sequence[float]) -> str:
    low, high = np.percentile(np.array(seconds[WARM_UP:] or seconds) * 1e6, (50, 99))
    return f"{low:.0f} / {high:.0f}"


HEADER = (
    "| sources | all | even | odd | nodes a step | draft, µs p50 / p99 | with mask and positions | observe |\n"
    "|---|---|---|---|---|---|---|---|"
)


@contextmanager
def stores_of(options: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[ModelStore, CorpusIndex]]:
    """The stores of the files that were named, built unless they are kept somewhere."""
    mark = TokenizerMark.of(tokenizer)
    with tempfile.TemporaryDirectory() as passing:
        place = options.stores or Path(passing)
        for folder, file, answers_only, build in (
            (place / "model", options.generations, True, build_model_store),
            (place / "corpus", options.corpus, False, build_corpus_index),
        ):
            if not (folder / "manifest.json").exists():
                reading = Reading([file], answers_only=answers_only)
                with bar(1, "", quiet=True) as shown:
                    build(folder, tokenized(reading, tokenizer, shown), mark, reading.sources)
        yield ModelStore(place / "model", mark), CorpusIndex(place / "corpus", mark)


def peers(model: ModelStore, corpus: CorpusIndex) -> dict[str, Drafter]:
    """The paper's policy with its databases, prompt lookup, and the corpus index alone as REST asks it."""
    others: dict[str, Drafter] = {}
    for order in ("C", "CM", "CS", "CMS"):
        config = PaperConfig(order=order, lookahead=False)
        others[f"hd-paper, {'+'.join(order)}"] = PaperDrafter(config, model_store=model, corpus_index=corpus)
    return others | {"pld": PromptLookup(), "rest": CorpusDrafter(corpus)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="whose tokenizer and chat template")
    for name in ("--traces", "--generations", "--corpus"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--stores", type=Path, help="a folder to keep the stores in")
    parser.add_argument("--sources", nargs="+", default=["C", "M", "S", "C+M", "C+S", "M+S", "C+M+S"])
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64])
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(ModelConfig(options.model))
    turns = read_turns(options.traces, tokenizer)
    print(machine() + "\n")
    with stores_of(options, tokenizer) as (model, corpus):
        for budget in options.budgets:
            print(f"\n{budget} nodes:\n\n{HEADER}")
            for sources in options.sources:
                names = sources.split("+")
                drafter = Hierarchy(
                    model if "M" in names else None,
                    corpus if "S" in names else None,
                    context="C" in names,
                    budget=FixedBudget(budget),
                )
                print(report(sources, play(drafter, turns), turns), flush=True)
        print(f"\nOthers, with budgets of their own, without lookahead:\n\n{HEADER}")
        for name, other in peers(model, corpus).items():
            print(report(name, play(other, turns), turns), flush=True)


if __name__ == "__main__":
    main()
