"""``hdtool replay``: what each method would have had accepted on recorded conversations, without the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hdtool.cli import options
from hdtool.data.errors import RecordError
from hdtool.runtime.config import FIXED_BUDGET, LARGEST_BUDGET, ModelConfig, ReplayConfig, StoresConfig

if TYPE_CHECKING:
    from hdtool.data.files.atomic_write import OutputFile
    from hdtool.data.traces import Trace
    from hdtool.runtime.evaluation.recorded_turns import RecordedTurn, TurnReader
    from hdtool.runtime.evaluation.replay_results import Played

TURN_KEYS = (
    "method",
    "conversation",
    "category",
    "turn",
    "prompt_tokens",
    "tokens",
    "steps",
    "accept_lengths",
    "nodes",
    "sources",
)
"""Of a line of ``--steps``, by which such a file is recognised."""
NO_LOOKAHEAD = "hd-paper is replayed without its lookahead branch, which needs the model"


def replay(
    traces: Annotated[
        list[Path],
        typer.Option(help="Recordings: chat JSONL, what collect writes, or Spec-Bench answers. Repeatable."),
    ],
    questions: Annotated[
        Path | None, typer.Option(help="The questions of Spec-Bench answer files, question.jsonl.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model that answered; only its tokenizer is read. Default: the embedded demo model."),
    ] = ModelConfig.model,
    methods: Annotated[
        list[str] | None,
        typer.Option(help="Methods, separated by commas. Default: all that need no logits and find their stores."),
    ] = None,
    model_db: options.ModelDb = StoresConfig.model_db,
    corpus_db: options.CorpusDb = StoresConfig.corpus_db,
    budget: Annotated[
        int | None,
        typer.Option(
            help=f"Draft nodes a step of hd and rest, 0 to {LARGEST_BUDGET}. Default: {FIXED_BUDGET}, or with --cost "
            "as many as pay."
        ),
    ] = ReplayConfig.budget,
    use: options.DatabasesInUse = ReplayConfig.use,
    order: options.Order = ReplayConfig.order,
    cost: Annotated[
        str | None,
        typer.Option(
            help="What a forward pass takes: milliseconds by draft nodes, as in 0:20.1,8:20.9,32:24, or a file of "
            "them. Predicts tokens per second."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Conversations to replay at most, the first ones.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Rebuild contexts by the chat template, or as text. Default: chat if any."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes. Default: one for each core, if there is enough to do for them.")
    ] = ReplayConfig.workers,
    steps: Annotated[
        Path | None, typer.Option(help="Write one JSON line for each method and turn: how many tokens each step got.")
    ] = None,
    report: options.Report = None,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Replay recorded conversations: what each method would have had accepted, without the model.

    A recorded answer tells of every draft whether the model would have taken it. Methods that need the model's
    logits cannot be replayed; hd-paper is, without its lookahead branch.
    """
    names = tuple(name.strip() for listed in methods or () for name in listed.split(","))
    config = ReplayConfig(names, budget, use, order, limit, workers)

    from hdtool.cli.output.replay_table import in_words, record
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.write_report import report_replay
    from hdtool.data.progress import bar
    from hdtool.data.traces import read_traces
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.evaluation.recorded_turns import TurnReader
    from hdtool.runtime.evaluation.replay import Contender
    from hdtool.runtime.evaluation.report.ablations import Study
    from hdtool.runtime.evaluation.report.write import prepare
    from hdtool.runtime.evaluation.worker_pool import replay as replayed
    from hdtool.runtime.model.load import load_stops, load_tokenizer
    from hdtool.runtime.stores.store_set import StoreSet

    curve = CostCurve.given(cost) if cost is not None else None
    if steps:
        _steps_file(steps).check()
    recorded = _answered(read_traces(traces, questions)[: config.limit])
    quiet_libraries()
    if report:
        prepare(report)
    asked = ModelConfig(model, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(asked)
    store_set = StoreSet.for_tokenizer(tokenizer, StoresConfig(model_db, corpus_db))
    chosen = config.methods_with(corpus=store_set.corpus is not None)
    print(f"drafting from {store_set}", file=sys.stderr)
    if "hd-paper" in chosen:
        print(NO_LOOKAHEAD, file=sys.stderr)
    reader = TurnReader(tokenizer, load_stops(asked, tokenizer), tokenizer.eos_token_id, chat)
    conversations = _turns(reader, recorded, quiet)
    contenders = [Contender(name, config.decoding(name), curve) for name in chosen]
    with bar(len(chosen) * sum(map(len, conversations)), "turns", quiet=quiet) as shown:
        played = replayed(contenders, conversations, store_set, workers=config.workers, told=shown.to)
    if steps:
        _write_steps(steps, played)
    print(json.dumps(record(played, curve), ensure_ascii=False) if as_json else in_words(played, curve))
    if report:
        study = Study(conversations, store_set, config.budget, config.workers)
        report_replay(report, study, recorded, tokenizer, played, curve, quiet=quiet)


def _answered(traces: list[Trace]) -> list[Trace]:
    """Those that hold an answer; how many do not is told."""
    kept = [trace for trace in traces if trace.answers]
    if lacking := len(traces) - len(kept):
        print(f"left out: {lacking} of {len(traces)} conversations, in which the model says nothing", file=sys.stderr)
    return kept


def _turns(reader: TurnReader, traces: list[Trace], quiet: bool) -> list[list[RecordedTurn]]:
    from hdtool.data.progress import bar

    conversations = []
    with bar(len(traces), "conversations", quiet=quiet) as shown:
        for trace in traces:
            conversations.append(reader.turns(trace))
            shown.advance()
    return conversations


def _steps_file(path: Path) -> OutputFile:
    from hdtool.data.files.atomic_write import OutputFile
    from hdtool.data.files.ownership import json_lines_with

    advice = "choose another --steps, or move it away"
    return OutputFile(path, "a file of replay --steps", json_lines_with(TURN_KEYS), RecordError, advice)


def _write_steps(path: Path, played: dict[str, Played]) -> None:
    from hdtool.cli.output.replay_table import turn_record

    with _steps_file(path).replaced() as stream:
        for name, one in played.items():
            for turn in one.turns:
                stream.write((json.dumps(turn_record(name, turn), ensure_ascii=False) + "\n").encode())
