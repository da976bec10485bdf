"""The page of a report: every figure is drawn, the page loads nothing, missing figures are listed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest

from hdtool.builders.evaluation.report.figures import ReportData, figures_of, missing_figures
from hdtool.builders.evaluation.report.pages import PICTURE_NAME, Page, check_report_folder, write_page
from hdtool.builders.evaluation.report.plots import PLOT_DPI, PLOT_INCHES, THEMES, Theme
from hdtool.builders.evaluation.report.source_shares import SourceCounts, SourceShares
from hdtool.builders.evaluation.report.tables import Durations, Speeds, Table
from hdtool.builders.evaluation.report.typical_case import TypicalCase
from hdtool.data.errors import ResultError
from hdtool.runtime.settings.decoding import METHODS
from hdtool.runtime.settings.draft_sources import registered
from hdtool.runtime.settings.measuring import PEERS

EVIL = "<script>alert('&')</script>"
DATA = ReportData(
    tables=(Table("Tokens per step", ("method", "all | of them"), (("hd", "2.87"),), "A note."),),
    speedups=Speeds(("qa", "overall"), {"pld": (1.2, 1.3), "hd": (0.9, 2.0)}, "generate"),
    durations=Durations({"generate": ((10, 0.2, 0.1), (20, 0.4, None)), "hd": ((10, 0.1, 0.1), (20, 0.2, 0.1))}),
    temperatures=Speeds((0.1, 1.0), {"generate": (50.0, 49.0), "hd": (100.0, 80.0)}),
    shares=(SourceShares("hd", 10, {"context": SourceCounts(40, 10, 9, 6), "model": SourceCounts(0, 0, 0, 0)}),),
    case=TypicalCase("hd", EVIL, (("a ", "none"), (EVIL, "context"), ("b", "corpus")), 30, 10),
)


def page_of(data: ReportData) -> Page:
    return Page(
        title="Replay",
        lead="lead",
        command=f"hdtool replay --traces '{EVIL}'",
        facts={"machine": "a machine"},
        data=data,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "within"
    assert write_page(folder, page_of(DATA)) == folder / "index.html"
    return folder


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_every_figure_is_a_picture_in_both_themes(written: Path) -> None:
    names = [one.name for one in figures_of(DATA)]
    assert len(names) == len(set(names)) == 4
    expected = {f"{name}{ending}.png" for name in names for ending in ("", ".dark")}
    assert {path.name for path in written.glob("*.png")} == expected
    for one in figures_of(DATA):
        light, dark = ((written / f"{one.name}{ending}.png").read_bytes() for ending in ("", ".dark"))
        assert size_of(light) == size_of(dark) == (int(PLOT_INCHES * PLOT_DPI), int(one.height * PLOT_DPI))
        assert light != dark
        assert 5_000 < len(light) < 300_000


def test_the_page_loads_nothing(written: Path) -> None:
    page = (written / "index.html").read_text(encoding="utf-8")
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)  # within a picture any four letters may stand
    assert not re.search(r"<(script|link|iframe)\b|@import|url\(", page)
    addresses = re.findall(r'(?:src|srcset|href)="([^"]*)"', page)
    assert len(addresses) == 8 and all(address.startswith("data:image/png;base64,") for address in addresses)


class Balanced(HTMLParser):
    """Asserts that tags are balanced, and collects texts and alternative texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.alts: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.alts.append(dict(attrs).get("alt"))
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(folder: Path) -> Balanced:
    page = Balanced()
    page.feed((folder / "index.html").read_text(encoding="utf-8"))
    page.close()
    assert not page.open
    return page


def test_prompts_and_answers_are_escaped(written: Path) -> None:
    page = read(written)
    assert page.texts.count(EVIL) == 2, "the question and a piece of the answer"
    assert f"hdtool replay --traces '{EVIL}'" in page.texts
    assert len(page.alts) == 4 and all(page.alts)


def test_a_piece_has_the_class_of_its_source(written: Path) -> None:
    page = (written / "index.html").read_text(encoding="utf-8")
    assert '<span class="corpus" title="corpus">b</span>' in page
    assert '<span class="none" title="the model itself">a </span>' in page
    for theme in THEMES:
        assert f"--corpus:{theme.source('corpus')}" in page


def test_nothing_is_missing_where_there_is_data_for_all(written: Path) -> None:
    assert not list(missing_figures(DATA))
    assert "Not shown" not in read(written).texts


@pytest.mark.parametrize(
    "field, empty, names",
    [
        ("speedups", None, ["speed-up"]),
        ("durations", None, ["generation-time"]),
        ("temperatures", None, ["temperatures"]),
        ("shares", (), ["sources-hd"]),
    ],
)
def test_a_figure_without_data_is_left_out_and_named(field: str, empty: object, names: list[str]) -> None:
    lacking = replace(DATA, **{field: empty})  # type: ignore[arg-type]
    gone = {one.name for one in figures_of(DATA)} - {one.name for one in figures_of(lacking)}
    assert gone == set(names)
    ((_, command),) = missing_figures(lacking)
    assert "hdtool" in command


def test_a_page_without_figures_lists_the_commands_that_add_them(tmp_path: Path) -> None:
    write_page(tmp_path, page_of(ReportData()))
    assert not list(tmp_path.glob("*.png"))
    texts = " ".join(read(tmp_path).texts)
    assert "Not shown" in texts
    for wanted in ("hdtool bench --report DIR", "--temperatures", "hdtool replay --report DIR"):
        assert wanted in texts


def test_the_tables_are_markdown_too(written: Path) -> None:
    text = (written / "tables.md").read_text(encoding="utf-8")
    assert "| method | all &#124; of them |\n|---|---|\n| hd | 2.87 |\n\nA note.\n" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    assert "## Sources of hd" in text


def test_a_report_replaces_the_one_before(tmp_path: Path) -> None:
    for _ in range(2):
        write_page(tmp_path, page_of(ReportData(durations=DATA.durations)))
    assert len(list(tmp_path.iterdir())) == 4


def test_all_figures_have_recognised_names(written: Path) -> None:
    methods = replace(DATA, shares=tuple(replace(DATA.shares[0], method=name) for name in METHODS))
    for one in figures_of(methods):
        assert PICTURE_NAME.fullmatch(f"{one.name}.png") and PICTURE_NAME.fullmatch(f"{one.name}.dark.png")


@pytest.mark.parametrize("name", ["index.html", "tables.md", "speed-up.png", "sources-hd.dark.png"])
def test_files_of_another_origin_are_refused_before_anything_is_measured(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    for act in (lambda: check_report_folder(tmp_path), lambda: write_page(tmp_path, page_of(DATA))):
        with pytest.raises(ResultError, match=f"{name} is there and is not a file of an hdtool report: choose another"):
            act()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match=r"cannot be written .* choose another --report"):
        write_page(tmp_path / "file" / "report", page_of(ReportData()))


def test_times_of_the_first_token_and_of_the_others_are_those_measured() -> None:
    """Through the answers of ``busy``, a line would meet the axis below 0."""
    durations = Durations(
        {"busy": ((10, 1.0, 0.5), (20, 9.0, 1.5)), "one token": ((1, 2.0, 2.0),), "unknown": ((5, 1.0, None),)}
    )
    assert durations.rates("busy") == pytest.approx((1.0, 8.0 / 28))
    assert durations.rates("one token") == (2.0, None)
    assert durations.rates("unknown") == (None, None)
    (figure,) = figures_of(ReportData(durations=durations))
    assert figure.table and figure.table.rows == (
        ("busy", "1,000.0", "285.71", "2"),
        ("one token", "2,000.0", "-", "1"),
        ("unknown", "-", "-", "1"),
    )


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_no_two_methods_and_no_two_sources_look_alike(theme: Theme) -> None:
    for colours in ([*map(theme.method, {**PEERS, **METHODS})], [theme.source(str(name)) for name in registered()]):
        pairs = combinations([*colours, theme.foreground, theme.background], 2)
        assert min((distance(*pair), pair) for pair in pairs) > (20,)


def test_no_two_sources_look_alike_in_a_terminal() -> None:
    """Among 256 colours, those from 16 on are a cube of six levels of red, green and blue."""
    levels = [0, 95, 135, 175, 215, 255]
    numbers = [int(str(one.terminal).removeprefix("38;5;")) - 16 for one in registered().values() if one.terminal]
    colours = ["#" + "".join(f"{levels[number // size % 6]:02x}" for size in (36, 6, 1)) for number in numbers]
    assert min((distance(*pair), pair) for pair in combinations(colours, 2)) > (20,)


def distance(*colours: str) -> float:
    """Distance of two colours in CIELAB; about 2 can just be told apart side by side."""
    return math.dist(*map(lab, colours))


def lab(colour: str) -> tuple[float, float, float]:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    weights = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))  # D65 is white
    x, y, z = (math.cbrt(sum(map(math.prod, zip(row, linear, strict=True)))) for row in weights)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)
