"""A page of many runs: one table, curves of the chosen settings; and what the page's script does with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.report.html import ASSETS
from launcher.report.page import render
from launcher.report.run_record import RunRecord
from tests.report.browser import CHROMIUM, Browser, browser
from tests.report.test_several_runs import write_run

MANY = 30
in_browser = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here"),
]


def page_of(directory: Path, number: int, **options: object) -> Path:
    """Run k has the rate k + 1, and of those that are done the metric grows with it; every tenth failed."""
    runs = []
    for k in range(number):
        failed = {"state": "failed", "exit": 5, "error": f"diverged {k}"}
        result = failed if k % 10 == 9 else {"metric": (k + 1) / 100, "higher_is_better": True}
        run = write_run(directory / f"{k}_lr={k + 1}", lr=k + 1, result=result)
        (run / "overrides.txt").write_text(f"recipe=resnet18\noptim.lr={k + 1}\n")
        runs.append(RunRecord.read(run))
    page = directory / "page.html"
    page.write_text(render(runs, "many"))
    return page


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(tmp_path_factory.mktemp("many"), MANY)


def test_the_settings_of_a_run_are_at_the_top(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "overrides.txt").write_text("recipe=resnet18\nseed=1\noptim.lr=0.1\nseed=<2>\n")
    text = render([RunRecord.read(run)])
    words = "<code>recipe=resnet18</code> <code>seed=&lt;2&gt;</code> <code>optim.lr=0.1</code>"
    assert text.index(words) < text.index("<h2>"), "of a key that was given twice, what was used"


def test_the_table_of_runs_has_the_keys_that_differ_and_what_is_set_for_all(tmp_path: Path) -> None:
    text = page_of(tmp_path, 3).read_text()
    (head,) = re.findall(r"<caption>.*?Runs</span></caption><tr>(.*?)</tr>", text)
    assert re.findall(r">([^<]+)</th>", head)[:3] == ["run", "optim.lr", "state"]
    assert "Set for all runs: <code>recipe=resnet18</code></p>" in text
    assert "data-chosen=" not in text
    assert "data-of=" not in text


def test_many_runs_that_differ_in_many_keys_keep_a_table_that_can_be_read(tmp_path: Path) -> None:
    for k in range(2):
        run = write_run(tmp_path / str(k))
        (run / "config.yaml").write_text("".join(f"key{n}: {k}\n" for n in range(8)))
    text = render([RunRecord.read(tmp_path / str(k)) for k in range(2)])
    assert text.index("Runs</span>") < text.index("Config differences") < text.index(">key7</th>")


def test_at_first_the_best_settings_are_chosen(many: Path) -> None:
    text = many.read_text()
    (chosen,) = re.findall(r'data-chosen="([^"]+)"', text)
    assert chosen.split() == ["28", "27", "26", "25", "24", "23", "22", "21"], "run 29 failed"
    assert set(re.findall(r'data-of="(\d+)"', text)) == set(map(str, range(MANY)))
    assert len(re.findall('<ul class="legend">', text.split("Details of the first")[0])) == 1


def test_of_many_runs_the_details_are_folded(many: Path) -> None:
    shown, folded = many.read_text().split("<summary>Details of the first 6 runs; 24 more have pages of")
    assert "Where the time goes" in folded
    assert "Where the time goes" not in shown


def test_axes_have_titles_and_their_ticks_no_needless_digits(many: Path) -> None:
    text = many.read_text()
    titles = set(re.findall(r'data-y-title="([^"]+)"', text))
    assert titles >= {"Loss, training", "Accuracy, %", "Throughput, samples / s", "Time of a step, ms"}
    style = (ASSETS / "page.css").read_text()
    assert "attr(data-x-title)" in style
    assert "attr(data-y-title)" in style


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as found:
        yield found


# Settings whose lines are shown, in each chart the same.
SHOWN = """
[...new Set([...document.querySelectorAll('path[data-of]')].filter(path => !path.style.display)
  .map(path => +path.dataset.of))].sort((a, b) => a - b).join()
"""
COLUMN = """
(title => {
  const table = document.querySelector('table'), head = [...table.rows[0].cells];
  const k = head.findIndex(each => each.textContent === title);
  return [...table.rows].slice(1).map(row => row.cells[k].textContent).join();
})
"""


class TestInABrowser:
    pytestmark = in_browser

    def test_many_runs_of_many_settings_take_no_more_room(self, tmp_path: Path, opened: Browser) -> None:
        for seed in range(2):
            for k in range(20):
                write_run(tmp_path / f"{k}-{seed}", lr=k, seed=seed)
        runs = [RunRecord.read(tmp_path / f"{k}-{seed}") for k in range(20) for seed in range(2)]
        page = tmp_path / "page.html"
        page.write_text(render(runs, "many"))
        opened.open(page)
        assert opened.run("document.documentElement.scrollHeight") < 5000
        assert opened.run("document.querySelectorAll('td input').length") == 20, "of settings, not of runs"
        assert opened.run("document.querySelector('table').rows.length") == 41
        assert opened.run("document.querySelector('.scroll').clientHeight") < 600

    def test_curves_of_the_chosen_runs_are_shown(self, many: Path, opened: Browser) -> None:
        listen = "window.errors = []; addEventListener('error', event => errors.push(event.message))"
        opened.call("Page.addScriptToEvaluateOnNewDocument", source=listen)
        opened.open(many)
        assert opened.run("document.documentElement.scrollHeight") < 5000
        assert opened.run(SHOWN) == "21,22,23,24,25,26,27,28"
        assert opened.run(COLUMN + "('optim.lr')").startswith("29,28,27,26,25,24,23,22,1,2,")
        assert opened.run("document.querySelectorAll('section > .legend li').length") == MANY
        box = "document.querySelector('[aria-label=\"curves of {}_lr={}\"]')"
        before = opened.run("document.querySelector('[data-of=\"28\"]').style.getPropertyValue('--c')")
        opened.run(box.format(25, 26) + ".click()")
        opened.run(box.format(0, 1) + ".click()")
        assert opened.run(SHOWN) == "0,21,22,23,24,26,27,28"
        color = "document.querySelector('[data-of=\"{}\"]').style.getPropertyValue('--c')"
        assert opened.run(color.format(28)) == before, "what stays chosen keeps its colour"
        colors = [opened.run(color.format(k)) for k in (0, 21, 22, 23, 24, 26, 27, 28)]
        assert len(set(colors)) == 8
        opened.run("document.querySelector('[aria-label=\"curves of all\"]').click()")
        assert opened.run(SHOWN).count(",") == MANY - 1
        opened.run("document.querySelector('[aria-label=\"curves of all\"]').click()")
        assert opened.run(SHOWN) == ""
        axes = "[...document.querySelectorAll('.plot[data-y] {}')].map(each => each.textContent).join()"
        opened.run("[...document.querySelectorAll('.controls input')][1].click()")
        assert "1,10,40" not in opened.run(axes.format(".x")), "nothing to take the logarithm of"
        assert opened.run(axes.format(".y"))
        assert opened.run("window.errors.join()") == ""

    def test_tables_are_sorted_by_a_column(self, many: Path, opened: Browser) -> None:
        opened.open(many)
        press = "[...document.querySelectorAll('th button')].find(b => b.textContent === '{}').click()"
        state = "document.querySelector('th[aria-sort]').ariaSort"
        for title, first, last in (("optim.lr", "1", "30"), ("run", "0_lr=1", "29_lr=30")):
            opened.run(press.format(title))
            order = opened.run(COLUMN + f"('{title}')").split(",")
            assert (order[0], order[-1], opened.run(state)) == (first, last, "ascending")
            opened.run(press.format(title))
            order = opened.run(COLUMN + f"('{title}')").split(",")
            assert (order[0], order[-1], opened.run(state)) == (last, first, "descending")
        opened.run(press.format("time"))
        assert opened.run(COLUMN + "('time')").split(",")[0] == "1:40", (
            "of its process: the result has no training time"
        )

    def test_curves_are_smoothed_and_drawn_on_logarithmic_axes(self, tmp_path: Path, opened: Browser) -> None:
        run = write_run(tmp_path / "a", steps=200)
        page = tmp_path / "page.html"
        page.write_text(render([RunRecord.read(run)]))
        opened.open(page)
        path = "document.querySelector('.plot[data-y] path.line').getAttribute('d')"
        ticks = "[...document.querySelectorAll('.plot[data-y]')][{}].querySelectorAll('.{}')"
        texts = "[..." + ticks + "].map(each => each.textContent).join(' ')"
        drawn, labels = opened.run(path), opened.run(texts.format(0, "y"))
        set_input = (
            "(each => {{ each.{} = {}; each.dispatchEvent(new Event('input')) }})"
            "([...document.querySelectorAll('.controls input, .controls select')][{}])"
        )
        opened.run(set_input.format("value", 0, 0))
        again = opened.run(path)
        points = [[float(x) for x in re.findall(r"[\d.]+", text)] for text in (drawn, again)]
        assert points[0] == pytest.approx(points[1], abs=0.6), "drawn anew as it was"
        assert opened.run(texts.format(0, "y")) == labels
        opened.run(set_input.format("value", 0.9, 0))
        smooth = [float(x) for x in re.findall(r"[\d.]+", opened.run(path))]
        assert smooth != pytest.approx(points[1], abs=0.6)
        opened.run(set_input.format("value", 0, 0))
        opened.run(set_input.format("checked", "true", 2))
        assert opened.run(texts.format(0, "x")) == "1 10 100"
        opened.run("document.querySelector('.plot').focus()")
        opened.press("Home")
        assert opened.run("document.querySelector('.cursor').style.left") == "0%"
        opened.run(set_input.format("value", 10, 1))
        assert "0.1" in opened.run(texts.format(0, "y")).split()
        opened.run(set_input.format("value", 1, 1))
        assert "0.1" not in opened.run(texts.format(0, "y")).split()

    def test_nothing_is_cut_off_on_paper(self, many: Path, opened: Browser) -> None:
        size = {"width": 700, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        opened.call("Emulation.setDeviceMetricsOverride", **size)
        opened.call("Emulation.setEmulatedMedia", media="print")
        opened.open(many)
        assert opened.run("document.documentElement.scrollWidth") <= 700
        cut = """
        [...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth + 1
          || each.scrollHeight > each.clientHeight + 1).length
        """
        assert opened.run(cut) == 0
        assert opened.run("document.querySelector('table').rows.length") == MANY + 1
