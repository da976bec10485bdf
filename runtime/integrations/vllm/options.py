"""Reads those options of vLLM that hdtool needs; all options are passed on to vLLM."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from hdtool.data.errors import OptionError

VALUES = ("--tokenizer", "--tokenizer-revision", "--revision", "--speculative-config")
ADDRESS = ("--host", "--port", "--uds", "--config")


class _Reader(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _refusal(message)


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options that hdtool needs; as in vLLM, underscores equal dashes and names may be abbreviated."""
    parser = _Reader(add_help=False, exit_on_error=False)
    for name in (*VALUES, *ADDRESS):
        parser.add_argument(name)
    for name in ("--served-model-name", "--api-key"):
        parser.add_argument(name, nargs="+")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--additional-config", type=_json, default={})
    try:
        known, _ = parser.parse_known_args([_dashed(word) for word in words])
    except argparse.ArgumentError as error:
        raise _refusal(str(error)) from None
    if known.speculative_config is not None:
        raise OptionError("--speculative-config names another drafter: leave it out, hdtool serve drafts by itself")
    if not isinstance(known.additional_config, dict):
        raise OptionError(f"--additional-config is {known.additional_config!r}: it must be a JSON object")
    return known


def _refusal(message: str) -> OptionError:
    if "ambiguous option" in message:
        message = message.partition("=")[0]  # the value may be secret
    return OptionError(f"{message}: see vllm serve --help")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError("its value is not JSON") from None


def _dashed(option: str) -> str:
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value if option.startswith("--") else option
