"""One Chromium and one page of ComfyUI for the browser tests of a file."""

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.patience import PATIENCE

from .pages import Problems, open_page, setting, take_messages

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")  # while a page is open, no other test can run an event loop
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["SPECAR_CHROMIUM"], args=ARGUMENTS, timeout=1000 * PATIENCE
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")  # while a page is open, no other test can run an event loop
def opened(comfy, browser) -> tuple[Page, Problems]:
    # Other tests may have left values in the history that no browser can read (NaN).
    browser.new_context().request.post(f"{comfy.url}/history", data={"clear": True})
    return open_page(browser, comfy.url)


@pytest.fixture
def page(opened) -> Iterator[Page]:
    """The open page; the test fails if anything is reported meanwhile, to the console or to the user."""
    page, problems = opened
    assert not problems, "errors while the page opened"
    yield page
    for message in take_messages(page):
        problems.add(message)
    found = list(problems)
    problems.clear()
    assert not found


@pytest.fixture
def own_page(browser, comfy) -> Iterator[Page]:
    """A page for one test that leaves the front end in a state of its own: another mode, nodes being placed."""
    page, problems = open_page(browser, comfy.url)
    yield page
    page.close()
    assert not problems


@pytest.fixture
def renderer(page, request) -> Iterator[str]:
    """Which of ComfyUI's renderers draws the nodes: "canvas" or "vue" (as parametrized)."""
    setting(page, "Comfy.VueNodes.Enabled", request.param == "vue")
    yield request.param
    setting(page, "Comfy.VueNodes.Enabled", False)
