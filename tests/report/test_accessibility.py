"""The report for those who do not see it, or not well: names, roles, order of focus, contrast, motion."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from launcher.report.html import ASSETS
from launcher.report.page import write_report
from launcher.report.run_record import RunRecord
from launcher.telemetry.event_log import EventLog
from tests.report.browser import CHROMIUM, Browser, browser
from tests.report.test_page import write_run

STYLE = (ASSETS / "page.css").read_text()
TEXT, GRAPHIC = 4.5, 3.0  # least contrasts, WCAG 2.2 AA: 1.4.3 and 1.4.11
Color = tuple[float, float, float]


def colors_of(theme: str) -> dict[str, Color]:
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    shown = light + (dark if theme == "dark" else "")
    found = dict(re.findall(r"--(\w[\w-]*): #([0-9a-f]{3,6})\b", shown))
    return {name: _color(value) for name, value in found.items()}


def _color(text: str) -> Color:
    text = "".join(2 * digit for digit in text) if len(text) == 3 else text
    red, green, blue = (int(text[k : k + 2], 16) / 255 for k in (0, 2, 4))
    return red, green, blue


def luminance(color: Color) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Color, other: Color) -> float:
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def mixed(color: Color, share: float, other: Color) -> Color:
    """color-mix(in srgb, color share, other)."""
    red, green, blue = (share * a + (1 - share) * b for a, b in zip(color, other, strict=True))
    return red, green, blue


def test_the_contrast_is_that_of_the_standard() -> None:
    assert contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)
    assert contrast(_color("767676"), _color("fff")) == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_stand_out_from_what_is_behind_them(theme: str) -> None:
    color = colors_of(theme)
    pairs = dict.fromkeys(product(("ink", "soft"), ("back", "panel")), TEXT)
    pairs |= {(text, "back"): TEXT for text in ("bad", "good", "warn")}
    pairs |= {(text, "bad-back"): TEXT for text in ("ink", "bad")}
    pairs |= {(f"s{k}", "back"): GRAPHIC for k in range(8)}
    found = {pair: contrast(color[pair[0]], color[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in found.items() if ratio < pairs[pair]} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("cell", ["s0", "s1"])
def test_numbers_of_the_confusion_matrix_stand_out_at_any_share(theme: str, cell: str) -> None:
    color = colors_of(theme)
    light, dark = map(float, re.findall(r"--deep: ([.\d]+)", STYLE))
    for percent in range(101):
        share = (dark if theme == "dark" else light) * (percent / 100) ** 0.5
        found = contrast(color["ink"], mixed(color[cell], share, color["panel"]))
        assert found >= TEXT, (percent, found)
    assert "calc(var(--share) * var(--deep) * 1%), var(--panel))" in STYLE


def test_nothing_moves() -> None:
    """So that there is nothing to leave out under prefers-reduced-motion."""
    assert not re.search(r"transition|animation|@keyframes|scroll-behavior", STYLE)
    assert not re.search(r"animate\(|requestAnimationFrame|setInterval", (ASSETS / "page.js").read_text())


@pytest.fixture
def page(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_run(run_dir)
    log = EventLog(run_dir / "metrics.jsonl")
    log.append({"event": "restart", "time": 0.0, "step": 60, "path": "x", "attempt": 1})
    log.close()
    return write_report(RunRecord.read(run_dir))


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_screen_reader_gets_names_roles_and_values_in_the_order_of_the_page(
    page: Path, tmp_path: Path
) -> None:
    with browser(tmp_path / "profile") as opened:
        opened.open(page)
        opened.run("for (const each of document.querySelectorAll('details')) each.open = true")
        tree = opened.tree()
        by_role = {
            role: [node for node in tree if node.role == role] for role in {node.role for node in tree}
        }
        for role in (
            "main",
            "heading",
            "figure",
            "slider",
            "table",
            "columnheader",
            "rowheader",
            "DescriptionList",
        ):
            assert by_role.get(role), role
        for role in ("heading", "figure", "slider", "table", "DisclosureTriangle"):
            assert all(node.name for node in by_role[role]), role
        assert all(node.name for node in tree if node.is_focusable), "what can be focused says what it is"
        assert not by_role.get("image"), "each chart is a slider while its script runs"
        assert not by_role.get("superscript"), "the labels beside a drawing are in its description"
        summaries = [node.name for node in by_role["DisclosureTriangle"]]
        assert len(set(summaries)) == len(summaries)
        loss = next(node for node in by_role["slider"] if node.name.startswith("Loss."))
        assert "training: 0.5 at step 5, 0.04167 at 60, lowest 0.04167, highest 0.5" in loss.name

        focused = []
        for _ in range(400):
            opened.press("Tab")
            place = opened.run("[...document.querySelectorAll('*')].indexOf(document.activeElement)")
            if focused and place <= focused[-1]:
                break
            focused.append(place)
        stops = [node for node in tree if node.is_focusable and "ption" not in node.role]  # of a selection
        assert len(focused) >= len(stops) - 1, "all but the page itself"

        opened.run("document.querySelector('.plot[data-low]').focus()")
        assert _value(opened) == ("60", "step 60, training: 0.041667, validation: 0.3")
        opened.press("Home")
        assert _value(opened) == ("5", "step 5, training: 0.5")
        stops = []
        for key in 4 * ("ArrowRight",) + ("ArrowLeft",):
            opened.press(key)
            stops.append(_value(opened)[0])
        assert stops == ["10", "15", "25", "30", "25"], "the points of the lines; the loss of step 20 is inf"


def _value(opened: Browser) -> tuple[str, str]:
    """Of the focused slider. The protocol's tree has the number, and an empty string for the text."""
    text = opened.run("document.activeElement.getAttribute('aria-valuetext')")
    (focused,) = (node for node in opened.tree() if node.role == "slider" and node.is_focused)
    return focused.value, text


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_nothing_is_cut_off_on_a_narrow_screen(page: Path, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as opened:
        for width in (320, 400):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            opened.call("Emulation.setDeviceMetricsOverride", **size)
            opened.open(page)
            opened.run("for (const each of document.querySelectorAll('details')) each.open = true")
            assert opened.run("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_without_the_script_each_chart_is_a_described_image(page: Path, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as opened:
        opened.call("Emulation.setScriptExecutionDisabled", value=True)
        opened.open(page)
        images = [node for node in opened.tree() if node.role == "image"]
        assert len(images) >= 6
        assert all(re.search(r"lowest .*, highest ", node.name) for node in images)
