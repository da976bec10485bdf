"""``hdtool replay``: measure each method's acceptance on recorded conversations, without running the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import Option, quiet_libraries
from hdtool.cli.options_from_settings import only, without
from hdtool.data.errors import OptionError, RecordError
from hdtool.data.input_files import find_inputs
from hdtool.data.notes import tell
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import is_json_lines_with
from hdtool.data.progress import with_progress
from hdtool.data.record_counts import Tally
from hdtool.data.texts_and_traces import Trace, read_traces
from hdtool.runtime.settings.building import BuildConfig
from hdtool.runtime.settings.decoding import READ_LOGITS, TAKE_HISTORY, ReplayConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.settings.settings_base import Panel, Use

if TYPE_CHECKING:
    from hdtool.builders.evaluation.recording import RecordedTurn, TurnReader
    from hdtool.builders.evaluation.replay import ReplayResult
    from hdtool.runtime.stores.store_set import StoreSet

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
"""Keys of a ``--steps`` line, by which an existing file is recognized before it is replaced."""
NO_LOOKAHEAD = "hd-paper is replayed without its lookahead branch, which needs the model"

Traces = Annotated[
    list[Path],
    Option(
        Panel.INPUT, "Recordings, repeatable. Output of collect, chats, or any other log with answers of the model."
    ),
]
Questions = Annotated[Path | None, Option(Panel.INPUT, "Questions of Spec-Bench answer files: question.jsonl.")]
Warm = Annotated[
    list[Path] | None,
    Option(
        Panel.INPUT,
        "Recordings that fill the history, repeatable. They are replayed before and not counted.",
        use=Use(methods=TAKE_HISTORY),
    ),
]
Cost = Annotated[
    str | None,
    Option(
        Panel.MEASUREMENT,
        "Time of a forward pass, to predict tokens per second. Milliseconds by draft tokens, as in "
        "0:20.1,8:20.9,32:24, or the cost.json or folder of bench-cost or of a set-up.",
    ),
]
Steps = Annotated[
    Path | None, Option(Panel.OUTPUT, "File for the tokens of each step. It gets one JSON line per method and turn.")
]
MODEL_OPTIONS = only("model", "gguf_file", "trust_remote_code").described(model=options.ANSWERING_MODEL_HELP)


def replay(
    *,
    traces: Traces,
    questions: Questions = None,
    warm: Warm = None,
    config: ReplayConfig,
    reading: Annotated[BuildConfig, only("max_bad_fraction")],
    chat: options.Chat = None,
    loading: Annotated[ModelConfig, MODEL_OPTIONS.as_argument()],
    stores: Annotated[StoresConfig, without("namespace")],
    cost: Cost = None,
    steps: Steps = None,
    report: options.Report = None,
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Estimate gains offline from recorded answers.

    A recorded answer shows of every draft which tokens the model would have accepted, so no model is needed. Methods
    that draft from logits need recordings of collect --rankings; hd-paper is replayed without its lookahead branch. The
    history grows with the recordings, in their order.
    """
    from hdtool.builders.evaluation.parallel_replay import replay as replayed
    from hdtool.builders.evaluation.recording import TurnReader, open_stores
    from hdtool.builders.evaluation.replay import ReplayMethod
    from hdtool.builders.evaluation.report.pages import check_report_folder, replay_page
    from hdtool.cli.result_tables import command_line, replay_record, replay_table, write_report
    from hdtool.runtime.budget.cost_curve import CostCurve

    files, warm_files = _trace_files(traces), _trace_files(warm or [])
    _refuse_repeated(files, warm_files, config)
    curve = CostCurve.given(cost) if cost is not None else None
    if steps:
        _steps_file(steps).check()
    recorded = Recordings(files, reading.max_bad_fraction, questions, config.limit)
    before = Recordings(warm_files, reading.max_bad_fraction)
    quiet_libraries(quiet=quiet)
    if report:
        check_report_folder(report)
    reader = TurnReader.of_model(loading, chat)
    store_set = open_stores(loading, reader.tokenizer, stores)
    methods = _methods(config, store_set, [*recorded.traces, *before.traces])
    contenders = [ReplayMethod(name, config.decoding(name), curve) for name in methods]
    conversations, earlier = recorded.turns(reader), before.turns(reader)
    if not conversations:
        raise RecordError(
            f"no conversation of {', '.join(map(str, traces))} can be replayed: name others, or use --raw"
        )
    results = replayed(contenders, conversations, store_set, workers=config.workers, warm=earlier)
    if steps:
        _write_steps(steps, results)
    shown = results, curve, [str(path) for path in warm or ()]
    print(json.dumps(replay_record(*shown), ensure_ascii=False) if as_json else replay_table(*shown))
    if report:
        page = replay_page(*shown, store_set, config.draft_tokens, recorded.questions, reader.tokenizer, command_line())
        write_report(report, page)


class Recordings:
    """Recorded conversations with answers, read from files; those left out are reported on standard error."""

    def __init__(
        self, files: list[Path], max_bad_fraction: float, questions: Path | None = None, limit: int | None = None
    ) -> None:
        self._tally, self._max_bad_fraction = Tally(), max_bad_fraction
        read = read_traces(files, questions, tolerance=max_bad_fraction, tally=self._tally)[:limit] if files else []
        self.traces = [trace for trace in read if trace.answers]
        if lacking := len(read) - len(self.traces):
            tell(f"left out: {lacking} of {len(read)} conversations, which hold no answer")

    @property
    def questions(self) -> list[str]:
        """Text of the message before each answer."""
        return [one.messages[answer.message_index - 1]["content"] for one in self.traces for answer in one.answers]

    def turns(self, reader: TurnReader) -> list[list[RecordedTurn]]:
        """Return each replayable conversation's turns, dropping the other traces; raise RecordError for too many."""
        from hdtool.cli.store_output import print_left_out

        usable = list(reader.usable(with_progress(self.traces, "conversations"), self._tally)) if self.traces else []
        print_left_out(self._tally, self._max_bad_fraction)
        self.traces = [trace for trace, _ in usable]
        return [turns for _, turns in usable]


def _methods(config: ReplayConfig, store_set: StoreSet, traces: list[Trace]) -> tuple[str, ...]:
    """Return the methods to replay, and print what they draft from; raise OptionError if one needs missing logits."""
    ranked = all(answer.rankings for trace in traces for answer in trace.answers)
    methods = config.methods_with(corpus=store_set.corpus is not None, rankings=ranked)
    reading = [name for name in methods if name in READ_LOGITS]
    if reading and not ranked:
        raise OptionError(
            f"method {reading[0]} drafts from the model's logits, which these recordings lack: record them with "
            "hdtool collect --rankings 61"
        )
    tell(f"drafting from {store_set}")
    if "hd-paper" in methods:
        tell(NO_LOOKAHEAD)
    return methods


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


def _same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:  # one of the files does not exist
        return first == second


def _steps_file(path: Path) -> OutputFile:
    advice = "choose another --steps, or move it away"
    return OutputFile(path, "a file of replay --steps", is_json_lines_with(STEPS_KEYS), RecordError, advice)


def _write_steps(path: Path, results: Mapping[str, ReplayResult]) -> None:
    from hdtool.cli.result_tables import turn_record

    rows = (turn_record(result, turn) for result in results.values() for turn in result.turns)
    _steps_file(path).write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
