"""The page that a sidecar serves for people, in a real browser: it follows the job, on a desktop and on a phone.

RONDE_SCREENSHOTS=FOLDER keeps pictures of it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pathlib
import time
from typing import TYPE_CHECKING, Any, Callable

import pytest
from conftest import PATIENCE, RANKS, Job

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

DESKTOP, PHONE = (1200, 900), (390, 844)
# The most pages that a sidecar serves at a time (sidecar/src/admin/live).
VIEWERS_MAX = 32


def text(browser: Chrome, element: str) -> str:
    """The words of an element."""
    words: Any = browser.execute_script("return document.getElementById(arguments[0]).innerText", element)
    return str(words)


def await_text(browser: Chrome, element: str, fits: Callable[[str], bool]) -> str:
    """Waits until an element's words fit."""
    deadline = time.monotonic() + PATIENCE
    while not fits(words := text(browser, element)):
        assert time.monotonic() < deadline, f"{element} still says {words!r}"
        time.sleep(0.1)
    return words


def size(browser: Chrome, width: int, height: int) -> None:
    """Gives the page this size; a window could not be as narrow as a phone."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def keep_picture(browser: Chrome, name: str) -> None:
    """Keeps a picture where a folder is named for them."""
    if folder := os.environ.get("RONDE_SCREENSHOTS"):
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        assert browser.save_screenshot(f"{folder}/{name}.png")


def complaints(browser: Chrome) -> list[str]:
    """What the browser has complained of since the last call: violations of the policy, errors of the script."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_the_page_follows_a_job_to_its_end(browser: Chrome, job: Job) -> None:
    """Throughput grows, a rank that is waited for is named, and the end is said."""
    complaints(browser)
    size(browser, *DESKTOP)
    browser.get(job.pages[0] + "/")
    await_text(browser, "state", lambda words: words == "runs")
    await_text(browser, "sealed", lambda words: words.endswith("MB/s"))
    await_text(browser, "contributed", lambda words: words.endswith("MB/s"))
    plotted: Any = browser.execute_script("return document.getElementById('line-contributed').getAttribute('points')")
    assert plotted
    await_text(browser, "operations", lambda words: words.endswith("/s") and words != "0 /s")
    ranks = browser.find_elements("css selector", "#map .rank")
    assert [rank.text for rank in ranks] == [str(rank) for rank in range(RANKS)]
    assert "TLS_AES_128_GCM_SHA256" in text(browser, "map")
    time.sleep(5)
    keep_picture(browser, "runs")
    (job.folder / "stop").touch()
    await_text(browser, "state", lambda words: words == f"waits for rank {RANKS - 1}")
    waiting = text(browser, "waits")
    assert " has waited " in waiting
    assert f" for rank {RANKS - 1}" in waiting
    assert [rank.text for rank in browser.find_elements("css selector", "#map .rank.wait")] == [str(RANKS - 1)]
    keep_picture(browser, "waits")
    # A tensor's name is text: no element came of it, and no script ran.
    assert "<img" in text(browser, "waits")
    assert browser.find_elements("tag name", "img") == []
    assert browser.title.endswith("- ronde")
    (job.folder / "stop").unlink()
    await_text(browser, "state", lambda words: words == "runs")
    await_text(browser, "late", lambda words: f"rank {RANKS - 1}" in words)
    assert complaints(browser) == []
    assert job.end() == 0, job.output.read_text()
    await_text(browser, "state", lambda words: words.startswith("the sidecar has ended"))
    keep_picture(browser, "ended")


def test_the_page_of_another_sidecar_names_the_coordinator(browser: Chrome, job: Job) -> None:
    """Only the coordinator knows who is late."""
    size(browser, *DESKTOP)
    browser.get(job.pages[1] + "/")
    await_text(browser, "late", lambda words: "known to sidecar 0" in words)
    await_text(browser, "map", lambda words: "this page" in words)
    assert "the coordinator" in text(browser, "waits")


def test_the_page_of_another_sidecar_shows_the_waits_of_its_ranks(browser: Chrome, job: Job) -> None:
    """In steps of a schedule the coordinator does not know them."""
    browser.get(job.pages[1] + "/")
    await_text(browser, "state", lambda words: words == "runs")
    page = {"sidecar": 1, "coordinator": 0, "waited_for_us": [], "stats": {"waited_here_us": {"3": 2_000_000}}}
    found = browser.execute_script("late(arguments[0]); return document.getElementById('late').innerText;", page)
    assert "rank 3" in found
    assert "2.0 s" in found


def judged(browser: Chrome, **changes: object) -> list[str]:
    """How the page judges a status page with these changes: a style and a sentence."""
    request = {"rank": 3, "name": "allreduce.w", "collective": "ALLREDUCE", "ordered": False, "scheduled": False}
    page = {
        "phase": "active",
        "sidecar": 1,
        "coordinator": 0,
        "pending_requests": [request | {"age_ms": 13_000} | changes],
        **{name: [] for name in ("suspect_sidecars", "suspect_ranks", "links", "ranks_missing", "waiting_tensors")},
    }
    judgement: list[str] = browser.execute_script("return judge(arguments[0])", page)
    return judgement


def test_a_request_that_waits_comes_first_on_the_page(browser: Chrome, job: Job) -> None:
    """Also of a sidecar that is not the coordinator, which does not know the missing ranks."""
    browser.get(job.pages[1] + "/")
    assert judged(browser) == ["wait", "rank 3 has waited in allreduce.w for 13 s"]
    words = "allreduce.w has been in flight under a schedule for 13 s"
    assert judged(browser, ordered=True, scheduled=True) == ["wait", words]
    of_no_delay: list[dict[str, object]] = [{"age_ms": 3_900}, {"ordered": True}, {"collective": "JOIN"}]
    of_no_delay += [{"name": "message.any.3.0.0"}]
    for changes in of_no_delay:
        assert judged(browser, **changes) == ["good", "runs"], changes


def test_a_page_that_was_refused_its_events_tries_again(browser: Chrome, job: Job) -> None:
    """A browser does not connect again by itself after an answer that is an error."""
    with contextlib.ExitStack() as others:
        for _ in range(VIEWERS_MAX):
            viewer = http.client.HTTPConnection(job.pages[0].removeprefix("http://"), timeout=60)
            viewer.request("GET", "/events")
            # It keeps the connection open.
            answer = others.enter_context(viewer.getresponse())
            assert answer.status == 200
        browser.get(job.pages[0] + "/")
        await_text(browser, "state", lambda words: "too many viewers" in words)
    await_text(browser, "state", lambda words: words == "runs")


def test_nothing_is_cut_off_on_a_phone(browser: Chrome, job: Job) -> None:
    """The page is as wide as the screen, one section below the other."""
    size(browser, *PHONE)
    browser.get(job.pages[0] + "/")
    await_text(browser, "state", lambda words: words == "runs")
    await_text(browser, "sealed", lambda words: words.endswith("B/s"))
    wide = "const root = document.documentElement; return [root.scrollWidth, root.clientWidth]"
    scrolled, shown = browser.execute_script(wide)
    # The rest is a scroll bar.
    assert scrolled == shown > PHONE[0] - 20
    lefts = {section.location["x"] for section in browser.find_elements("tag name", "section")}
    assert len(lefts) == 1
    time.sleep(3)
    keep_picture(browser, "phone")


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_proxys_prefix_is_kept(browser: Chrome, prefix: str, slash: str) -> None:
    """The stream is asked for below the prefix, whether the address ends with a slash or not."""
    size(browser, *DESKTOP)
    browser.get(prefix + slash)
    await_text(browser, "state", lambda words: words == "runs")
