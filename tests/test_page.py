"""The live page in a real browser: what somebody who opens it sees and can do.

    pytest tests/test_page.py

Debian's chromium (or any other that is installed) without a window. Two ranks serve: a base step
exchanges by all_to_all, a shift step by all_reduce, and that is how the page must show them.
"""
import re
import shutil

import pytest

from server import Server, needs_proc, wait_for
from stress import metrics

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)
pytestmark = [needs_proc, pytest.mark.skipif(not CHROMIUM, reason="needs chromium")]

THRESHOLD = 64                          # a burst of 24 prompts is more, 24 answers are fewer tokens
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
KEY = "a secret"


@pytest.fixture(scope="module")
def server():
    with Server("--nproc", 2, "--threshold", THRESHOLD, "--kv-blocks", 600,
                "--explain").ready() as server:
        yield server
        assert server.stop() == 0
        assert server.err == []


@pytest.fixture(scope="module")
def guarded():
    """A server with a key and with a threshold that nobody may move."""
    with Server("--nproc", 2, "--threshold", THRESHOLD, "--kv-blocks", 600, "--api-key", KEY,
                "--fixed-threshold").ready() as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """visit(server): its page, ready. Afterwards: no error in it, nothing asked of anybody else."""
    contexts, faults, asked = [], [], []

    def go(server, viewport=DESKTOP, ready="#ownership td", **options):
        contexts.append(browser.new_context(viewport=viewport, **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(error))
        page.on("request", lambda request: asked.append((request.url, server.url)))
        page.goto(server.url)
        page.wait_for_selector(ready)
        return page

    yield go
    for context in contexts:
        context.close()
    assert not faults
    assert all(url.startswith((home, "data:")) for url, home in asked), asked


def burst(page):
    """24 requests at once, until the last one is done."""
    page.click("#burst")
    says(page, "#status", "burst: 0 requests of 24 left")
    says(page, "#load", "0 running, 0 waiting")


def says(page, selector, text):
    """Wait until the element contains the text."""
    playwright.expect(page.locator(selector)).to_contain_text(text, timeout=60_000)


def collectives(page):
    """The table of exchanges: a list of cells for each."""
    return page.eval_on_selector_all("#collectives tbody tr", """rows => rows.map(
        row => [...row.cells].map(cell => cell.textContent))""")


def click_bar(page, mode):
    """Click the newest bar of that mode; its exchanges, once they are there."""
    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.evaluate("""mode => [...document.querySelectorAll(`#timeline rect.${mode}`)].at(-1)
        .getBoundingClientRect().toJSON()""", mode)
    page.mouse.click(box["x"] + box["width"] / 2, box["bottom"] - 2)
    says(page, "#inside-step", f"{mode} mode")
    page.wait_for_selector("#collectives td")
    return collectives(page)


def test_text_streams(visit, server):
    """Text comes in pieces, after the prompt, and is never taken for HTML."""
    page = visit(server)
    page.evaluate("""() => {
        window.lengths = [];
        const answer = document.getElementById("answer");
        new MutationObserver(() => lengths.push(answer.textContent.length))
            .observe(answer, {childList: true});
    }""")
    page.fill("#prompt", "Once upon a time, a small fox <img src=x>")
    page.press("#prompt", "Enter")
    says(page, "#status", "done")
    assert page.text_content("#answer").startswith("Once upon a time, a small fox <img src=x>")
    assert page.locator("#answer img").count() == 0
    lengths = page.evaluate("lengths")
    assert lengths == sorted(lengths) and len(set(lengths)) > 10, "it did not come bit by bit"


def test_errors_are_said(visit, server):
    """What the server refuses is shown in its words, and the next request takes it away."""
    page = visit(server)
    page.fill("#prompt", "")
    page.click("#send")
    says(page, "#error", "prompt is empty")
    page.fill("#prompt", "A")
    page.click("#send")
    says(page, "#status", "done")
    assert page.text_content("#error") == ""


def test_both_modes_show_and_open(visit, server):
    """A burst has steps of both colours; a click shows a step's exchanges, rank by rank."""
    page = visit(server)
    burst(page)
    base, shift = (page.locator(f"#timeline rect.{mode}") for mode in ("base", "shift"))
    assert base.count() and shift.count()
    fills = [bars.first.evaluate("bar => getComputedStyle(bar).fill") for bars in (base, shift)]
    assert fills[0] != fills[1]
    says(page, "#timeline", f"base above N = {THRESHOLD}")

    base = click_bar(page, "base")
    assert {row[1] for row in base} >= {"qkv all_to_all", "attention all_to_all"}
    assert not any("all_reduce" in row[1] for row in base)
    shift = click_bar(page, "shift")
    assert {row[1] for row in shift} >= {"o all_reduce", "mlp all_reduce"}
    for _, what, ranks, before, after, sent, start, took, why in base + shift:
        assert ranks == "0 1" and why, what
        assert re.fullmatch(r"\(\d+(, \d+)*\)", before) and re.fullmatch(r"\(\d+(, \d+)*\)", after)
        assert re.fullmatch(r"[\d.]+ (B|KB|MB)", sent)
        assert int(start.replace(",", "")) >= 0 and int(took.replace(",", "")) >= 0

    page.select_option("#rank", "1")
    assert [row[1] for row in collectives(page)] == [row[1] for row in shift]
    assert page.locator("#lanes rect.all_reduce").count() >= 2 * len(
        [row for row in shift if "all_reduce" in row[1]])


def test_a_long_prompt(visit, server):
    """It is read in one or a few large steps, in base mode."""
    page = visit(server)
    before = len(server.steps())
    page.click("#long")
    says(page, "#status", "was read")
    says(page, "#load", "0 running")
    tokens = [int(re.search(r"(\d+) tokens", line.text)[1]) for line in server.steps()[before:]]
    assert max(tokens) > 300
    says(page, "#step", "shift mode")
    assert page.locator("#timeline rect.base").count()


def test_the_slider_moves_the_threshold(visit, server):
    """Left end: every step in base mode; right end: in shift mode; by the server's own /metrics."""
    def modes():
        before = metrics(server)
        burst(page)
        after = metrics(server)
        return {mode for mode in ("base", "shift") if after[f'steps_total{{mode="{mode}"}}']
                > before.get(f'steps_total{{mode="{mode}"}}', 0)}

    page = visit(server)
    page.focus("#slider")
    page.keyboard.press("Home")
    playwright.expect(page.locator("#threshold")).to_have_text("0")
    says(page, "#switch", "base always")
    assert modes() == {"base"}
    says(page, "#step", "base mode")
    page.focus("#slider")
    page.keyboard.press("End")
    says(page, "#threshold", "2048")
    assert modes() == {"shift"}
    says(page, "#step", "shift mode")
    page.click("#auto")                                        # back to what it was started with
    says(page, "#switch", f"shift up to {THRESHOLD} tokens")
    burst(page)
    assert page.locator("#timeline rect.base").count()


def test_keyboard_alone(visit, server):
    """Arrow keys choose a step and say which it is; Enter opens it."""
    page = visit(server)
    burst(page)
    timeline = page.locator("#timeline")
    timeline.focus()
    newest = int(timeline.get_attribute("aria-valuenow"))
    for key, number in (("ArrowLeft", newest), ("ArrowLeft", newest - 1), ("ArrowRight", newest)):
        page.keyboard.press(key)
        assert timeline.get_attribute("aria-valuenow") == str(number)
        assert timeline.get_attribute("aria-valuetext").startswith(f"step {number}, ")
    page.keyboard.press("Enter")
    says(page, "#inside-step", f"Step {newest}, ")
    page.wait_for_selector("#collectives td")
    page.click("#newest")
    says(page, "#step", "Latest: ")


def test_cache_and_owners(visit, server):
    """The map counts the blocks, in words too; the table has a line for each rank."""
    page = visit(server)
    page.click("#burst")
    wait_for(lambda: re.match(r"[1-9]\d* of 600 blocks in use by [1-9]",
                              page.get_attribute("#map", "aria-label")), 60, "blocks in use")
    says(page, "#status", "burst: 0 requests of 24 left")
    says(page, "#map-words", "0 of 600 blocks in use by 0 requests")
    colors = page.evaluate("""() => {
        const map = document.getElementById("map");
        const {data} = map.getContext("2d").getImageData(0, 0, map.width, map.height);
        return new Set(new Uint32Array(data.buffer)).size;
    }""")
    assert colors >= 3, "free blocks, cached ones and the ground"
    rows = page.eval_on_selector_all("#ownership tbody tr", """rows => rows.map(
        row => [...row.cells].map(cell => cell.textContent))""")
    assert [row[0] for row in rows] == ["0", "1"]
    assert [row[4] for row in rows] == ["0", "1"], "rank s of sp 2 attends with block s"
    assert [row[7] for row in rows] == ["0-1", "0-1"], "and stores both"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_width(visit, server, scheme):
    """Nothing sticks out sideways, before and after a step is opened; dark is dark."""
    page = visit(server, PHONE, color_scheme=scheme)
    burst(page)
    click_bar(page, "shift")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground))) < 128) == (scheme == "dark")


def test_key_and_fixed_threshold(visit, guarded):
    """The page needs no key, but asks for it; a wrong one, or none, is asked for again."""
    page = visit(guarded, ready="#key-dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key", "a guess")
    page.keyboard.press("Enter")
    says(page, "#key-title", "not the right one")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#ownership td")
    assert page.is_disabled("#slider") and page.is_disabled("#auto")
    page.click("#send")
    says(page, "#status", "done")
    page.reload()                                              # kept for the tab
    page.wait_for_selector("#ownership td")
    assert not page.locator("#key-dialog[open]").count()
