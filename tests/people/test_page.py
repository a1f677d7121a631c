"""The status page in a real Chromium, on recorded numbers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.people import browser
from tests.people.browser import Browser
from tests.people.stand_in import StandIn, recorded, widened

EXECUTABLE = browser.found()
pytestmark = pytest.mark.skipif(
    EXECUTABLE is None, reason=f"no Chromium: none of {', '.join(browser.NAMES)} is installed"
)
ENTER = "document.getElementById('key').value = '{}'; document.querySelector('#key-form button').click()"
CLICK = "document.querySelector('[aria-label=\"{}\"]').click()"
HOSTILE = "<img src=x onerror=\"document.title='owned'\">'\"&"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    tab = Browser(EXECUTABLE, tmp_path_factory.mktemp("chromium"))
    yield tab
    tab.close()


@pytest.fixture
def serve(tab: Browser) -> Iterator[Callable[..., StandIn]]:
    servers: list[StandIn] = []

    def start(status: dict, **kwargs) -> StandIn:
        servers.append(StandIn(status, recorded("requests-1p1d"), **kwargs))
        tab.errors.clear()
        tab.size(1400, 1000)
        tab.open(servers[0].url + "/pd")
        return servers[0]

    yield start
    tab.open("about:blank")
    for server in servers:
        server.close()


def test_engines_paths_and_requests_are_drawn(tab: Browser, serve) -> None:
    status = recorded("status-1p1d")
    serve(status)
    tab.wait("document.querySelectorAll('#requests tbody tr').length > 3")
    assert tab.run("document.getElementById('state').textContent") == "ready"
    assert tab.run("document.querySelectorAll('.card').length") == 2
    assert f"{status['paths'][0]['gb_per_s']} GB/s" in tab.run(
        "document.getElementById('wires').textContent"
    )
    assert tab.run("document.querySelectorAll('#requests .bar rect.handoff').length") > 0
    assert tab.run("document.querySelectorAll('#ttft polyline').length") == 2
    tab.run("document.querySelector('#requests tbody button').click()")
    shown = tab.wait("document.querySelector('.detail')?.innerText")
    for event in ("prefill begin", "handoff end", "first token", "decode end", "to first token"):
        assert event in shown, event
    assert tab.errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_8p8d_fits(tab: Browser, serve, tmp_path, dark: bool) -> None:
    serve(widened(recorded("status-1p1d"), 8, 8))
    tab.size(1400, 1000, dark=dark)
    tab.wait("document.querySelectorAll('#wires path').length == 64")
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    bottom = "document.getElementById('box').getBoundingClientRect().bottom"
    assert tab.run(f"{bottom} <= innerHeight"), tab.run(bottom)
    overlaps = (
        "[...document.querySelectorAll('.cards')].some(column => [...column.children].some((c, i) "
        "=> i && c.getBoundingClientRect().top < column.children[i-1].getBoundingClientRect().bottom))"
    )
    assert not tab.run(overlaps)
    back = tab.run("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(20, 20, 19)" if dark else "rgb(251, 251, 250)")
    tab.screenshot(tmp_path / "page.png")
    assert tab.errors == []


def test_role_and_drain_are_buttons_and_work_by_keyboard(tab: Browser, serve) -> None:
    node = serve(widened(recorded("status-1p1d"), 2, 2))
    tab.wait("document.querySelectorAll('.card').length == 4")
    for _ in range(10):
        tab.press("Tab")
        if tab.run("document.activeElement.ariaLabel") == "Send prefill-0 decode work":
            break
    tab.press("Enter", "\r")
    tab.wait("document.querySelector('#decode [aria-label=\"prefill-0\"]') != null")
    assert node.posts == [("/pd/role", {"engine": "prefill-0", "role": "decode"})]
    assert tab.run("document.activeElement.ariaLabel") == "Send prefill-0 prefill work"
    tab.run(CLICK.format("Send decode-1 no new work"))
    tab.wait("document.querySelector('[aria-label=\"Send decode-1 work again\"]') != null")
    assert "draining" in tab.run("document.querySelector('[aria-label=\"decode-1\"]').innerText")
    assert node.posts[1:] == [("/pd/drain", {"engine": "decode-1", "drain": True})]
    assert "decode-1 is sent no new work" in tab.run("document.getElementById('said').textContent")
    assert tab.errors == []


def test_what_others_sent_is_shown_as_text(tab: Browser, serve) -> None:
    status = recorded("status-1p1d")
    status["model"] = HOSTILE
    status["counters"]["single_engine_reasons"] = {HOSTILE: 1}
    status["engines"][0] |= {"last_error": HOSTILE, "state": "dead"}
    node = serve(status)
    requests = copy.deepcopy(node.requests)
    requests["requests"][0]["id"] = HOSTILE
    requests["requests"][0]["requests"][0] |= {"request_id": HOSTILE, "reason": HOSTILE}
    node.requests = requests
    tab.wait("document.getElementById('requests').innerText.includes('onerror')")
    assert tab.run("document.getElementById('model').textContent") == HOSTILE
    tab.run("document.querySelector('#requests tbody button').click()")
    tab.wait("document.querySelector('.detail') != null")
    assert tab.run("document.querySelectorAll('main img').length") == 0
    assert tab.run("document.title").endswith(HOSTILE)
    assert tab.errors == []


def test_the_key_is_asked_for_and_kept_in_the_tab(tab: Browser, serve) -> None:
    serve(recorded("status-1p1d"), key="sesame")
    tab.wait("!document.getElementById('key-form').hidden")
    assert tab.run("document.getElementById('main').hidden")
    tab.run(ENTER.format("wrong"))
    tab.wait("document.getElementById('key-wrong').textContent != ''")
    tab.run(ENTER.format("sesame"))
    tab.wait("document.querySelectorAll('.card').length == 2")
    assert tab.run("sessionStorage.getItem('pdnode-key')") == "sesame"
    assert tab.run("localStorage.length") == 0
    tab.run("location.reload()")
    tab.wait("document.querySelectorAll('.card').length == 2")
    # A refused request is an entry in the browser's log whatever the page does.
    assert [error for error in tab.errors if "401" not in error] == []


def test_a_late_refusal_of_an_old_key_leaves_the_new_one(tab: Browser, serve) -> None:
    node = serve(recorded("status-1p1d"), key="sesame")
    tab.wait("!document.getElementById('key-form').hidden")
    node.held = ("/pd/requests", threading.Event())
    tab.run(ENTER.format("wrong"))
    tab.wait("document.getElementById('key-wrong').textContent != ''")
    tab.run(ENTER.format("sesame"))
    tab.wait("document.querySelectorAll('#requests tbody tr').length > 3")
    refused = "performance.getEntriesByType('resource').filter(e => e.responseStatus == 401).length"
    assert tab.run(refused) == 3
    node.held[1].set()
    tab.wait(f"{refused} == 4")
    assert tab.run("sessionStorage.getItem('pdnode-key')") == "sesame"
    assert tab.run("document.getElementById('key-form').hidden")


def test_an_engine_that_is_down_is_drawn_so(tab: Browser, serve) -> None:
    status = recorded("status-1p1d")
    status["engines"][1] |= {"state": "failed", "last_error": "it ended five times in a row"}
    serve(status)
    tab.wait("document.querySelectorAll('.card.down').length == 1")
    shown = tab.run("document.querySelector('.card.down').innerText")
    assert "five times" in shown
    assert "running" not in shown
    assert "KV" not in shown
    assert "running" in tab.run("document.querySelector('.card.ready').innerText")
    assert tab.run("document.querySelectorAll('#wires path.away').length") == 1
    assert tab.run("document.getElementById('state').textContent") == "1 of 2 engines down"
    assert tab.errors == []


def test_a_node_that_went_away_is_said_and_comes_back(tab: Browser, serve) -> None:
    node = serve(recorded("status-1p1d"))
    tab.wait("document.querySelectorAll('.card').length == 2")
    node.key = "nobody-knows"
    tab.wait("!document.getElementById('key-form').hidden")
    node.key = ""
    tab.run(ENTER.format("x"))
    tab.wait("!document.getElementById('main').hidden")
