"""The ``hdtool`` command: its sub-commands, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from hdtool.cli import demo, generate
from hdtool.data.errors import HdtoolError

INTERRUPTED = 130
BROKEN_PIPE = 141
"""What a shell reports for a program ended by Ctrl-C, and by a reader that went away."""

app = typer.Typer(
    name="hdtool",
    help="Make your own language model answer faster, losslessly, by drafting from databases.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: it opens in a third of the time and reads the same in docs and logs
)
app.command("generate")(generate.generate)
app.command("demo")(demo.demo)


@app.callback()
def hdtool(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        typer.echo(f"hdtool {version('hdtool')}")
        raise typer.Exit


def main() -> None:
    """Run the command line; every outcome leaves through here."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code: 0 done, 1 an error that the user can mend, 2 bad usage, 130 interrupted."""
    try:
        outcome = app(arguments, prog_name="hdtool", standalone_mode=False)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except HdtoolError as error:
        return _complain(str(error), error.exit_code)
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
