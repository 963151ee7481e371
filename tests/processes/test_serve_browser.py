"""The page of a served model in a real browser, headless: it is live, shows what was asked, and needs the token."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from browsing import CUT, awaited, browsing, coloured, complaints, needs_a_browser, sized, text_of
from manyhands.serving.model_server import ModelServer, ServeOptions
from manyhands.serving.torch_predictors import ImagePredictor
from manyhands.workloads.tasks.digits import ImageClassifier

pytestmark = needs_a_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browsing(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture
def server() -> Iterator[ModelServer]:
    torch.manual_seed(0)
    predictor = ImagePredictor(ImageClassifier(side=8, white=16, width=4))
    predictor.task = "digits"
    with ModelServer(predictor, "a model", ServeOptions(workers=2)) as running:
        yield running


def ask(server: ModelServer) -> int:
    image = str([[0] * 8] * 8)
    headers = {"Authorization": f"Bearer {server.token}"}
    request = urllib.request.Request(
        f"{server.address}/predict", f'{{"inputs": [{image}, {image}]}}'.encode(), headers
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        return int(answer.status)


def opened(browser: Any, server: ModelServer, width: int = 1280, height: int = 800) -> None:
    sized(browser, width, height)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(server.url)
    awaited(browser, lambda: text_of(browser, "line") == "connected", "the page to become live")
    awaited(browser, lambda: "What happened" in text_of(browser, "notes"), "its first content")


def test_the_page_is_live_and_shows_requests_and_deaths(browser: Any, server: ModelServer) -> None:
    opened(browser, server)
    awaited(browser, lambda: "all workers are there" in text_of(browser, "wrong"), "both workers")
    assert browser.title == "digits · served by 2 workers"
    assert browser.current_url == f"{server.address}/", "the token leaves the address"
    assert [ask(server) for _ in range(3)] == [200] * 3
    awaited(browser, lambda: "3 × 200" in text_of(browser, "notes"), "the requests to be shown")
    assert "ms" in text_of(browser, "now")
    assert "worker 1" in text_of(browser, "workers")
    os.kill(server.view().workers[0].pid, signal.SIGKILL)
    awaited(browser, lambda: "died and were replaced: 1" in text_of(browser, "notes"), "the death to be told")
    awaited(browser, lambda: "worker 3" in text_of(browser, "workers"), "the one that replaced it")
    assert complaints(browser) == []


def test_without_the_token_the_page_says_so_and_shows_nothing(browser: Any, server: ModelServer) -> None:
    browser.get("about:blank")
    browser.get(f"{server.address}/")
    awaited(browser, lambda: "token is missing or wrong" in text_of(browser, "line"), "the refusal")
    assert text_of(browser, "workers") == ""


CHARTS = """
  return ["latency", "throughput"].map((key) => {
    const box = document.querySelector("#" + key + " svg.chart").getBoundingClientRect();
    return [Math.round(box.width), Math.round(box.height)];
  });
"""


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_both_charts_have_the_same_proportions(
    browser: Any, server: ModelServer, width: int, height: int
) -> None:
    opened(browser, server, width, height)
    assert ask(server) == 200
    awaited(browser, lambda: "1 × 200" in text_of(browser, "notes"), "the request to be shown")
    latency, throughput = browser.execute_script(CHARTS)
    assert latency == throughput


SHADES = """
  const brightness = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).reduce((sum, one) => sum + Number(one), 0) / 3;
  const card = getComputedStyle(document.querySelector("section"));
  return [brightness(card.backgroundColor), brightness(card.color)];
"""
FREE = """
  const right = (one) => one.getBoundingClientRect().right, all = [...document.querySelectorAll("section")];
  const edge = Math.max(...all.map(right));
  const rows = Map.groupBy(all, (one) => Math.round(one.getBoundingClientRect().top));
  return Math.max(...[...rows.values()].map((row) => edge - Math.max(...row.map(right))));
"""


@pytest.mark.parametrize(("width", "height"), [(390, 844), (800, 600), (1280, 800)])
def test_it_fills_every_width_and_follows_light_and_dark(
    browser: Any, server: ModelServer, width: int, height: int
) -> None:
    opened(browser, server, width, height)
    assert ask(server) == 200
    awaited(browser, lambda: "1 × 200" in text_of(browser, "notes"), "the request to be shown")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(CUT) == []
    assert browser.execute_script(FREE) <= 1, "no row of cards ends before the others"
    for scheme, paper_is_bright in (("light", True), ("dark", False)):
        coloured(browser, scheme)
        paper, ink = browser.execute_script(SHADES)
        assert (paper > ink) is paper_is_bright
        assert abs(paper - ink) > 100, "what is written can be read"
    coloured(browser, "light")
