"""The chat page in a real browser, which a scripted server answers, and at the end hdtool's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import BROWSER, ENTER, ESCAPE, SHIFT, TAB, Connection, Page, browser
from tests.support.scripted_server import END, STATE, Row, ScriptedServer, scripted, step
from tests.support.server import ALWAYS_DRAFTS, RunningServer

pytestmark = pytest.mark.skipif(not BROWSER, reason="needs Chromium")
MARKUP = "<img src=x onerror='window.attacked = true'><script>window.attacked = true</script>"
STEPS = (
    step(("none", "She")),
    step(("context", " gave"), ("context", " one"), ("none", " of")),
    step(("corpus", " the"), ("model", " apples"), ("none", " away."), finish="stop"),
)
TEXT = "She gave one of the apples away."
IS_IDLE = "stopping === null"
REAL_QUESTION = "What are the main differences between lists and tuples in Python?"


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    with browser(tmp_path_factory.mktemp("profile")) as connected:
        yield connected


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted(lambda body: STEPS) as started:
        yield started


@pytest.fixture
def page(connection: Connection, server: ScriptedServer) -> Iterator[Page]:
    shown = Page(connection)
    shown.show_as(1000, 700)
    shown.open(server.url)
    shown.wait_for("byId('model').textContent || !byId('key').hidden")
    yield shown
    assert not shown.problems


def ask(page: Page, question: str = "Who gave what?", *, waits: bool = True) -> None:
    page.run("promptBox.focus()")
    page.type(question)
    page.press(ENTER)
    if waits:
        page.wait_for(IS_IDLE)


def style(page: Page, selector: str, name: str, pseudo: str = "") -> Any:
    return page.run(f"getComputedStyle(document.querySelector({selector!r}), {pseudo!r})[{name!r}]")


def test_text_streams_in_the_colors_of_its_sources(page: Page, server: ScriptedServer) -> None:
    goes_on = threading.Event()

    def slowly(body: Row) -> Iterator[Row]:
        yield from STEPS[:2]
        goes_on.wait(60)
        yield from STEPS[2:]

    server.answer = slowly
    ask(page, waits=False)
    page.wait_for("document.querySelector('.content').innerText === 'She gave one of'")
    assert "2.00 tokens per step" in page.text(".figures") and page.text("#stop") == "Stop"
    for still, name in ((False, "blink"), (True, "none")):
        page.show_as(1000, 700, still=still)
        assert style(page, ".content", "animationName", "::after") == name
    goes_on.set()
    page.wait_for(IS_IDLE)
    assert page.text(".content") == TEXT
    marked = "[...document.querySelectorAll('.drafted')].map(span => [span.textContent, span.title])"
    assert page.run(marked) == [
        ["gave one", "drafted from: this chat"],
        ["the", "drafted from: corpus index"],
        ["apples", "drafted from: model store"],
    ]
    figures = "2.33 tokens per step", " tokens per second", "7 tokens"
    assert all(figure in page.text(".figures") for figure in figures)
    assert page.text(".legend").split("\n") == ["this chat 2", "corpus index 1", "model store 1", "not drafted 3"]
    assert page.text("#announcement") == "The answer is complete: 7 tokens, 2.33 per step."
    (asked,) = server.asked
    assert asked["hdtool"] == {"sources": True, "drafts": True} and "temperature" not in asked


def test_light_and_dark(page: Page) -> None:
    ask(page)
    swatches = []
    for is_dark in (False, True):
        page.show_as(1000, 700, dark=is_dark)
        swatches.append(style(page, ".legend li", "borderTopColor", "::before"))
        ink, paper = (
            sum(map(int, style(page, "body", name)[4:-1].split(","))) for name in ("color", "backgroundColor")
        )
        assert (ink > paper) == is_dark
    assert swatches == ["rgb(0, 136, 136)", "rgb(34, 255, 221)"], "the source's colors"


def test_a_long_answer_scrolls_with_the_reader(page: Page, server: ScriptedServer) -> None:
    goes_on = threading.Semaphore(0)

    def at_length(body: Row) -> Iterator[Row]:
        for number in range(3000):
            if number in (999, 1999):
                goes_on.acquire(timeout=60)
            yield step(("context", f"{number}"), ("none", ", "))
        yield END

    def shows(number: int) -> str:
        return f"document.querySelector('.content').textContent.includes('{number}, ')"

    server.answer = at_length
    ask(page, waits=False)
    page.wait_for(shows(998))
    is_at_end = "chat.scrollHeight - chat.scrollTop - chat.clientHeight < 2"
    page.wait_for(is_at_end)
    page.scroll(500, 300, by=-2000)
    page.wait_for("!byId('latest').hidden")
    page.wait_for("new Promise(done => {const before = chat.scrollTop;"
                  "setTimeout(() => done(chat.scrollTop === before), 200)})")  # fmt: skip
    before = page.run("chat.scrollTop")
    goes_on.release()
    page.wait_for(shows(1998))
    assert page.run("chat.scrollTop") == before, "the reader is left where they are"
    page.click("#latest")
    page.wait_for(is_at_end)
    goes_on.release()
    page.wait_for(IS_IDLE)
    assert page.run(is_at_end) and page.run("byId('latest').hidden")
    assert page.run("document.querySelectorAll('.drafted').length") == 3000


def test_errors_are_shown_in_a_line_with_a_retry(page: Page, server: ScriptedServer) -> None:
    server.refusal = (503, "the server has as many requests as it accepts: ask again later")
    ask(page)
    shown = "the server has as many requests as it accepts: ask again later"
    assert page.text(".answer .problem span") == shown
    assert page.text("#announcement").startswith("The answer failed")
    server.answer = lambda body: [STEPS[0], {"error": {"message": "the engine has stopped"}}]
    page.click(".answer .problem button")
    page.wait_for(
        f"{IS_IDLE} && document.querySelector('.answer .problem').innerText.includes('the engine has stopped')"
    )
    server.answer = lambda body: STEPS
    page.click(".answer .problem button")
    page.wait_for(f"{IS_IDLE} && document.querySelector('.content').innerText === '{TEXT}'")
    assert page.run("document.querySelector('.answer .problem').hidden")
    assert len({json.dumps(asked) for asked in server.asked}) == 1, "the request is the same, with its seed"


def test_a_lost_connection(page: Page, server: ScriptedServer) -> None:
    def breaks_off(body: Row) -> Iterator[Row]:
        yield STEPS[0]
        raise ConnectionError

    server.answer = breaks_off
    ask(page)
    assert page.text(".answer .problem span") == "The connection was lost before the answer was complete."
    assert page.text(".content") == "She", "what has arrived stays"
    assert page.run("document.querySelector('.again').hidden")
    server.answer = lambda body: STEPS
    ask(page, "And now?")
    assert [message["content"] for message in server.asked[-1]["messages"]] == ["And now?"]
    server.server_close()
    ask(page, "Still there?")
    assert page.text(".turn:last-of-type .problem span") == "The server cannot be reached."
    page.wait_for("byId('connection').textContent === 'No connection'")


def test_both_columns_and_what_they_say(page: Page, server: ScriptedServer) -> None:
    page.click("#compare")
    page.run("byId('temperature').value = '0.5'")
    ask(page)
    drafted, plain = server.asked
    assert (drafted.pop("hdtool")["drafts"], plain.pop("hdtool")["drafts"]) == (True, False)
    assert drafted == plain and plain["temperature"] == 0.5
    assert page.text(".verdict").startswith("Identical text.")
    lefts = "[...document.querySelectorAll('.answer')].map(answer => answer.getBoundingClientRect().left)"
    assert page.run(f"new Set({lefts}).size") == 2
    server.answer = lambda body: (
        STEPS if body["hdtool"]["drafts"] else (STEPS[0], step(("none", " got"), finish="stop"))
    )
    page.click("#compare")
    ask(page, "Again?")
    assert page.run("document.querySelectorAll('.answer').length") == 3, "only on request"
    assert [message["content"] for message in server.asked[-1]["messages"]] == ["Who gave what?", TEXT, "Again?"]
    page.click(".turn:last-of-type .again")
    page.wait_for(f"{IS_IDLE} && document.querySelectorAll('.answer').length === 4")
    assert page.text(".turn:last-of-type .verdict").startswith("The texts differ from character 6 on.")


def test_a_plain_answer_follows_the_messages_of_the_drafted_one(page: Page, server: ScriptedServer) -> None:
    """The turn before them has failed, and is answered in between."""
    server.refusal = (503, "ask again later")
    ask(page, "First?")
    ask(page, "Second?")
    page.click(".turn .problem button")
    page.wait_for(f"{IS_IDLE} && document.querySelector('.content').innerText === '{TEXT}'")
    page.click(".turn:last-of-type .again")
    page.wait_for(f"{IS_IDLE} && document.querySelectorAll('.answer').length === 3")
    drafted, plain = server.asked[1], server.asked[-1]
    assert drafted["messages"] == plain["messages"] == [{"role": "user", "content": "Second?"}]


def test_keys_of_the_keyboard(page: Page, server: ScriptedServer) -> None:
    goes_on = threading.Event()

    def waiting(body: Row) -> Iterator[Row]:
        yield STEPS[0]
        goes_on.wait(60)

    server.answer = waiting
    page.type("One")
    page.press(ENTER, SHIFT)
    page.type("two")
    assert page.run("promptBox.value") == "One\ntwo" and not server.asked
    page.press(ENTER)
    page.wait_for("document.querySelector('.content')?.innerText === 'She'")
    page.press(ESCAPE)
    page.wait_for(IS_IDLE)
    goes_on.set()
    assert page.text("#announcement") == "The answer was stopped: 1 token, 1.00 per step."
    assert page.run("document.querySelector('.answer .problem').hidden"), "stopping is no error"
    outlines = {}
    for _ in range(10):
        page.press(TAB)
        focused = page.run("document.activeElement.id")
        outlines[focused] = page.run("getComputedStyle(document.activeElement).outlineStyle")
    assert {"send", "compare", "temperature", "show-server", "new", "chat"} <= outlines.keys()
    assert {name for name, style in outlines.items() if style != "solid"} <= {"", "prompt"}, "the prompt's box shows it"
    page.click("#new")
    assert page.run("document.querySelectorAll('.turn').length") == 0 and not page.run("byId('empty').hidden")
    assert page.run("document.activeElement.id") == "prompt"


@pytest.mark.parametrize("width", [320, 700])
def test_a_narrow_window(page: Page, server: ScriptedServer, width: int) -> None:
    server.answer = lambda body: (*STEPS, step(("none", "x" * 400)))
    page.click("#compare")
    page.show_as(width, 560)
    page.click("#show-server")
    ask(page, "Who gave what? " + "y" * 300)
    too_wide = (
        "[...document.body.querySelectorAll('*')].filter(each => each.getBoundingClientRect().right > innerWidth + 1)"
    )
    assert page.run(f"{too_wide}.map(each => each.outerHTML.slice(0, 80))") == []
    lefts = "[...document.querySelectorAll('.answer')].map(answer => answer.getBoundingClientRect().left)"
    assert page.run(f"new Set({lefts}).size") == 1, "one above the other"
    assert page.run("byId('send').getBoundingClientRect().bottom <= innerHeight")
    assert page.run("chat.clientHeight") > 120


def test_markup_stays_text(page: Page, server: ScriptedServer) -> None:
    store = {"kind": MARKUP, "name": MARKUP, "inputs": [MARKUP], "tokens": 3}
    sources = STATE["sources"] | {MARKUP: {"light": f"red; {MARKUP}", "dark": "url(/attack)"}}
    server.state = STATE | {"model": MARKUP, "stores": [store], "sources": sources}
    server.answer = lambda body: [step((MARKUP, MARKUP), ("none", MARKUP))]
    page.click("#show-server")
    page.wait_for("byId('model').textContent.includes('img')")
    ask(page, MARKUP)
    server.refusal = (400, MARKUP)
    ask(page, MARKUP)
    for selector in ("#model", ".question", "#stores", ".legend", ".turn:last-of-type .problem span"):
        assert MARKUP in page.text(selector), selector
    assert page.text(".content") == MARKUP * 2
    assert page.run("document.title").startswith(MARKUP)
    assert page.run("document.querySelectorAll('img').length + document.scripts.length") == 1
    assert page.run("window.attacked") is None


def test_the_policy_holds_in_the_browser(connection: Connection, server: ScriptedServer) -> None:
    page = Page(connection)
    page.open(server.url)
    page.wait_for("byId('model').textContent")
    blocked = "(() => {try {document.body.innerHTML = '<b>'; return false} catch (error) {return error.name}})()"
    assert page.run(blocked) == "TypeError"
    assert page.run("fetch('http://127.0.0.1:9/').then(() => '', error => error.name)") == "TypeError"
    page.run("document.body.append(Object.assign(document.createElement('style'), {textContent: 'body {color: red}'}))")
    assert style(page, "body", "color") != "rgb(255, 0, 0)"
    assert any("style-src" in problem for problem in page.problems)
    assert any("connect-src" in problem for problem in page.problems)


def test_a_key_is_asked_for_and_stays_in_the_tab(connection: Connection, server: ScriptedServer) -> None:
    server.key = "secret"
    page = Page(connection)
    page.open(server.url)
    page.wait_for("!byId('key').hidden")
    assert page.run("document.querySelector('main').hidden && byId('composer').hidden && !byId('model').textContent")
    page.type("wrong")
    page.press(ENTER)
    page.wait_for("document.querySelector('#key .problem').textContent === 'The server does not know this key.'")
    page.type("secret")
    page.press(ENTER)
    page.wait_for("byId('key').hidden && byId('model').textContent === 'demo'")
    assert page.run("[sessionStorage['hdtool.key'], localStorage.length, document.cookie]") == ["secret", 0, ""]
    ask(page)
    assert page.text(".content") == TEXT
    page.click("#show-server")
    page.click("#forget")
    page.wait_for("!byId('key').hidden")
    assert page.run("sessionStorage.length") == 0
    assert not page.problems


def test_the_poll_leaves_the_focus_where_it_is_while_a_key_is_asked_for(
    connection: Connection, server: ScriptedServer
) -> None:
    server.key = "secret"
    page = Page(connection)
    page.open(server.url)
    page.wait_for("!byId('key').hidden")
    page.run("document.activeElement.blur()")
    page.click("#show-server")
    page.wait_for("document.activeElement.closest('#key') !== null")
    page.run("byId('show-server').focus()")
    page.wait_for("new Promise(done => setTimeout(() => done(true), POLL_MS * 1.5))")
    assert page.run("document.activeElement.id") == "show-server"
    page.run("document.querySelector('#key input').focus()")
    page.type("secret")
    page.press(ENTER)
    page.wait_for("byId('model').textContent === 'demo'")
    server.state = STATE | {"model": "another"}
    page.wait_for("byId('model').textContent === 'another'")


def test_thinking_is_folded_once_the_answer_begins(page: Page, server: ScriptedServer) -> None:
    goes_on = threading.Event()

    def thinking(body: Row) -> Iterator[Row]:
        tokens = [{"source": "context", "reasoning": "Who was it?"}]
        yield {"choices": [{"index": 0, "finish_reason": None, "hdtool": {"steps": 1, "tokens": tokens}}]}
        goes_on.wait(60)
        yield from STEPS

    server.answer = thinking
    ask(page, waits=False)
    page.wait_for("document.querySelector('.thinking .text').innerText === 'Who was it?'")
    goes_on.set()
    page.wait_for(IS_IDLE)
    assert not page.run("document.querySelector('.thinking').open")
    assert page.text(".content") == TEXT


@pytest.mark.long
def test_the_page_of_a_real_server(connection: Connection, tmp_path: Path) -> None:
    with RunningServer(tmp_path / "log", *ALWAYS_DRAFTS, "--served-model-name", MARKUP) as server:
        page = Page(connection)
        page.open(server.url.removesuffix("v1"))
        page.wait_for("byId('model').textContent")
        assert page.text("#model") == MARKUP
        page.click("#compare")
        page.run("byId('temperature').value = '0'")
        ask(page, REAL_QUESTION)
        assert page.text(".verdict").startswith("Identical text.")
        assert page.run("document.querySelectorAll('.drafted').length") > 3
        plain = ".answer:last-child .figures"
        assert page.text(plain).startswith("1.00 tokens per step")
        assert "limit of tokens reached" in page.text(plain), "the toy goes on until its context is full"
        page.click("#compare")
        page.click("#new")
        ask(page, REAL_QUESTION, waits=False)
        page.wait_for("document.querySelector('.content')?.innerText.length > 20")
        server.process.kill()
        page.wait_for(IS_IDLE)
        assert page.text(".answer .problem span") == "The connection was lost before the answer was complete."
        assert not page.problems
