"""The live page in a real browser, headless: it loads, stays live, keeps still, and lets nobody else read it."""

import functools
import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from browsing import CUT, awaited, browsing, complaints, needs_a_browser, sized, text_of
from compared import measured
from manyhands.observe.analyse.view import Phase, RunView, Staleness
from manyhands.serving.hosting import Dashboard
from views import run_view, starting_view

pytestmark = needs_a_browser

REBOUND = "--host-resolver-rules=MAP other.example 127.0.0.1"  # a name that was re-bound to this machine
FAREWELL = "the run has ended; manyhands show RUN opens it again"
PLACES = """
  return [...document.querySelectorAll("section, h1")].map((one) => {
    const box = one.getBoundingClientRect();
    return [one.id, box.x, box.y + scrollY, box.width, box.height];
  });
"""


class Shown:
    """A source of views that a test sets, in the place of a run."""

    def __init__(self, view: RunView) -> None:
        self.view = view

    def __call__(self) -> RunView:
        return self.view


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browsing(tmp_path_factory.mktemp("browser"), REBOUND) as driver:
        yield driver


@pytest.fixture
def shown() -> Shown:
    return Shown(run_view())


@pytest.fixture
def dashboard(shown: Shown) -> Iterator[Dashboard]:
    with Dashboard(shown, lambda view: f"manyhands_step {view.step}\n", farewell=FAREWELL) as one:
        yield one


def opened(browser: Any, url: str, width: int = 1280, height: int = 800) -> None:
    """Open the page at a size, and wait until it is live; what was logged before is forgotten."""
    sized(browser, width, height)
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(url)
    awaited(browser, lambda: line_of(browser) == "connected", "the page to become live")
    awaited(browser, lambda: "How this was made" in text_of(browser, "made"), "its first content")


def line_of(browser: Any) -> str:
    return text_of(browser, "line")


def test_the_page_shows_the_run_and_the_token_leaves_the_address(browser: Any, dashboard: Dashboard) -> None:
    opened(browser, dashboard.url)
    assert browser.current_url == dashboard.url.partition("#")[0]
    assert browser.title == "digits · ps servers=2"
    assert "120 of 400" in text_of(browser, "now")
    assert "worker 2 is 2.9× slower" in text_of(browser, "wrong")
    assert browser.execute_script("return document.cookie") == "", "no cookie, which other ports would get"
    assert complaints(browser) == []
    browser.refresh()
    awaited(browser, lambda: "120 of 400" in text_of(browser, "now"), "the page to come again after a reload")


def test_no_other_port_of_this_machine_gets_the_token(
    browser: Any, dashboard: Dashboard, tmp_path: Path
) -> None:
    opened(browser, dashboard.url)
    token = dashboard.url.partition("token=")[2]
    with another_origin(tmp_path) as foreign:
        browser.get(foreign)
        assert browser.execute_script("return document.title") == "another"
        assert browser.execute_script("return JSON.stringify(sessionStorage) + document.cookie") == "{}"
        assert _Quiet.asked, "the other server was asked"
        assert not any(token in headers for headers in _Quiet.asked)
    browser.get(dashboard.url.partition("#")[0])
    awaited(browser, lambda: "120 of 400" in text_of(browser, "now"), "the tab to have kept its token")


def test_the_report_can_be_saved(browser: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    opened(browser, dashboard.url)
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    browser.execute_script("document.getElementById('save').click()")
    awaited(browser, lambda: (tmp_path / "report.html").exists(), "the report")
    assert "120 of 400" in (tmp_path / "report.html").read_text()
    assert complaints(browser) == []


def test_another_token_in_the_same_tab_is_taken_up(browser: Any, dashboard: Dashboard) -> None:
    browser.get("about:blank")
    browser.get(dashboard.url + "x")
    awaited(browser, lambda: line_of(browser).startswith("The token is missing or wrong"), "the refusal")
    browser.get(dashboard.url)
    awaited(browser, lambda: "120 of 400" in text_of(browser, "now"), "the page to become live")
    complaints(browser)  # the browser's own words about the refusal


def test_it_asks_nobody_else_for_anything(browser: Any, dashboard: Dashboard) -> None:
    import json

    opened(browser, dashboard.url)
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {one["params"]["request"]["url"] for one in sent if one["method"] == "Network.requestWillBeSent"}
    own = dashboard.url.partition("#")[0]
    assert asked
    assert all(url.startswith((own, "data:", "about:")) for url in asked), asked


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_it_updates_without_a_reload_and_nothing_moves(
    browser: Any, dashboard: Dashboard, shown: Shown, width: int, height: int
) -> None:
    shown.view = starting_view(about=run_view().about)  # the configuration is there before the first event
    opened(browser, dashboard.url, width, height)
    assert "worker 2 (starting)" in text_of(browser, "workers")
    browser.execute_script("window.loadedOnce = true; document.querySelector('.fill').focus()")
    before = browser.execute_script(PLACES)
    for step in (40, 120, 360):
        shown.view = run_view(step=step, warnings=() if step == 120 else run_view().warnings)
        awaited(browser, lambda step=step: f"{step} of 400" in text_of(browser, "now"), f"step {step}")
    awaited(browser, lambda: "server 1" in text_of(browser, "members"), "the members")
    *now, notes = browser.execute_script(PLACES)
    assert now == before[:-1]
    assert notes[0] == "notes", "what is missing comes last, and moves nothing"
    assert browser.execute_script("return window.loadedOnce") is True
    assert browser.execute_script("return document.activeElement.className") == "fill", "the focus stays"
    assert complaints(browser) == []


def test_it_survives_the_end_of_the_run(browser: Any, shown: Shown) -> None:
    with Dashboard(shown, lambda view: "", farewell=FAREWELL) as dashboard:
        opened(browser, dashboard.url)
        shown.view = run_view(step=400, phase=Phase.ENDED)
    awaited(browser, lambda: line_of(browser) == FAREWELL, "the farewell")
    assert "400 of 400" in text_of(browser, "now"), "the last state came before the end"
    assert browser.execute_script("return document.querySelectorAll('section').length") == 14
    assert complaints(browser) == []


def test_a_server_that_went_without_a_word_is_said_and_the_content_stays(
    browser: Any, dashboard: Dashboard
) -> None:
    opened(browser, dashboard.url)
    dashboard.stop()
    awaited(
        browser, lambda: "The page shows the last data received" in line_of(browser), "the loss to be said"
    )
    assert "120 of 400" in text_of(browser, "now")


def test_a_page_that_is_closed_is_forgotten(browser: Any, dashboard: Dashboard) -> None:
    opened(browser, dashboard.url)
    assert dashboard._app.num_streams == 1
    browser.get("about:blank")
    awaited(browser, lambda: dashboard._app.num_streams == 0, "the server to notice")


def test_a_wrong_token_gets_one_sentence(browser: Any, dashboard: Dashboard) -> None:
    browser.get("about:blank")
    browser.get(dashboard.url + "x")
    awaited(browser, lambda: line_of(browser).startswith("The token is missing or wrong"), "the refusal")
    complaints(browser)  # the browser's own words about it
    assert "digits" not in browser.page_source


def test_a_name_bound_to_this_machine_by_others_gets_nothing(browser: Any, dashboard: Dashboard) -> None:
    browser.get(dashboard.url.replace("127.0.0.1", "other.example"))
    assert "does not name this server" in browser.execute_script("return document.body.textContent")
    assert "digits" not in browser.page_source


def test_a_page_of_another_origin_can_not_read_it(browser: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    opened(browser, dashboard.url)  # this tab holds the token from here on
    own = dashboard.url.partition("#")[0]
    with another_origin(tmp_path) as foreign:
        browser.get(foreign)
        tried = browser.execute_async_script(
            """
            const [url, done] = arguments;
            const read = (path, how) => fetch(url + path, how).then((got) => got.text()).catch(() => "refused");
            Promise.all([read("", { credentials: "include" }), read("metrics", { credentials: "include" }),
              read("", { credentials: "include", mode: "no-cors" })]).then(done);
            """,
            own,
        )
        assert not any("digits" in text or "manyhands_step" in text for text in tried), tried
        framed = browser.execute_async_script(
            """
            const [url, done] = arguments, frame = document.createElement("iframe");
            frame.onload = () => { let text = "refused"; try { text = frame.contentDocument.body.textContent; } catch {}
              done(text); };
            frame.src = url;
            document.body.append(frame);
            """,
            own,
        )
        assert "digits" not in (framed or "")
    complaints(browser)  # the browser's own words about what it refused


class another_origin:  # noqa: N801 - reads as a context, not as a thing
    """A web page of another program on this machine, on a port of its own."""

    def __init__(self, folder: Path) -> None:
        (folder / "index.html").write_text("<!DOCTYPE html><title>another</title><body></body>")
        self._folder = folder

    def __enter__(self) -> str:
        handler = functools.partial(_Quiet, directory=str(self._folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    asked: ClassVar[list[str]] = []  # the headers of each request

    def do_GET(self) -> None:
        self.asked.append(str(self.headers))
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_it_fits_and_the_keyboard_reaches_everything(
    browser: Any, dashboard: Dashboard, width: int, height: int
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    opened(browser, dashboard.url, width, height)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    hidden = browser.execute_script(
        "return [...document.querySelectorAll('*')].filter((one) => ['auto', 'scroll'].includes("
        "getComputedStyle(one).overflowY) && one.tabIndex < 0 && one.scrollHeight > one.clientHeight + 1).length"
    )
    assert hidden == 0, "everything that scrolls takes the focus"
    regions = browser.execute_script(
        "return [...document.querySelectorAll('[role=region]')].map((one) => one.getAttribute('aria-label'))"
    )
    reached: list[str] = []
    for _ in range(len(regions) + 4):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.append(
            browser.execute_script(
                "return document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
            )
        )
    assert reached[0] == "Skip to the content"
    assert [name for name in reached if name in regions] == regions
    levels = browser.execute_script(
        "return [...document.querySelectorAll('h1, h2, h3')].map((one) => one.tagName)"
    )
    assert levels == ["H1"] + ["H2"] * 14


HIDDEN = "return document.getElementById('notes').className === 'absent'"
BLANKS = """
  return Object.fromEntries([...document.querySelectorAll("section:not(.absent)")].map((one) => {
    const inside = [...one.querySelectorAll("h2, p, li, dd, td, svg, progress")];
    const bottom = Math.max(...inside.map((part) => part.getBoundingClientRect().bottom));
    return [one.id, Math.round(one.getBoundingClientRect().bottom - bottom)];
  }));
"""


def long_view() -> RunView:
    """A view with numbers as long as they come."""
    view = run_view()
    workers = tuple(
        replace(
            one, steps=10**8, steps_per_s=12345.6, compute_ms=98765.43, bytes_sent=10**15, messages_sent=10**9
        )
        for one in view.workers
    )
    traffic = tuple(replace(one, num_bytes=10**15, messages=10**10) for one in view.traffic)
    return replace(
        view, step=123_456_789, steps_asked=200_000_000, seconds=10**6, samples_per_s=12_345_678.0, loss=1.234e-12,
        workers=workers, traffic=traffic,
    )  # fmt: skip


def test_on_a_phone_no_number_is_cut_and_no_table_needs_scrolling_sideways(
    browser: Any, dashboard: Dashboard, shown: Shown
) -> None:
    shown.view = long_view()
    opened(browser, dashboard.url, 390, 844)
    awaited(browser, lambda: "123,456,789" in text_of(browser, "now"), "the long numbers")
    assert browser.execute_script(CUT) == []
    named = browser.execute_script(
        "return [...document.querySelectorAll('#workers td')].slice(0, 7)"
        ".map((one) => getComputedStyle(one, '::before').content)"
    )
    names = ("steps", "steps/s", "compute, ms", "waited", "waits for", "sent", "messages")
    assert named == [f'"{name}"' for name in names], "every number has its column's name beside it"


@pytest.mark.parametrize("strategy", ["ps servers=2", "mirrored"])
def test_cards_are_as_high_as_what_they_show(
    browser: Any, shown: Shown, dashboard: Dashboard, strategy: str, tmp_path: Path
) -> None:
    """What is below the last line of a card, in pixels; cards in one row are as high as the highest of them."""
    changes = {} if strategy.startswith("ps") else {"servers": (), "staleness": Staleness()}
    shown.view = run_view(strategy=strategy, **changes)
    opened(browser, dashboard.url)
    blanks = browser.execute_script(BLANKS)
    whole = (
        "now",
        "wrong",
        "loss",
        "metrics",
        "throughput",
        "workers",
        "servers",
        "waits",
        "staleness",
        "notes",
    )
    assert {key: blank for key, blank in blanks.items() if key in whole and blank > 40} == {}
    assert ("servers" in blanks) == strategy.startswith("ps"), "what a strategy does not have takes no room"
    notes = browser.execute_script("return document.getElementById('notes').getBoundingClientRect().height")
    assert notes < 50, "one line"
    shown.view = replace(shown.view, phase=Phase.STARTING, curves=(), notes=())
    awaited(browser, lambda: browser.execute_script(HIDDEN) is True, "the empty states")
    assert {
        key: blank for key, blank in browser.execute_script(BLANKS).items() if key in whole and blank > 60
    } == {}


def test_a_report_opens_as_a_file_without_a_server(browser: Any, shown: Shown, tmp_path: Path) -> None:
    from manyhands.observe.draw.page import report

    path = tmp_path / "report.html"
    path.write_text(report(shown.view))
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(path.as_uri())
    assert "120 of 400" in text_of(browser, "now")
    assert complaints(browser) == []


def test_a_comparison_on_a_phone_is_whole(browser: Any, tmp_path: Path) -> None:
    from manyhands.lab.compare.compare_report import report
    from manyhands.lab.compare.comparison import parse_strategies
    from manyhands.lab.compare.figures import figures
    from manyhands.lab.compare.findings import paragraph

    strategies = parse_strategies(
        "mirrored; allreduce algorithm=hierarchical; ps servers=2 consistency=bounded:16"
    )
    runs = [measured(place, repeat) for place in range(3) for repeat in range(2)]
    found = figures([(strategy, 2) for strategy in strategies], runs, None, 5)
    made = ("digits under 3 strategies", "manyhands compare digits", {"cores": "2"})
    path = tmp_path / "report.html"
    path.write_text(report(found, paragraph(found), *made))
    sized(browser, 390, 844)
    browser.get(path.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    assert browser.execute_script(CUT) == []


SCROLLS = """
  const one = document.querySelector("#waits .fill"), style = getComputedStyle(one);
  return { more: one.scrollHeight > one.clientHeight && one.scrollWidth > one.clientWidth,
           bars: one.offsetWidth > one.clientWidth && one.offsetHeight > one.clientHeight,
           shades: style.backgroundAttachment.split(", ").filter((word) => word === "scroll").length };
"""


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_a_part_that_scrolls_shows_it_on_a_phone_too(
    browser: Any, dashboard: Dashboard, shown: Shown, width: int, height: int
) -> None:
    shown.view = run_view(workers=24)
    opened(browser, dashboard.url, width, height)
    assert browser.execute_script(SCROLLS) == {"more": True, "bars": True, "shades": 4}


def test_a_page_that_is_open_before_the_run_waits_for_its_first_step(
    browser: Any, dashboard: Dashboard, shown: Shown
) -> None:
    shown.view = starting_view()
    opened(browser, dashboard.url)
    assert "Waiting for the first step." in text_of(browser, "loss")
    shown.view = run_view()
    awaited(browser, lambda: "aiting for the first step" not in text_of(browser, "main"), "the first step")
