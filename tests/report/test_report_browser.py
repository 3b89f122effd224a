"""``report.html`` in Chromium from ``file://``: the display, and its use with the pointer and with the keyboard
alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_ledger import make_ledger, write_journal, write_run_files

from outlast.goodput.ledger import Ledger
from outlast.report.page import make_page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
from selenium.webdriver import ActionChains, Keys  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

LONG_S = 100.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\u2028\u2029\"'`${window.hacked=1}"
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="needs chromium and chromedriver (apt: chromium-driver)"),
]


class Browser:
    """A Chromium process with one page.

    Args:
        folder: Receives the pages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_page_load_timeout(LONG_S)
        self.driver.set_script_timeout(LONG_S)

    def show(self, ledger: Ledger, *, run_dir: Path | None = None, width: int = 1280, dark: bool = False) -> None:
        """Open the page of a ledger in a window of a given width, and wait until it is loaded."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
        path = self.folder / "report.html"
        path.write_bytes(make_page(ledger, run_dir=run_dir))
        self.driver.get_log("browser")
        self.driver.get(path.as_uri())
        self.wait_until("return document.documentElement.dataset.ready === 'yes'")
        self.wait_until("return document.getElementById('timeline-canvas').dataset.to !== undefined")

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def wait_until(self, script: str, *values: Any) -> Any:
        """Wait until a script returns a true value; return that value."""
        return WebDriverWait(self.driver, LONG_S, poll_frequency=0.02).until(lambda _: self.run(script, *values))

    def find(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click an element in the middle of the window."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        self.find(selector).click()

    def view(self) -> tuple[float, float]:
        """Return the seconds of the run that the timeline shows."""
        data = self.run("return {...document.getElementById('timeline-canvas').dataset}")
        return float(data["from"]), float(data["to"])

    def wait_for_view(self, condition: str) -> tuple[float, float]:
        """Wait until a condition on ``from`` and ``to`` holds; return both."""
        script = "const c = document.getElementById('timeline-canvas').dataset; const [from, to] = [+c.from, +c.to];"
        self.wait_until(f"{script} return {condition}")
        return self.view()

    def messages(self) -> list[Any]:
        """Return the messages that the page wrote to the console, loading errors included."""
        found: list[Any] = self.driver.get_log("browser")
        return found


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start Chromium for one test; all of its processes are ended after the test."""
    opened = Browser(tmp_path_factory.mktemp("pages"))
    try:
        yield opened
        assert opened.messages() == []
        assert opened.run("return window.hacked") is None
    finally:
        opened.driver.quit()


def test_sections_with_data_are_shown_in_reading_order(browser: Browser) -> None:
    """The order is headline, tiles, timeline, incidents, goodput, slow ranks, checkpoints, training, notes."""
    ledger = make_ledger()
    browser.show(ledger)
    assert browser.find("h1").text == ledger.headline
    tiles = browser.run("return [...document.querySelectorAll('.tile')].map((one) => one.innerText)")
    for value, label in zip(tiles, ("goodput", "wall time", "incidents", "redone", "MTBF", "MTTR"), strict=True):
        assert label in value
    assert tiles[0].startswith("83.3 %")
    sections = browser.run("return [...document.querySelectorAll('section')].map((one) => one.id)")
    assert sections == ["timeline", "incidents", "warnings", "goodput", "slow", "checkpoints", "training", "notes"]
    assert browser.run("return document.querySelectorAll('svg.plot').length") == 4
    assert "1.5 s ahead" in browser.find("#notes").text


def test_the_page_requests_nothing(browser: Browser) -> None:
    """The page requests no other file and no address."""
    browser.show(make_ledger())
    names = browser.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert [name for name in names if not name.startswith("data:")] == []


def test_sections_without_data_are_omitted(browser: Browser) -> None:
    """A run without incidents, saves and scores has a page without their sections."""
    bare = msgspec.structs.replace(
        make_ledger(num_cycles=1), incidents=(), warned=(), saves=(), loads=(), slow_ranks=(), steps=(), ettr=None
    )
    browser.show(bare)
    sections = browser.run("return [...document.querySelectorAll('section')].map((one) => one.id)")
    assert sections == ["timeline", "goodput", "notes"]
    assert "not known" in browser.find(".tile").text


def test_a_click_opens_an_incident_with_its_stack(browser: Browser, tmp_path: Path) -> None:
    """A click shows the stack, the decision and its reason, the cost by parts, and rejected copies."""
    write_run_files(tmp_path)
    browser.show(make_ledger(), run_dir=tmp_path)
    browser.click("#incident-0 .what")
    detail = browser.find("#incident-0-detail")
    stack = detail.find_element(By.CSS_SELECTOR, "pre.file")
    assert stack.is_displayed()
    assert "line 127 in main" in stack.text
    for text in ("workers restarted", "restarting the workers", "redone 50 s", "digest differs", "it waits in forward"):
        assert text in detail.text, text
    assert "iteration 100, 10 iterations redone" in detail.text
    browser.click("#incident-0 .what")
    assert not browser.run("return document.getElementById('incident-0-detail')")


def test_the_keyboard_opens_an_incident(browser: Browser, tmp_path: Path) -> None:
    """Tab reaches the incident with a visible focus; Enter opens it, Space closes it."""
    write_run_files(tmp_path)
    browser.show(make_ledger(), run_dir=tmp_path)
    for _ in range(200):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        focused = browser.run("return document.activeElement.getAttribute('aria-controls')")
        if focused == "incident-0-detail":
            break
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    assert browser.find("#incident-0-detail pre.file").is_displayed()
    assert browser.run("return document.activeElement.getAttribute('aria-expanded')") == "true"
    ActionChains(browser.driver).send_keys(Keys.SPACE).perform()
    assert not browser.run("return document.getElementById('incident-0-detail')")


def test_incidents_are_sorted_by_cost_or_by_a_clicked_column(browser: Browser) -> None:
    """The costliest incident is first; a click on a column head sorts by it, a second click reverses the order."""
    browser.show(make_ledger(num_cycles=6))
    order = "return [...document.querySelectorAll('#incidents tr.entry')].map((one) => one.id)"
    assert browser.run(order)[0] == "incident-4"
    assert "costliest" in browser.find("#incident-4").text
    browser.click("#incidents thead th:nth-child(2) button")
    assert browser.run(order) == [f"incident-{number}" for number in range(5)]
    browser.click("#incidents thead th:nth-child(2) button")
    assert browser.run(order) == [f"incident-{number}" for number in reversed(range(5))]
    assert browser.find("#incidents thead th:nth-child(2)").get_attribute("aria-sort") == "descending"


def test_keys_zoom_pan_and_reset_the_timeline(browser: Browser) -> None:
    """``+`` shows less of the run, arrow keys pan, and Esc shows the entire run again."""
    browser.show(make_ledger())
    wall_s = browser.view()[1]
    canvas = browser.find("#timeline-canvas")
    browser.run("arguments[0].focus()", canvas)
    canvas.send_keys("++")
    begin, end = browser.wait_for_view(f"to - from < {wall_s / 2}")
    canvas.send_keys(Keys.ARROW_RIGHT)
    moved, _ = browser.wait_for_view(f"from > {begin}")
    canvas.send_keys(Keys.ARROW_LEFT)
    browser.wait_for_view(f"from < {moved}")
    canvas.send_keys("-")
    browser.wait_for_view(f"to - from > {1.1 * (end - begin)}")
    canvas.send_keys(Keys.ESCAPE)
    assert browser.wait_for_view(f"from === 0 && to === {wall_s}") == (0.0, wall_s)
    assert "of 30 min" in browser.find("#range").text


def test_wheel_and_drag_zoom_the_timeline(browser: Browser) -> None:
    """The wheel over the times zooms; a drag zooms to the dragged range; a button shows the entire run again."""
    browser.show(make_ledger())
    wall_s = browser.view()[1]
    box = browser.run(
        "const b = document.getElementById('timeline-canvas').getBoundingClientRect(); return [b.x, b.y, b.width]"
    )
    wheel = {"type": "mouseWheel", "x": box[0] + 600, "y": box[1] + 30, "deltaX": 0, "deltaY": -300}
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", wheel)
    browser.wait_for_view(f"to - from < {wall_s * 0.9}")
    browser.click("#reset-view")
    browser.wait_for_view(f"from === 0 && to === {wall_s}")
    canvas = browser.find("#timeline-canvas")
    left = int(-box[2] / 2)
    chain = ActionChains(browser.driver).move_to_element_with_offset(canvas, left + 400, 30).click_and_hold()
    chain.move_by_offset(150, 0).move_by_offset(150, 0).release().perform()
    begin, end = browser.wait_for_view(f"to - from < {wall_s * 0.5}")
    assert 0 < begin < end < wall_s


def test_nodes_expand_and_timeline_marks_open_incidents(browser: Browser) -> None:
    """Enter on a node shows a row for each rank; ``n`` selects the next incident, and Enter opens it."""
    browser.show(make_ledger(num_nodes=4, ranks_each=3))
    canvas = browser.find("#timeline-canvas")
    rows = "return document.getElementById('timeline-canvas').dataset.rows === arguments[0]"
    browser.wait_until(rows, "4")
    browser.run("arguments[0].focus()", canvas)
    canvas.send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    browser.wait_until(rows, "7")
    canvas.send_keys(Keys.SPACE)
    browser.wait_until(rows, "4")
    browser.click("#all-ranks")
    browser.wait_until(rows, "16")
    browser.run("arguments[0].focus()", canvas)
    canvas.send_keys("n", "n", Keys.ENTER)
    assert browser.find("#incident-1-detail").is_displayed()
    assert browser.run("return document.activeElement.getAttribute('aria-controls')") == "incident-1-detail"


def test_a_tooltip_explains_the_row_under_the_pointer(browser: Browser) -> None:
    """The tooltip has the time, node, ranks, part and cycle."""
    browser.show(make_ledger(num_nodes=4))
    ActionChains(browser.driver).move_to_element_with_offset(browser.find("#timeline-canvas"), 0, 10).perform()
    text = browser.wait_until("const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.innerText")
    for part in ("node-00", "ranks ", "productive", "cycle 1 of job-1"):
        assert part in text


def test_the_theme_follows_the_system_or_the_switch(browser: Browser) -> None:
    """The page is dark where the system is dark; the switch overrides the system; the timeline is redrawn."""
    theme = "return document.documentElement.dataset.theme"
    browser.show(make_ledger(), dark=True)
    browser.run("localStorage.clear()")
    browser.show(make_ledger(), dark=True)
    assert browser.run(theme) == "dark"
    painted = browser.run("return document.getElementById('timeline-canvas').toDataURL()")
    browser.click("#theme")
    browser.click("#theme")
    assert browser.find("#theme").text == "Theme: light"
    assert browser.run(theme) == "light"
    assert browser.run("return document.getElementById('timeline-canvas').toDataURL()") != painted
    browser.click("#theme")
    assert browser.run(theme) == "dark"
    browser.show(make_ledger())
    assert browser.run(theme) == "light"


def test_both_themes_have_enough_contrast(browser: Browser) -> None:
    """Text, muted text and links have a contrast of at least 4.5 to 1, parts at least 2.4 to 1, as WCAG defines it."""
    script = """
    const light = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
      .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
      .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
    const style = getComputedStyle(document.documentElement);
    const of = (name) => light(style.getPropertyValue(name).trim());
    return arguments[0].map((name) => {
      const [a, b] = [of(name), of("--card")].sort((x, y) => y - x);
      return [name, (a + 0.05) / (b + 0.05)];
    });
    """
    parts = [f"--p-{part}" for part in make_ledger().partition]
    for dark in (False, True):
        browser.show(make_ledger(), dark=dark)
        for name, contrast in browser.run(script, ["--text", "--soft", "--accent", "--bad", *parts]):
            assert contrast >= (2.4 if name.startswith("--p-") else 4.5), (name, dark)


def test_the_list_of_keys_is_shown_on_request(browser: Browser) -> None:
    """``?`` shows the list, Esc closes it."""
    browser.show(make_ledger())
    ActionChains(browser.driver).send_keys("?").perform()
    assert "zoom in" in browser.find("#keys").text
    ActionChains(browser.driver).send_keys(Keys.ESCAPE).perform()
    assert not browser.find("#keys").is_displayed()


@pytest.mark.parametrize("width", [420, 800, 1280])
def test_the_page_fits_into_the_window(browser: Browser, tmp_path: Path, width: int) -> None:
    """No part of the page is wider than the window, also with an open incident."""
    write_run_files(tmp_path, text=" " + "x" * 500)
    browser.show(make_ledger(num_nodes=8, num_cycles=6), run_dir=tmp_path, width=width)
    browser.click("#incident-0 .what")
    widths = browser.run("const page = document.documentElement; return [page.scrollWidth, page.clientWidth]")
    assert widths[0] == widths[1]
    table = browser.run(
        "const one = document.querySelector('#incidents .wide'); return [one.scrollWidth, one.clientWidth]"
    )
    assert table[0] == table[1]


def test_the_page_of_a_large_run_stays_responsive(browser: Browser) -> None:
    """With 1,024 ranks and 100 cycles all nodes and ranks are rows, only visible rows are drawn, and keys work."""
    browser.show(make_ledger(num_nodes=128, ranks_each=8, num_cycles=100))
    data = "return {...document.getElementById('timeline-canvas').dataset}"
    assert browser.run(data)["rows"] == "128"
    browser.click("#all-ranks")
    browser.wait_until("return document.getElementById('timeline-canvas').dataset.rows === '1152'")
    assert 5 < int(browser.run(data)["painted"]) < 60
    colors = """
    const canvas = document.getElementById("timeline-canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const seen = new Map();
    for (let at = 0; at < data.length; at += 4) {
      const key = `${data[at]},${data[at + 1]},${data[at + 2]}`;
      seen.set(key, (seen.get(key) || 0) + 1);
    }
    return [seen.size, seen.get("31,111,180") || 0];
    """
    num, num_productive = browser.run(colors)
    assert num > 10
    assert num_productive > 10_000
    canvas = browser.find("#timeline-canvas")
    browser.run("arguments[0].focus()", canvas)
    canvas.send_keys(Keys.PAGE_DOWN * 8)
    browser.wait_until("return document.querySelector('.scroller').scrollTop > 500")
    canvas.send_keys("+++")
    browser.wait_for_view("to - from < 20000")
    assert browser.run("return document.querySelectorAll('#incidents tr.entry').length") == 99
    heat = "const c = document.getElementById('heat'); return c.width > 500 && c.height > 300"
    assert browser.run(heat)


def test_markup_in_texts_is_shown_and_never_runs(browser: Browser, tmp_path: Path) -> None:
    """Names, reasons, log lines and stacks that contain scripts are shown literally; no script in them runs."""
    write_run_files(tmp_path, text=HOSTILE)
    browser.show(make_ledger(hostile=HOSTILE), run_dir=tmp_path)
    browser.run(
        "document.querySelectorAll('tr.entry button').forEach((one) => one.click());"
        "document.querySelectorAll('details').forEach((one) => { one.open = true; });"
    )
    assert HOSTILE.replace("\u2028\u2029", "") in browser.find("h1").get_attribute("textContent").replace(
        "\u2028\u2029", ""
    )
    stack = browser.run("return document.querySelector('#incident-0-detail pre.file').textContent")
    assert HOSTILE in stack
    assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
    ActionChains(browser.driver).move_to_element_with_offset(browser.find("#timeline-canvas"), 0, 10).perform()
    assert "img src=x" in browser.wait_until("return document.getElementById('tip').textContent")


def test_print_output_is_light_and_has_no_buttons(browser: Browser) -> None:
    """Print uses the light colours whatever the theme of the screen, which afterwards is unchanged."""
    browser.show(make_ledger(), dark=True)
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run("return document.documentElement.dataset.theme") == "light"
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    assert browser.run("return document.documentElement.dataset.theme") == "dark"
    printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 20_000


def test_the_page_of_a_real_journal_is_shown(browser: Browser, tmp_path: Path) -> None:
    """A ledger that is read from a journal, not constructed, is shown without an error."""
    run_dir = write_journal(tmp_path / "run")
    browser.show(Ledger.read(run_dir), run_dir=run_dir)
    browser.click("#incident-0 .what")
    assert "out of luck" in browser.find("#incident-0-detail").text
