"""``hdtool convert``: logs of any known form as one file of conversations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import OUTPUT, option
from hdtool.cli.parameters.settings import only
from hdtool.data.errors import OptionError
from hdtool.data.tally import counted
from hdtool.runtime.config import BuildConfig


def convert(
    *,
    inputs: options.Inputs,
    out: Annotated[Path, option(OUTPUT, "File of conversations, JSON Lines; .gz and .zst compress it.")],
    config: Annotated[BuildConfig, only("max_bad_fraction")],
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Write conversations of any form as JSON Lines.

    One conversation a line: id, category, messages, recorded token ids if there are some, and where it came from. Of
    requests and responses nothing but the messages is kept. A request and its answer in two files become one
    conversation.
    """
    from hdtool.cli.output.store_output import print_left_out
    from hdtool.data.conversations.canonical import canonical_file, write_canonical
    from hdtool.data.conversations.reader import ConversationReader
    from hdtool.data.inputs import find_inputs
    from hdtool.data.progress import bar

    paths = find_inputs(inputs)
    if any(path.exists() and out.exists() and path.samefile(out) for path in paths):
        raise OptionError(f"--out {out} is one of the inputs: name another file")
    file = canonical_file(out)
    file.check()
    reader = ConversationReader(paths, tolerance=config.max_bad_fraction)
    with bar(reader.total_bytes, "reading", unit="B", quiet=quiet) as shown:
        written = write_canonical(reader, file, shown)
    print_left_out(reader.tally)
    counts = {**written.counts(), "left_out": reader.tally.bad}
    if as_json:
        print(json.dumps({"file": str(out), **counts}, ensure_ascii=False))
        return
    print(f"{out}: {written.in_words()}, {counted(reader.tally.bad, 'record')} left out")
    if not written.answers:
        print("no answers of a model are in it: it gives prompts and texts only", file=sys.stderr)
