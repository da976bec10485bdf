"""The table of docs/guides/tenants.md: who drafts from whose text."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hdtool.data import demo
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.stores_at_home import corpus_index_at_home, history_at_home, model_store_at_home
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.integrations.server.endpoints import ApiKeys
from hdtool.runtime.integrations.server.engine_thread import Tenants
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.target.load import Loaded

pytestmark = pytest.mark.usefixtures("home")
NOWHERE = StoresConfig(model_db="none", corpus_db="none")
SECRET = [1001, 1002, 1003, 1004, 1005, 1006]
"""Tokens in an order that no store has."""
NO_LOGITS = Verified(torch.empty(0))


def tenants_of(loaded: Loaded, *names: str, stores: StoresConfig = NOWHERE, history: str = "memory") -> Tenants:
    return Tenants(loaded, DecodeConfig(draft_tokens=16, batch_size=4, history=history), stores, list(names))


def answer(tenants: Tenants, tenant: str, tokens: Sequence[int] = SECRET) -> None:
    """Answer a request of a tenant to the end."""
    drafter = tenants.take(tenant)
    say(drafter, tokens)
    drafter.end()
    tenants.put(tenant, drafter)


def say(drafter: Drafter, tokens: Sequence[int]) -> None:
    drafter.begin([7, 8, 9])
    for token in tokens:
        drafter.observe(Accepted([], [token]), NO_LOGITS)


def is_drafted(tenants: Tenants, tenant: str) -> bool:
    """Whether another request of a tenant, with another prompt, drafts the secret from its first tokens."""
    drafter = tenants.take(tenant)
    prompt = [17, 18, *SECRET[:2]]
    drafter.begin(prompt)
    found = SECRET[2] in drafter.draft(prompt).tokens.tolist()
    tenants.put(tenant, drafter)
    return found


def test_requests_without_keys_draft_from_each_others_answers(loaded: Loaded) -> None:
    tenants = tenants_of(loaded, *ApiKeys({}).tenants)
    assert not is_drafted(tenants, "")
    answer(tenants, "")
    assert is_drafted(tenants, "")


def test_requests_without_keys_draft_from_answers_in_progress(loaded: Loaded) -> None:
    tenants = tenants_of(loaded, "")
    in_progress = tenants.take("")
    say(in_progress, SECRET)
    in_progress.draft([7, 8, 9, *SECRET])
    assert is_drafted(tenants, "")


def test_without_a_history_no_request_drafts_from_another(loaded: Loaded) -> None:
    tenants = tenants_of(loaded, "", history="none")
    answer(tenants, "")
    assert not is_drafted(tenants, "")


@pytest.mark.parametrize("history", ["memory", "home", "folder"])
def test_no_tenant_drafts_from_anothers_answers(loaded: Loaded, tmp_path: Path, history: str) -> None:
    named = str(tmp_path / "past") if history == "folder" else history
    names = ["", "acme", "globex"]
    for name in names:
        tenants = tenants_of(loaded, *names, history=named)
        answer(tenants, name)
        assert [is_drafted(tenants, other) for other in names] == [other == name for other in names]
        shutil.rmtree(tmp_path / "past", ignore_errors=True)
        shutil.rmtree(tmp_path / "home", ignore_errors=True)


def test_keys_of_one_tenant_share_its_drafts_and_keys_without_a_name_are_one_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("acme one\nacme two\nthree\nfour\n")
    keys = ApiKeys.read(path, {})
    assert [keys.tenant(f"Bearer {key}") for key in ("one", "two", "three", "four")] == ["acme", "acme", "", ""]
    assert keys.tenants == ["", "acme"]


def test_after_a_restart_each_tenant_drafts_from_its_own_answers(loaded: Loaded, tmp_path: Path) -> None:
    history = str(tmp_path / "past")
    answer(tenants_of(loaded, "acme", "globex", history=history), "acme")
    tenants = tenants_of(loaded, "acme", "globex", history=history)
    assert [is_drafted(tenants, name) for name in ("acme", "globex")] == [True, False]


def test_a_server_of_a_namespace_keeps_its_history_there(loaded: Loaded, tmp_path: Path) -> None:
    """Two servers without keys, one for each namespace, must not share a history on the disk."""
    for history in ("home", str(tmp_path / "past")):
        servers = {
            name: tenants_of(loaded, "", stores=StoresConfig("none", "none", name), history=history)
            for name in ("acme", "globex")
        }
        answer(servers["acme"], "")
        assert [is_drafted(servers[name], "") for name in ("acme", "globex")] == [True, False]
    folders = [store_set.history for server in servers.values() for store_set in server.store_sets.values()]
    assert [each.store.folder for each in folders if each and each.store] == [
        tmp_path / "past" / "acme",
        tmp_path / "past" / "globex",
    ]


def test_the_history_of_a_namespace_is_its_own_in_python_too(loaded: Loaded) -> None:
    config = DecodeConfig(history="home")
    chosen = StoresConfig("none", "none", "acme")
    opened = loaded.store_opener(chosen).open_for(config)
    history = opened.history
    assert history and history.store and loaded.checkpoint and opened.tokenizer
    assert history.store.folder == history_at_home(loaded.checkpoint.fingerprint, opened.tokenizer, "acme")


def test_other_users_of_the_machine_cannot_read_a_new_history(loaded: Loaded, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(0o755)
    for named, mode in ((tmp_path / "past", 0o700), (shared, 0o755)):
        tenants_of(loaded, "", "acme", history=str(named))
        assert stat.S_IMODE(named.stat().st_mode) == mode, "a folder that was there keeps its mode"
        assert stat.S_IMODE((named / "acme").stat().st_mode) == 0o700


def test_a_tenant_has_its_own_model_store_and_falls_back_to_the_shared_corpus_index(loaded: Loaded) -> None:
    mark = TokenizerFingerprint.of(loaded.tokenizer)
    assert loaded.checkpoint
    for name in (None, "acme"):
        shutil.copytree(demo.MODEL_STORE, model_store_at_home(loaded.checkpoint, mark, name))
    for name in (None, "initech"):
        shutil.copytree(demo.CORPUS_INDEX, corpus_index_at_home(mark, name))
    opened = tenants_of(loaded, "acme", "initech", "globex", stores=StoresConfig()).store_sets
    models = {name: each.model.folder if each.model else None for name, each in opened.items()}
    assert models == {
        "acme": model_store_at_home(loaded.checkpoint, mark, "acme"),
        "initech": None,
        "globex": model_store_at_home(loaded.checkpoint, mark),
    }, "without stores of its own, a tenant drafts from the shared model store"
    corpora = {name: each.corpus.folder if each.corpus else None for name, each in opened.items()}
    assert corpora == {
        "acme": corpus_index_at_home(mark),
        "initech": corpus_index_at_home(mark, "initech"),
        "globex": corpus_index_at_home(mark),
    }


def test_a_prediction_is_for_one_request(loaded: Loaded) -> None:
    tenants = tenants_of(loaded, "", history="none")
    drafter = tenants.take("")
    prompt = [7, 8, 9]
    drafter.begin(prompt)
    drafter.predict(SECRET)
    assert SECRET[0] in drafter.draft(prompt).tokens.tolist()
    drafter.end()
    tenants.put("", drafter)
    assert not is_drafted(tenants, "")


def test_calls_of_one_generator_draft_from_each_other_and_other_generators_do_not(loaded: Loaded) -> None:
    model: Any = loaded.target.model
    prompt = torch.tensor([loaded.tokenizer("Write a story about a fox.")["input_ids"]])

    def from_history(generator: Generator) -> int:
        options = {"do_sample": False, "max_new_tokens": 24, "custom_generate": generator}
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return int(generator.stats.drafted[SourceId.HISTORY])

    first, second = (Generator.drafting(loaded.tokenizer, DecodeConfig(draft_tokens=16), NOWHERE) for _ in range(2))
    assert from_history(first) < from_history(first)
    cold = Generator.drafting(loaded.tokenizer, DecodeConfig(draft_tokens=16), NOWHERE)
    assert from_history(second) == from_history(cold)
    never = Generator.drafting(loaded.tokenizer, DecodeConfig(draft_tokens=16, history="none"), NOWHERE)
    assert [from_history(never) for _ in range(2)] == [0, 0]


def test_without_a_history_no_call_drafts_from_what_the_model_ranked_in_another(loaded: Loaded) -> None:
    prompts = [
        loaded.tokenizer(text)["input_ids"] for text in ("Write a story about a fox.", "Now a story about a fox.")
    ]

    model: Any = loaded.target.model

    def recycled(generator: Generator, prompt: list[int]) -> int:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 24, "custom_generate": generator}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return int(generator.stats.drafted[SourceId.RECYCLED])

    def made(history: str) -> Generator:
        config = DecodeConfig("hd+logitspec", draft_tokens=16, history=history, sources="context,history,recycled")
        return Generator.drafting(loaded.tokenizer, config, NOWHERE)

    cold = [recycled(made("none"), prompt) for prompt in prompts]
    forgetful, remembering = made("none"), made("memory")
    assert [recycled(forgetful, prompt) for prompt in prompts] == cold
    assert [recycled(remembering, prompt) for prompt in prompts] != cold
