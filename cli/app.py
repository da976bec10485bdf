"""The ``hdtool`` command: its sub-commands, and the one place where errors become exit codes."""

from __future__ import annotations

import io
import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from hdtool.cli import (
    bench,
    build_corpus_db,
    build_model_db,
    collect,
    demo,
    edit_store,
    generate,
    inspect,
    replay,
    serve,
    train_heads,
    verify,
)
from hdtool.cli.options import INTERRUPTED
from hdtool.data.errors import HdtoolError, OptionError

SEVERAL = "TORCHELASTIC_RUN_ID"
"""In the environment of processes that torchrun started."""
BROKEN_PIPE = 141
"""The exit code that shells use for a program whose reader went away."""

app = typer.Typer(
    name="hdtool",
    help="Make your own language model answer faster, losslessly, by drafting from databases.",
    rich_markup_mode=None,  # plain help: it opens in a third of the time and reads the same in docs and logs
)
app.command("generate")(generate.generate)
app.command("build-model-db")(build_model_db.build_model_db)
app.command("build-corpus-db")(build_corpus_db.build_corpus_db)
app.command("collect")(collect.collect)
app.command("inspect")(inspect.inspect)
app.command("merge")(edit_store.merge)
app.command("add")(edit_store.add)
app.command("drop")(edit_store.drop)
app.command("train-heads")(train_heads.train_heads)
app.command("replay")(replay.replay)
app.command("verify")(verify.verify)
app.command("serve", context_settings=serve.PASSED_ON)(serve.serve)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)


def _show_version(wanted: bool) -> None:
    if wanted:
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
    """Run the command line; every outcome leaves through here."""
    sys.exit(_run_together(sys.argv[1:]) if _several() else run(sys.argv[1:]))


def _several() -> bool:
    return SEVERAL in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def _run_together(arguments: list[str]) -> int:
    """One of several processes: the first runs the command, the others compute with it."""
    if arguments[:1] != ["generate"]:
        message = f"torchrun goes with hdtool generate (found: {' '.join(arguments[:1]) or 'no command'}): run it alone"
        return _complain(message, OptionError.exit_code) if os.environ["RANK"] == "0" else 0

    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.runtime.model.load import load_part
    from hdtool.runtime.model.tensor_parallel import follow, leading

    if os.environ["RANK"] != "0":
        quiet_libraries()
        return follow(load_part)
    with leading():
        return run(arguments)


def run(arguments: list[str]) -> int:
    """Run one command. The exit code: 0 done, 1 an error that the user can mend, 2 bad usage, 130 interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter still shows the others
    try:
        # Not app(...): that would turn a broken pipe and Ctrl-C into codes of its own.
        command = typer.main.get_command(app)
        with command.make_context("hdtool", arguments or ["--help"]) as context:
            outcome = command.invoke(context)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except HdtoolError as error:
        return _complain(str(error), error.exit_code)
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Nobody reads any more. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        # typer's usage errors; typer carries its own copy of click, so they are known by what they offer.
        message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
        if message is None or not isinstance(code, int):
            raise
        return _complain(f"{message()} (hdtool --help lists what there is)", code)


def _complain(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
