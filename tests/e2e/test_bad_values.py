"""Values that cannot work: the message names the widget or file, and the next prompt works."""

import pytest

CASES = {
    "sjd_acceptance_map": [
        ("top_k", 60000),
        ("top_k", -2),
        ("window", 5000),
        ("window", -1),
        ("cfg", 0.5),
        ("threshold", 0.0),
        ("temperature", -0.5),
        ("top_p", 1.5),
        ("refinement", "nonsense"),
        ("initialisation", "nonsense"),
        ("metric", "nonsense"),
        ("dtype", "fp4"),
        ("model_name", "not_there.safetensors"),
    ],
    "text_to_picture": [("top_k", 60000), ("cfg", 0.5), ("width", 7), ("batch_size", 0)],
}


@pytest.mark.parametrize(
    ("name", "widget", "value"), [(name, *case) for name, cases in CASES.items() for case in cases])
def test_bad_value_is_refused_by_name(comfy, name, widget, value):
    good = comfy.workflow(name, seed=400)
    bad = comfy.workflow(name, seed=400, **{widget: value})
    assert bad != good, f"no node of {name} has a widget {widget}"
    run = comfy.run(bad)
    assert run.outcome in ("rejected", "error")
    assert widget in run.message() or str(value) in run.message()
    assert comfy.run(good).outcome == "success"
