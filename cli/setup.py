"""``hdtool setup``: build stores from logs, measure their effect, and print a verdict."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import Option, quiet_libraries, require_model
from hdtool.cli.options_from_settings import without
from hdtool.data.errors import OptionError
from hdtool.data.input_files import find_inputs
from hdtool.data.notes import tell
from hdtool.data.progress import count_of
from hdtool.runtime.settings.building import SetupConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.settings_base import Panel, Settings, option_of

if TYPE_CHECKING:
    from hdtool.builders.setup.stages import SetupPlan, Stages
    from hdtool.builders.setup.work_folder import WorkFolder

UNKNOWN_FOLDER_NOTE = "hdtool's home, which names its folder after the weights once they are downloaded"


def setup(
    *,
    more_logs: Annotated[
        list[str] | None, typer.Argument(metavar="[FILES]...", help="More files of --logs, as a wildcard yields them.")
    ] = None,
    logs: Annotated[list[str], Option(Panel.INPUT, "Logged conversations. Files, folders or globs, repeatable.")],
    corpus: Annotated[
        list[str] | None, Option(Panel.INPUT, "Texts for a corpus index. Files, folders or globs, repeatable.")
    ] = None,
    chat: options.Chat = None,
    settings: SetupConfig,
    sampling: Annotated[SamplingConfig, without("stop")],
    named: Annotated[
        ModelConfig,
        without("device_map", "generation_config").described(model=options.REQUIRED_MODEL_HELP).as_argument(),
    ],
    replaced: Annotated[
        bool, Option(Panel.BUILD, "Replace the stores that this model has in hdtool's home.", "--replace")
    ] = False,
    dry_run: Annotated[
        bool,
        Option(Panel.OUTPUT, "Print what would be done and what is in the way, and stop. Reads the logs.", "--dry-run"),
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Build stores from logs and measure what they bring.

    Holds some conversations out, builds stores from the others, predicts the speed, answers held-out prompts with and
    without drafts, and prints a verdict. The same command continues an interrupted set-up.
    """
    require_model("setup", named.model)
    if corpus and more_logs:
        raise OptionError(
            f"{more_logs[0]} could belong to --logs or to --corpus: put quotes around patterns, as in --logs 'logs/*'"
        )
    log_files, corpus_files = find_inputs([*logs, *(more_logs or ())]), find_inputs(corpus or ())

    from hdtool.builders.setup.stages import SetupPlan, Stages
    from hdtool.builders.setup.verdict import Verdict
    from hdtool.builders.setup.work_folder import WorkFolder
    from hdtool.runtime.weights.checkpoint_identity import name_in_words

    quiet_libraries(quiet=quiet)
    plan = SetupPlan(log_files, corpus_files, named, settings, sampling, chat, replace=replaced)
    folder = WorkFolder(name_in_words(named.name), plan.identity, [str(path) for path in log_files])
    folder.load()
    stages = Stages(plan, folder)
    if dry_run:
        _show_plan(plan, stages, folder)
        stages.check()  # last, so that a store in the way hides nothing of the plan
        return
    stages.check()
    with folder.opened():
        numbers = {name: number for number, name in enumerate(stages.titles(), start=1)}

        def show(name: str) -> None:
            done = ", done before" if name in folder.stages else ""
            tell(f"{numbers[name]}/{len(numbers)} {stages.titles()[name]}{done}")

        stages.run(show)
        verdict = Verdict(named.name, folder.stages, (*_options(named), *_options(sampling)), sampling)
    print(json.dumps(verdict.to_json(), ensure_ascii=False) if as_json else "\n".join(verdict.lines()))
    tell(f"kept in {folder.path}: {folder.held_out.name} holds the conversations that no store has")


def _options(settings: Settings) -> tuple[str, ...]:
    """Return the command-line options for all ``settings`` that differ from their defaults, except ``--model``."""
    typed: list[str] = []
    for one in fields(settings):
        value = getattr(settings, one.name)
        if one.name != "model" and value != one.default:
            flag = f"--{option_of(one).replace('_', '-')}"
            switch = flag if value else flag.replace("--", "--no-", 1)
            typed += [switch] if isinstance(value, bool) else [flag, str(value)]
    return tuple(typed)


def _show_plan(plan: SetupPlan, stages: Stages, folder: WorkFolder) -> None:
    """Print what a run would do."""
    from hdtool.builders.setup.held_out_choice import choose_held_out

    openings = stages.openings()
    chosen = choose_held_out(openings, plan.config.held_out)
    count = sum(opening in chosen for opening in openings)
    read = f"{count_of(len(openings), 'conversation')} in {count_of(len(plan.logs), 'file')}"
    print(f"logs      {read}, {count:,} held out")
    for kind, (build_effect, place) in stages.planned_stores().items():
        print(f"{kind:<9} {build_effect} {place or UNKNOWN_FOLDER_NOTE}")
    print(f"work      {folder.path}")
    remaining = stages.remaining()
    for number, (name, title) in enumerate(stages.titles().items(), start=1):
        done = "" if name in remaining else ", done before"
        print(f"{number}/{len(stages.titles())}       {title}{done}")
