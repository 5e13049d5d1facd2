"""What the Python interface says of arguments that cannot be meant."""

import comfyui_specar as specar
import pytest


@pytest.fixture(scope="module")
def model():
    return specar.load_model(specar.bundled("default"))


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"method": "sjd"}, TypeError, r"'sjd'.*methods\.SJD\(\).*NextToken"),
    ({"method": specar.methods.SJD}, TypeError, r"methods\.SJD\(\)"),
    ({"method": specar.methods.DraftTree(None)}, TypeError, "DraftTree.*drafter.*load_drafter"),
    ({"method": specar.methods.CoolSD(None)}, TypeError, "drafter.*load_drafter"),
    ({"seed": -1}, ValueError, "seed.*-1.*0 to 18446744073709551615"),
    ({"seed": 2**64}, ValueError, "seed.*0 to"),
])
def test_what_cannot_be_meant_is_refused_before_anything_runs(model, given, error, message):
    with pytest.raises(error, match=message):
        specar.sample(model, model.encode_prompt("star"), **given)


def test_the_package_lists_its_names():
    assert {"sample", "load_model", "methods", "acceptance_map"} <= set(dir(specar))
