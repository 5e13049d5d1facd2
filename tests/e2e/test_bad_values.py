"""Values that cannot work: the message names the widget or file."""

import pytest

CASES = {
    "05 Acceptance map": [
        ("top_k", 60000),
        ("top_k", -2),
        ("window", 5000),
        ("window", 300),  # wider than the image
        ("window", -1),
        ("cfg", 0.5),
        ("threshold", 0.0),
        ("temperature", -0.5),
        ("top_p", 1.5),
        ("refinement", "nonsense"),
        ("initialisation", "nonsense"),
        ("metric", "nonsense"),
        ("text", "xyzzy plugh"),
        ("text", ""),
        ("dtype", "fp4"),
        ("model_name", "not_there.safetensors"),
    ],
    "21 Draft tree (EAGLE)": [
        ("structure", "nonsense"),
        ("depth", 0),
        ("nodes", 100_000),
        ("drafter_name", "not_there.safetensors"),
    ],
    "23 LANTERN": [("neighbours", 5000), ("ratio", 0.0), ("variant", "nonsense"), ("redraw", "nonsense")],
    "26 VVS": [("interval", 1), ("schedule", "nonsense"), ("path", "nonsense")],
    "15 Exact inside a mask": [("delta", -1.0), ("delta", float("nan")), ("steps", 0), ("schedule", "nonsense")],
    "31 Continuous tokens": [
        ("draft_length", 0),
        ("draft_length", 100_000),
        ("prefill", 2.0),
        ("prefill", float("nan")),
        ("tolerance", -1.0),
        ("tolerance", float("nan")),
        ("mode", "nonsense"),
        ("target_sees", "nonsense"),
        ("sigma", "nonsense"),
        ("guidance", "nonsense"),
        ("head_sampler", "nonsense"),
        ("head_steps", -1),
        ("cfg", 0.5),
        ("temperature", 0.0),
        ("text", ""),
    ],
    "33 Continuous, all methods": [("iterations", -1), ("iterations", 10**6)],
    "01 Text to image": [("top_k", 60000), ("cfg", 0.5), ("width", 7), ("batch_size", 0)],
}


@pytest.mark.parametrize(
    ("name", "widget", "value"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_bad_value_is_refused_by_name(comfy, name, widget, value):
    bad = comfy.workflow(name, seed=400, **{widget: value})
    assert bad != comfy.workflow(name, seed=400), f"no node of {name} has a widget {widget}"
    run = comfy.run(bad)
    # A workflow with another, sound output runs on for that one: what is refused then stands in the node errors.
    assert run.outcome in ("rejected", "error") or run.node_errors
    assert widget in run.message() or value and str(value) in run.message() or "prompt is empty" in run.message()


def test_the_server_works_after_all_that(comfy):
    assert comfy.run(comfy.workflow("05 Acceptance map", seed=401)).outcome == "success"
