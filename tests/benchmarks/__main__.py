"""Lists the benchmarks, or runs one: ``python -m tests.benchmarks [NAME [OPTIONS]]``."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH = 18


def benchmarks() -> dict[str, str]:
    """Return what each benchmark measures, by name: the first line of its docstring. Shared modules are skipped."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").split("\n")[0].split(": ``python")[0].rstrip(".")
        for name, text in texts.items()
        if not name.startswith("__") and 'if __name__ == "__main__"' in text
    }


def main() -> int:
    known = benchmarks()
    name, *options = sys.argv[1:] or [""]
    if name in known:
        sys.argv = [f"tests.benchmarks.{name}", *options]
        runpy.run_module(f"tests.benchmarks.{name}", run_name="__main__", alter_sys=True)
        return 0
    if name and name not in ("-h", "--help"):
        print(f"error: no benchmark is named {name}: python -m tests.benchmarks lists them", file=sys.stderr)
        return 1
    for each, about in known.items():
        print(f"{each:{WIDTH}} {about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
