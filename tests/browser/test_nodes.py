"""What our nodes say, offer and look like in the real front end."""

import json
import re

import pytest
from playwright.sync_api import Page

from .pages import (
    BY_CHOICE,
    FINISHED,
    READY,
    RENDERERS,
    ROOT,
    close_messages,
    load,
    open_page,
    queue,
    run,
    screenshot,
    set_widget,
)

pytestmark = [pytest.mark.browser, pytest.mark.whole]

START, SJD = "01 Text to image", "07 Acceptance map"
SAID = """([type, part]) => app.graph._nodes.filter(node => node.type === type)
    .map(node => node.widgets.find(widget => widget.name === 'specar_result'))
    .map(widget => widget?.box.querySelector('.specar-' + part).textContent ?? '')"""
HEIGHT = "() => nodeOf('SpecARSampler').size[1]"
RESULT = "document.querySelector('.specar-result:not([hidden])')?.textContent"


def open_template(page: Page, name: str) -> None:
    load(page, ROOT / "workflows" / f"{name}.json")


def set_prompts(page: Page, text: str) -> None:
    page.evaluate(
        """text => app.graph._nodes.filter(node => node.type === 'CLIPTextEncode')
        .forEach(node => { node.widgets[0].value = text; })""",
        text,
    )


@pytest.mark.parametrize("renderer", RENDERERS, indirect=True)
def test_words_that_the_model_ignores_stand_on_the_prompt_and_on_the_sampler(page, renderer):
    open_template(page, START)
    set_prompts(page, "an aple, appel, apple")
    run(page)
    [shown] = page.evaluate(SAID, ["CLIPTextEncode", "notices"])
    assert page.evaluate(SAID, ["SpecARSampler", "notices"]) == [shown]
    screenshot(page, f"notices-{renderer}")
    assert shown == "The model ignores these words: aple (apple?), appel (apple?)."
    saved = page.evaluate("() => nodeOf('CLIPTextEncode').serialize().widgets_values")
    assert saved == ["an aple, appel, apple"], "they are not part of the workflow"
    set_prompts(page, "an apple")
    run(page)
    for kind in ("CLIPTextEncode", "SpecARSampler"):
        assert page.evaluate(SAID, [kind, "notices"]) == [""]


@pytest.mark.parametrize("renderer", RENDERERS, indirect=True)
def test_an_error_stands_on_its_node_until_the_next_run(page, renderer):
    open_template(page, START)
    set_widget(page, "SpecARSampler", "cfg", 0.5)
    queue(page)
    page.wait_for_function(FINISHED)
    page.wait_for_function("() => document.querySelector('.specar-error:not(:empty)')?.checkVisibility()")
    assert page.evaluate(SAID, ["SpecARSampler", "error"]) == [
        "cfg is 0.5, but must be -1 (auto: the model's own) or at least 1 (no guidance)."
    ]
    close_messages(page)
    screenshot(page, f"error-{renderer}")
    set_widget(page, "SpecARSampler", "cfg", 2)
    run(page)
    assert page.evaluate(SAID, ["SpecARSampler", "error"]) == [""]


@pytest.mark.parametrize("renderer", RENDERERS, indirect=True)
def test_why_a_prompt_is_refused_stands_on_its_nodes(page, renderer):
    open_template(page, START)
    set_widget(page, "SpecARLoadCheckpoint", "model_name", "lost.safetensors")
    page.evaluate("() => nodeOf('SpecARSampler').disconnectInput(1)")
    queue(page)
    page.wait_for_function("() => document.querySelectorAll('.specar-error:not(:empty)').length === 2")
    [lost], [missing] = (page.evaluate(SAID, [kind, "error"]) for kind in ("SpecARLoadCheckpoint", "SpecARSampler"))
    assert lost.startswith("lost.safetensors is not in ") and missing == "Required input is missing: positive."
    close_messages(page)
    screenshot(page, f"refused-{renderer}")


@pytest.mark.parametrize("renderer", RENDERERS, indirect=True)
def test_a_preview_goes_once_the_image_is_there(page, renderer):
    open_template(page, START)
    before = page.evaluate(HEIGHT)
    set_widget(page, "SpecARSampler", "seed", 7000 + len(renderer))  # neither's run is cached
    assert "b_preview_with_metadata" in run(page)
    page.wait_for_function("""() => {
        const node = nodeOf('SpecARSampler');
        return !node.imgs?.length && !document.querySelector(`[data-node-id="${node.id}"] img`);
    }""")
    page.wait_for_function(f"most => ({HEIGHT})() <= most", arg=before + 60)  # for the result
    screenshot(page, f"no-preview-{renderer}")


@pytest.mark.parametrize("renderer", RENDERERS, indirect=True)
def test_what_a_run_took_stays_on_its_sampler(page, renderer):
    open_template(page, SJD)
    saved = "() => nodeOf('SpecARSJDSampler').serialize().widgets_values.slice(1)"  # without the seed
    before = page.evaluate(saved)
    for seed in (11, 12):  # the second run's text replaces the first one's
        set_widget(page, "SpecARSJDSampler", "seed", seed)
        run(page)
        page.wait_for_function("() => document.querySelector('.specar-result:not([hidden])')?.checkVisibility()")
        details = page.locator(".specar-result:not([hidden]) details")
        assert re.fullmatch(r"\d+\.\dx fewer passes, \S+\s(s|min)", details.locator("summary").inner_text())
        rest = details.locator("div").text_content()
        assert rest and re.fullmatch(r"\d+ passes instead of 256; 256 x 256 pixels; SJD, .+", rest)
        names = page.evaluate("() => nodeOf('SpecARSJDSampler').widgets.map(widget => widget.name)")
        assert names.count("specar_result") == 1 and "$$node-text-preview" not in names
    assert page.evaluate(saved) == before, "it is not part of the workflow"
    screenshot(page, f"result-{renderer}")


def test_what_a_run_took_comes_back_with_its_tab_and_its_page(own_page, tmp_path):
    page = own_page
    load(page, ROOT / f"workflows/{SJD}.json", name="one")
    set_prompts(page, "apple, xyz")  # its notice stays, too
    run(page)
    page.wait_for_function(f"() => {RESULT}?.includes('instead of 256') && {RESULT}.includes('xyz')")
    took = page.evaluate(f"() => {RESULT}")
    load(page, ROOT / f"workflows/{START}.json", name="two")
    page.wait_for_function("() => app.graph._nodes.some(node => node.type === 'SpecARSampler')")
    assert not page.evaluate(f"() => {RESULT}")
    page.locator(".workflow-tab", has_text="one").first.click()
    page.wait_for_function("() => app.graph._nodes.some(node => node.type === 'SpecARSJDSampler')")
    page.wait_for_function(f"took => {RESULT} === took", arg=took)
    same = tmp_path / "same.json"
    same.write_text(json.dumps(page.evaluate("() => app.graph.serialize()")), encoding="utf-8")
    load(page, same, name="opened again")
    page.wait_for_timeout(500)
    assert not page.evaluate(f"() => {RESULT}")
    page.locator(".workflow-tab", has_text="one").first.click()
    page.wait_for_function(f"took => {RESULT} === took", arg=took)
    page.wait_for_timeout(1500)  # for the front end to keep its tabs
    page.reload(wait_until="domcontentloaded")
    page.wait_for_function(READY)
    page.wait_for_function(f"took => {RESULT} === took", arg=took)


def test_an_interrupted_run_says_so(own_page):
    page = own_page
    load(page, ROOT / "workflows/02 Four images at once.json")
    queue(page)
    page.wait_for_function(f"() => {RESULT}?.includes('tokens')")
    page.evaluate("() => app.api.interrupt()")
    page.wait_for_function(FINISHED)
    page.wait_for_function(f"() => {RESULT}?.includes('interrupted')")


def test_an_interruption_may_come_without_its_node(own_page):
    """As newer front ends tell it: then its prompt says whether the run on the page is meant."""
    page = own_page
    load(page, ROOT / "workflows/02 Four images at once.json")
    page.evaluate(
        """() => {
            window.shown = [];
            const text = () => document.querySelector('.specar-result:not([hidden])')?.textContent ?? '';
            const tell = (detail) => {
                app.api.dispatchEvent(new CustomEvent('execution_interrupted', { detail }));
                window.shown.push(text().includes('interrupted'));
            };
            let prompt = null;
            app.api.addEventListener('execution_start', ({ detail }) => { prompt = detail.prompt_id; });
            app.api.addEventListener('specar.run', () => {
                if (window.shown.length || !text().includes('tokens')) return;
                [{ prompt_id: 'another' }, { prompt_id: prompt }].forEach(tell);
            });
            app.api.addEventListener('execution_success', () => tell({ prompt_id: prompt }));
        }"""
    )
    queue(page)
    page.wait_for_function("() => window.shown.length === 3")
    assert page.evaluate("() => window.shown") == [False, True, False]


def test_what_a_run_took_is_told_again_of_a_cached_run(browser, comfy):
    """By a newer ComfyUI, to a browser that did not see the run."""
    for number in range(2):
        page, problems = open_page(browser, comfy.url)
        load(page, ROOT / f"workflows/{START}.json")
        run(page)
        if number == 0 or page.evaluate(BY_CHOICE):
            page.wait_for_function(f"() => {RESULT}?.includes('fewer passes')")
        page.close()
        assert not problems


@pytest.mark.parametrize("renderer", RENDERERS, indirect=True)
def test_while_a_run_goes_on_its_numbers_stand_in_one_line(page, renderer):
    open_template(page, "02 Four images at once")
    set_widget(page, "SpecARSampler", "seed", 100 + len(renderer))  # neither's run is cached
    page.evaluate("""() => {
        window.lines = [];
        window.line = () => widgetOf('SpecARSampler', 'specar_result').element.textContent;
        app.api.addEventListener('specar.run', () => window.lines.push(window.line()));
    }""")
    run(page)
    lines = page.evaluate("() => window.lines")
    assert lines and all(re.match(r"4 images, \d+ pass(es)?, \d+ of 256 tokens", line) for line in lines)
    page.wait_for_function("() => window.line().includes('fewer passes')")
    screenshot(page, f"batch-{renderer}")


@pytest.mark.parametrize("renderer", RENDERERS, indirect=True)
def test_compare_runs_shows_its_chart_instead_of_the_picture(page, renderer):
    open_template(page, "19 Compare three methods")
    run(page)
    page.wait_for_function("() => document.querySelectorAll('.specar-chart tbody tr').length === 3")
    texts = page.locator(".specar-chart tbody tr").all_inner_texts()
    assert "256" in texts[0] and [text.split()[-1] for text in texts] == ["same"] * 3
    number = page.evaluate("() => nodeOf('SpecARCompareTraces').id")
    assert not page.locator(f'[data-node-id="{number}"] img:visible').count()
    screenshot(page, f"chart-{renderer}")


def test_a_model_dropped_on_the_canvas_is_offered_the_sampler(page):
    suggested = page.evaluate("() => LiteGraph.slot_types_default_out.AR_MODEL")
    assert suggested[1:4] == ["SpecARSampler", "SpecAREmptyLatent", "SpecARLoadDrafter"]
    assert "SpecAREmptyLatent" in page.evaluate("() => LiteGraph.slot_types_default_in.LATENT")


@pytest.mark.parametrize("renderer", RENDERERS, indirect=True)
def test_a_removed_widget_keeps_its_place_unseen(page, renderer):
    """Workflows store widgets by position."""
    open_template(page, SJD)
    number, every, drawn, saved = page.evaluate("""() => {
        const node = nodeOf('SpecARSJDSampler'), name = widget => widget.name;
        return [node.id, node.widgets.map(name), node.widgets.filter(widget => node.isWidgetVisible(widget)).map(name),
            node.serialize().widgets_values];
    }""")
    assert "front_drafts" in every and "front_drafts" not in drawn and "window" in drawn
    assert saved[every.index("front_drafts")] == 1
    if renderer == "vue":
        node = page.locator(f'[data-node-id="{number}"]')
        node.get_by_text("window").first.wait_for()
        assert not node.get_by_text("front_drafts").count()
