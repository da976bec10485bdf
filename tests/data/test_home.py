"""Where stores are kept: every namespace has a folder of its own, on every file system."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from hdtool.data.errors import OptionError
from hdtool.data.home import home
from hdtool.data.stores import tenant
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.stores_at_home import history_at_home, store_at_home
from hdtool.data.stores.tenant import MAX_FOLDER_NAME, first_namespace_with_stores, history_of_tenant

MARK = TokenizerFingerprint("fingerprint", 100)
NAMES = st.text(st.characters(), min_size=1, max_size=12) | st.text("aAbB.%/ cConN1", min_size=1, max_size=6)


def folder_of(name: str) -> Path:
    return store_at_home("model", MARK, name).parent.parent


pytestmark = pytest.mark.usefixtures("home")


@given(NAMES, NAMES)
@example("acme", "Acme")
@example("straße", "strasse")
@example("é", "e\u0301")
@example("a", "a.")
@example("a", "a ")
@example("con", "%63on")
@example("\udc80", "\ud800")
def test_different_namespaces_have_folders_that_differ_without_case(one: str, other: str) -> None:
    folders = {folder_of(name).name.casefold() for name in (one, other)}
    assert len(folders) == len({one, other})


@given(NAMES)
@example("..")
@example(".")
@example("../../etc")
@example("/abs")
@example("c:\\d")
@example("\0")
@example("COM1")
@example("lpt9.txt")
def test_a_namespace_is_one_portable_folder_inside_the_home(name: str) -> None:
    folder = folder_of(name)
    assert folder.parent == home() / "namespaces"
    assert set(folder.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_%")
    assert folder.name not in {
        "con",
        "prn",
        "aux",
        "nul",
        *(f"{port}{n}" for port in ("com", "lpt") for n in range(10)),
    }


def test_simple_names_stay_readable() -> None:
    assert folder_of("acme-2_b").name == "acme-2_b"
    assert folder_of("Acme/b").name == "%41cme%2fb"
    assert folder_of("con").name == "%63on"


@pytest.mark.parametrize("name", ["", "x" * (MAX_FOLDER_NAME + 1), "/" * 67])
def test_a_name_that_cannot_be_a_folder_has_no_stores_and_is_refused_where_it_is_asked_for(name: str) -> None:
    assert first_namespace_with_stores([name]) is None
    with pytest.raises(OptionError, match="cannot name a folder"):
        store_at_home("model", MARK, name)


def test_the_first_name_with_stores_is_taken() -> None:
    assert first_namespace_with_stores(["one", "two"]) is None
    folder_of("one").mkdir(parents=True)
    assert first_namespace_with_stores(["one", "two"]) is None, "an empty folder holds no stores"
    store_at_home("model", MARK, "two").mkdir(parents=True)
    assert first_namespace_with_stores(["x" * 500, "one", "two"]) == "two"
    assert first_namespace_with_stores(["Two"]) is None


def test_a_history_alone_makes_no_namespace() -> None:
    """Else a tenant who is served from the shared stores would lose them once a history is kept."""
    place = history_at_home("model", MARK, "one")
    place.mkdir(parents=True)
    assert first_namespace_with_stores(["one"]) is None
    store_at_home("model", MARK, "one").mkdir()
    assert first_namespace_with_stores(["one"]) == "one"


def test_tenants_never_share_a_folder_of_their_histories(tmp_path: Path) -> None:
    names = ["acme", "Acme", "acme/b", "../acme", "/acme", ".", "..", "manifest.json", "nul"]
    folders = [history_of_tenant(tmp_path, name) for name in names]
    assert len({str(folder).lower() for folder in folders}) == len(names)
    assert {folder.parent for folder in folders} == {tmp_path} and tmp_path / "manifest.json" not in folders
    assert folders[0] == tmp_path / "acme" and history_of_tenant(tmp_path, "") == tmp_path
    with pytest.raises(OptionError, match="cannot name a folder"):
        history_of_tenant(tmp_path, "x" * (MAX_FOLDER_NAME + 1))


def test_a_file_system_with_shorter_names_has_no_such_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant, "MAX_FOLDER_NAME", 10_000)
    assert first_namespace_with_stores(["x" * 5_000]) is None
