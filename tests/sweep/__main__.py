"""Check model types, print a line for each, and write the table of the docs."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.sweep.result import SAME, Result
from tests.sweep.types import every_type


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="types of models; all if none is named")
    parser.add_argument("--page", action="store_true", help="write the table into the page of model families")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")
    parser.add_argument("--no-capture", action="store_true", help="leave the simulated CUDA device out")
    given = parser.parse_args()
    if given.page and given.types:
        parser.error("--page writes the table of all types: name none")
    from tests.sweep.run import sweep, use_own_home

    results = []
    with TemporaryDirectory(prefix="hdtool-sweep-home-") as home:
        use_own_home(Path(home))
        for result in sweep(given.types or every_type(), captures=not given.no_capture):
            print(json.dumps(result.as_dict()) if given.json else result.line(), flush=True)
            results.append(result)
    if not given.json:
        print(summary(results))
    if given.page:
        from tests.sweep.page import write

        write(results)


def summary(results: list[Result]) -> str:
    """Count the types per verdict, and the types that pass each check."""
    verdicts = Counter(result.verdict for result in results)
    passed = Counter(name for result in results for name, found in result.checks.items() if found == SAME)
    lines = [f"{number:4} {verdict}" for verdict, number in verdicts.most_common()]
    return "\n".join(["", *lines, "", *(f"{number:4} {name}" for name, number in passed.items())])


if __name__ == "__main__":
    main()
