"""``hdtool replay``: measure each method's acceptance on recorded conversations, without running the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from hdtool.cli import options
from hdtool.cli.command import Option, quiet_libraries
from hdtool.cli.options import only, without
from hdtool.data.errors import OptionError, RecordError
from hdtool.data.input_files import find_inputs
from hdtool.data.output_files import OutputFile, is_json_lines_with
from hdtool.data.progress import Tally, progress_bar, with_progress
from hdtool.data.texts_and_traces import Trace, read_traces
from hdtool.runtime.config import METHODS, BuildConfig, ModelConfig, ReplayConfig, StoresConfig
from hdtool.runtime.config.settings import RARE, Panel

STEPS_KEYS = (
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
    "history",
    "warm_tokens",
)
"""Keys of a ``--steps`` line, by which an existing file is recognised before it is replaced."""
NO_LOOKAHEAD = "hd-paper is replayed without its lookahead branch, which needs the model"


def replay(
    *,
    traces: Annotated[
        list[Path],
        Option(
            Panel.INPUT, "Recordings, repeatable. Output of collect, chats, or any other log with answers of the model."
        ),
    ],
    questions: Annotated[
        Path | None, Option(Panel.INPUT, "Questions of Spec-Bench answer files: question.jsonl.")
    ] = None,
    warm: Annotated[
        list[Path] | None,
        Option(Panel.INPUT, "Recordings that fill the history, repeatable. They are replayed before and not counted."),
    ] = None,
    config: ReplayConfig,
    reading: Annotated[BuildConfig, only("max_bad_fraction")],
    chat: Annotated[
        bool | None,
        Option(
            Panel.INPUT,
            "Rebuild contexts by the chat template or as text. Default: chat if any.",
            "--chat/--raw",
            use=RARE,
        ),
    ] = None,
    loading: Annotated[
        ModelConfig,
        only("model", "gguf_file", "trust_remote_code").described(model=options.ANSWERING_MODEL_HELP).as_argument(),
    ],
    stores: Annotated[StoresConfig, without("namespace")],
    cost: Annotated[
        str | None,
        Option(
            Panel.MEASUREMENT,
            "Time of a forward pass, to predict tokens per second. Milliseconds by draft tokens, as in "
            "0:20.1,8:20.9,32:24, or the cost.json or folder of bench-cost or of a set-up.",
        ),
    ] = None,
    steps: Annotated[
        Path | None,
        Option(Panel.OUTPUT, "File for the tokens of each step. It gets one JSON line per method and turn."),
    ] = None,
    report: options.Report = None,
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Estimate gains offline from recorded answers.

    A recorded answer shows of every draft which tokens the model would have accepted, so no model is needed. Methods
    that draft from logits need recordings of collect --rankings; hd-paper is replayed without its lookahead branch. The
    history grows with the recordings, in their order.
    """
    from hdtool.builders.evaluation.recording import TurnReader
    from hdtool.builders.evaluation.replay import ReplayMethod
    from hdtool.builders.evaluation.report.ablations import Study
    from hdtool.builders.evaluation.report.pages import check_report_folder, replay_page
    from hdtool.builders.evaluation.worker_pool import replay as replayed, total_turns
    from hdtool.cli.result_tables import replay_record, replay_table, turn_record, write_report
    from hdtool.cli.store_output import print_left_out
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.stores.library import Library
    from hdtool.runtime.weights.checkpoint_identity import checkpoint_of

    _refuse_useless(warm, config)
    paths, paths_before = _trace_files(traces), _trace_files(warm or [])
    _refuse_repeated(paths, paths_before, config)
    curve = CostCurve.given(cost) if cost is not None else None
    if steps:
        _steps_file(steps).check()
    counted = Tally(), Tally()
    most_bad = reading.max_bad_fraction
    recorded = _traces_with_answers(read_traces(paths, questions, tolerance=most_bad, tally=counted[0])[: config.limit])
    before = _traces_with_answers(read_traces(paths_before, tolerance=most_bad, tally=counted[1])) if warm else []
    quiet_libraries(quiet=quiet)
    if report:
        check_report_folder(report)
    reader = TurnReader.of_model(loading, chat)
    store_set = Library(loading.name, reader.tokenizer, checkpoint_of(loading), stores).open()
    ranked = all(answer.rankings for trace in (*recorded, *before) for answer in trace.answers)
    chosen = config.methods_with(corpus=store_set.corpus is not None, rankings=ranked)
    _refuse_unranked(chosen, ranked=ranked)
    print(f"drafting from {store_set}", file=sys.stderr)
    if "hd-paper" in chosen:
        print(NO_LOOKAHEAD, file=sys.stderr)
    usable = list(reader.usable(with_progress(recorded, "conversations", quiet=quiet), counted[0]))
    conversations = [turns for _, turns in usable]
    warming = [turns for _, turns in reader.usable(before, counted[1])]
    for tally in counted:
        print_left_out(tally, most_bad)
    if not conversations:
        raise RecordError(
            f"no conversation of {', '.join(map(str, traces))} can be replayed: name others, or use --raw"
        )
    contenders = [ReplayMethod(name, config.decoding(name), curve) for name in chosen]
    with progress_bar(total_turns(contenders, conversations, warming), "turns", quiet=quiet) as progress:
        results = replayed(
            contenders, conversations, store_set, workers=config.workers, on_progress=progress.to, warm=warming
        )
    if steps:
        rows = (turn_record(result, turn) for result in results.values() for turn in result.turns)
        _steps_file(steps).write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    files = [str(path) for path in warm or ()]
    print(
        json.dumps(replay_record(results, curve, files), ensure_ascii=False)
        if as_json
        else replay_table(results, curve, files)
    )
    if report:
        study = Study(conversations, store_set, config.draft_tokens, config.workers, curve)
        page_of = partial(replay_page, study, results, curve, files)
        write_report(report, study, [trace for trace, _ in usable], reader.tokenizer, page_of, quiet=quiet)


def _trace_files(paths: list[Path]) -> list[Path]:
    """Expand file names, folders, globs and hub data sets to files, keeping duplicates."""
    return [path for name in paths for path in find_inputs([name])]


def _refuse_repeated(traces: list[Path], warm: list[Path], config: ReplayConfig) -> None:
    """Raise OptionError for files that would be replayed twice.

    A drafter would already know the recorded answers from its history or its weights, and the measured acceptance
    would be too high.
    """
    for number, path in enumerate(traces):
        if any(_same_file(path, warm_file) for warm_file in warm):
            raise OptionError(f"{path} is in --traces and in --warm, and its figures would be too high: name another")
        if config.history and any(_same_file(path, warm_file) for warm_file in traces[:number]):
            raise OptionError(f"{path} is given twice, and the history would hold its answers: name it once")


def _refuse_useless(warm: list[Path] | None, config: ReplayConfig) -> None:
    if warm and not any(METHODS[name].history for name in config.methods_with(corpus=True)):
        raise OptionError(
            f"--warm has no effect with method {', '.join(config.methods)}, which keeps nothing between conversations: "
            "leave it out"
        )


def _refuse_unranked(methods: Sequence[str], *, ranked: bool) -> None:
    reading = [name for name in methods if METHODS[name].logits]
    if reading and not ranked:
        raise OptionError(
            f"method {reading[0]} drafts from the model's logits, which these recordings lack: record them with "
            "hdtool collect --rankings 61"
        )


def _same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:  # one of the files does not exist
        return first == second


def _traces_with_answers(traces: list[Trace]) -> list[Trace]:
    """Return the traces that hold an answer, and print the number of traces that hold none."""
    answered = [trace for trace in traces if trace.answers]
    if lacking := len(traces) - len(answered):
        print(f"left out: {lacking} of {len(traces)} conversations, which hold no answer", file=sys.stderr)
    return answered


def _steps_file(path: Path) -> OutputFile:
    advice = "choose another --steps, or move it away"
    return OutputFile(path, "a file of replay --steps", is_json_lines_with(STEPS_KEYS), RecordError, advice)
