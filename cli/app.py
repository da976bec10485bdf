"""Define the ``hdtool`` command with its subcommands, and map errors to exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Annotated, Any

import typer
import typer.core

from hdtool.cli import bench, build, chat, convert, demo, doctor, generate, replay, serve, setup, stores, verify
from hdtool.cli.command import Command, quiet_libraries, restore_hyphens
from hdtool.cli.inspect import inspect
from hdtool.cli.options_from_settings import INTERRUPTED_EXIT, with_options
from hdtool.cli.terminal import guard_terminal
from hdtool.cli.unknown_words import unknown_command, usage_message
from hdtool.data.errors import HdtoolError, OptionError, command_for_missing
from hdtool.data.isolated_processes import isolated_children, refuse_numba_settings
from hdtool.data.notes import tell
from hdtool.runtime.model.lean_imports import import_leanly

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets for the processes that it starts."""
BROKEN_PIPE_EXIT = 141
"""Exit code that shells use for a program whose reader closed the pipe."""
COMPLETION_VARIABLE = "_HDTOOL_COMPLETE"
"""Environment variable that a shell's completion script sets."""

VLLM_COMMAND = "serve-vllm"
"""Hidden command that runs ``serve --engine vllm``."""


class Commands(typer.core.TyperGroup):
    """Command group with sections, advice on unknown commands, and a hidden command for ``serve --engine vllm``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if serve.uses_vllm(args):
            return "serve", self.get_command(ctx, VLLM_COMMAND), args[1:]
        if args and args[0] not in self.commands and not ctx.resilient_parsing:
            shown = [name for name, command in self.commands.items() if not command.hidden]
            raise OptionError(unknown_command(args[0], shown))
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: Any) -> str:
        return restore_hyphens(super().get_help(ctx))

    # typer shows panels only with rich, which is switched off.
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = formatter.width - 6 - max(map(len, self.commands))
        for group in COMMAND_SECTIONS:
            listed = [
                one
                for one in self.commands.values()
                if getattr(one, "rich_help_panel", None) == group and not one.hidden
            ]
            with formatter.section(group):
                formatter.write_dl([(one.name, one.get_short_help_str(width)) for one in listed])


app = typer.Typer(
    name="hdtool",
    cls=Commands,
    help="Speed up your language model losslessly by drafting from databases.",
    rich_markup_mode=None,  # rich would triple the time of --help
)


COMMAND_SECTIONS: dict[str, dict[Callable[..., Any], tuple[str, str]]] = {
    "Start here": {
        demo.demo: ("hdtool demo", "hdtool demo MODEL.gguf --method pld --num-prompts 8"),
        chat.chat: ("hdtool chat MODEL", "hdtool chat MODEL --system 'Answer in one sentence.' --temperature 0.7"),
        generate.generate: (
            'hdtool generate MODEL "Write a quick sort."',
            "hdtool generate MODEL --prompts prompts.jsonl --json > answers.jsonl",
        ),
        setup.setup: (
            "hdtool setup MODEL --logs 'logs/*.jsonl'",
            "hdtool setup MODEL --logs logs.jsonl --corpus docs/ --dry-run",
        ),
        doctor.doctor: ("hdtool doctor", "hdtool doctor MODEL --json"),
    },
    "Serving": {
        serve.serve: (
            "hdtool serve MODEL",
            "hdtool serve MODEL --port 8000 --api-key-file keys.txt --batch-size 4",
        ),
        serve.serve_vllm: (
            "hdtool serve MODEL --engine vllm --port 8000",
            "hdtool serve MODEL --engine vllm --served-model-name tenant-a --min-draft-prob 0.3 --dry-run",
        ),
        convert.export: (
            "hdtool export MODEL --out drafting-model",
            "hdtool export MODEL --to sglang --out corpus.jsonl --model-db stores/model",
        ),
    },
    "Stores": {
        build.build_model_db: (
            "hdtool build-model-db MODEL --from generations.jsonl",
            "hdtool build-model-db MODEL --from 'logs/*.jsonl.gz' --out stores/model --replace",
        ),
        build.build_corpus_db: (
            "hdtool build-corpus-db --model MODEL sharegpt.json",
            "hdtool build-corpus-db --model MODEL docs/ code.parquet --out stores/corpus",
        ),
        generate.collect: (
            "hdtool collect MODEL --prompts prompts.jsonl --out answers.jsonl",
            "hdtool collect MODEL --prompts prompts.jsonl --out answers.jsonl --batch-size 8",
        ),
        convert.convert: (
            "hdtool convert logs.db requests.jsonl.gz --out chats.jsonl",
            "hdtool convert batch.jsonl batch_output.jsonl server.log --out chats.jsonl.zst",
        ),
        stores.stores: ("hdtool stores", "hdtool stores remove model-1a2b3c4d"),
        inspect: (
            "hdtool inspect stores/model --latency",
            'hdtool inspect stores/corpus --model MODEL --after "for i in"',
        ),
        stores.add: (
            "hdtool add stores/corpus new.jsonl --model MODEL",
            "hdtool add stores/model answers.jsonl --model MODEL",
        ),
        stores.drop: (
            "hdtool drop stores/corpus --source sharegpt.json",
            "hdtool drop stores/model --source 1a2b3c4d",
        ),
        stores.merge: (
            "hdtool merge stores/a stores/b --out stores/both",
            "hdtool merge stores/a stores/b --out stores/a --json",
        ),
    },
    "Measuring": {
        bench.bench: (
            "hdtool bench MODEL --num-prompts 24 --threads 1",
            "hdtool bench MODEL --methods ar,pld,hd --temperature 0.7 --report report",
        ),
        verify.verify: (
            "hdtool verify MODEL --dtype float32",
            "hdtool verify MODEL --prompts prompts.jsonl --method hd+amphista --num-prompts 50",
        ),
        replay.replay: (
            "hdtool replay MODEL --traces answers.jsonl --methods pld,hd",
            "hdtool replay MODEL --traces answers.jsonl --cost bench/cost.json --report report",
        ),
        bench.bench_cost: (
            "hdtool bench-cost MODEL",
            "hdtool bench-cost --shape llama-7b --dtype bfloat16 --contexts 128,1024",
        ),
        bench.bench_shape: (
            "hdtool bench-shape llama-7b --model MODEL --traces answers.jsonl",
            "hdtool bench-shape config.json --model MODEL --traces answers.jsonl --methods generate,ar,hd",
        ),
    },
    "Training": {
        build.train_heads: (
            "hdtool train-heads MODEL --from answers.jsonl --out heads",
            "hdtool train-heads MODEL --from answers.jsonl --out hydra --kind hydra++ --num-heads 5",
        ),
    },
}
"""Commands by section of ``hdtool --help``, in the order shown, each with two examples."""
for group, commands in COMMAND_SECTIONS.items():
    for function, examples in commands.items():
        app.command(
            function.__name__.replace("_", "-"),
            cls=Command,
            epilog="\n".join(f"  {line}" for line in examples),
            context_settings=serve.PASS_UNKNOWN_OPTIONS if function is serve.serve_vllm else None,
            hidden=function is serve.serve_vllm,
            rich_help_panel=group,
        )(with_options(function))


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"hdtool {metadata.version('hdtool')}")
        raise typer.Exit


@app.callback()
def hdtool(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command that the process was started with, and exit with the command's exit code."""
    guard_terminal()
    if COMPLETION_VARIABLE in os.environ:
        app(prog_name="hdtool")
    several = TORCHRUN_VARIABLE in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1
    # vLLM needs the parts of torch that ``import_leanly`` leaves out.
    if not several and sys.argv[1:2] != [VLLM_COMMAND] and not serve.uses_vllm(sys.argv[1:]):
        import_leanly()
    with isolated_children():
        sys.exit(_run_together(sys.argv[1:]) if several else run(sys.argv[1:]))


def _run_together(arguments: list[str]) -> int:
    """Run ``generate`` under torchrun: rank 0 runs the command, and the other ranks compute their parts of the model.

    Return the exit code. Any command other than ``generate`` is an error.
    """
    if arguments[:1] != ["generate"]:
        command = " ".join(arguments[:1]) or "no command"
        message = f"torchrun works with hdtool generate only, got {command}: run it without torchrun"
        return _report(message, OptionError.exit_code) if os.environ["RANK"] == "0" else 0

    from hdtool.runtime.target.load import load_part
    from hdtool.runtime.target.tensor_parallel import follow, leading

    if os.environ["RANK"] != "0":
        quiet_libraries()
        return follow(load_part)
    with leading():
        return run(arguments)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code.

    0 is success, 1 a failed check or an error that the user can fix, 2 wrong usage, 130 an interrupt, 141 a closed
    pipe.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack some characters
    try:
        refuse_numba_settings()
        # app(...) would map a broken pipe and Ctrl-C to other exit codes.
        command = _command()
        with command.make_context("hdtool", arguments or ["--help"]) as context:
            outcome = command.invoke(context)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except HdtoolError as error:
        return _report(str(error), error.exit_code)
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _report("interrupted", INTERRUPTED_EXIT)
    except BrokenPipeError:
        # Without the redirection, Python would report the closed pipe again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_EXIT
    except ModuleNotFoundError as error:  # an older installation, or a package was removed
        if (command := command_for_missing(error.name)) is None:
            raise
        return _report(f"{error}: {command}", HdtoolError.exit_code)
    except Exception as error:
        # typer has its own copy of click, whose usage errors are recognised by their attributes.
        if not hasattr(error, "format_message") or not isinstance(code := getattr(error, "exit_code", None), int):
            raise
        return _report(usage_message(error), code)


@cache
def _command() -> Any:
    """Return typer's command, cached because building the command takes longer than parsing the arguments."""
    return typer.main.get_command(app)


def _report(message: str, code: int) -> int:
    tell(f"error: {' '.join(message.split())}")
    return code
