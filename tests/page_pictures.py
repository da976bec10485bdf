"""Take the pictures of the chat page for the docs: ``python -m tests.page_pictures`` serves SmolLM2 and chats with it.

It drafts from the stores in hdtool's home, made as the README says.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.support.browser import ENTER, Page, browser
from tests.support.server import RunningServer

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
QUESTION = "What is Nairobi known for? Answer in two sentences."
REWRITE = (
    "Rewrite in the past tense: I walk to the store, I buy two apples, and I give one of them to my sister. "
    "She thanks me, and we walk home together."
)
SERVED = ("smollm2", "--activations", "int8", "--draft-tokens", "8")
WIDE, NARROW = (1000, 720), (390, 720)


def ask(page: Page, question: str) -> None:
    page.run("promptBox.focus()")
    page.type(question)
    page.press(ENTER)
    page.wait_for("stopping === null")
    page.run("document.activeElement.blur()")


def take(page: Page, name: str, size: tuple[int, int], *, dark: bool) -> None:
    page.show_as(*size, dark=dark)
    page.wait_for("new Promise(done => setTimeout(() => done(true), 500))")
    (ASSETS / f"page-{name}.png").write_bytes(page.picture())


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningServer(Path(folder) / "log", *SERVED) as server,
        browser(Path(folder) / "profile") as connection,
    ):
        page = Page(connection)
        page.show_as(*WIDE)
        page.open(server.url.removesuffix("v1"))
        page.wait_for("byId('model').textContent")
        page.run("byId('temperature').value = '0'")
        ask(page, "Hello!")  # the first answer of a process is slow
        page.click("#new")
        take(page, "narrow-light", NARROW, dark=False)
        page.show_as(*WIDE)
        ask(page, QUESTION)
        page.click("#compare")
        ask(page, REWRITE)
        take(page, "wide-light", WIDE, dark=False)
        take(page, "narrow-dark", NARROW, dark=True)
        page.click("#show-server")
        take(page, "wide-dark", WIDE, dark=True)


if __name__ == "__main__":
    main()
