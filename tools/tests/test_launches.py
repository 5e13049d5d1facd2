"""A ratchet: launches of a pass, counted without a GPU, may only become fewer.

Who saves some writes it down, so that they stay saved: python -m tools.benchmarks launches
"""

import pytest
from comfyui_specar.tools.benchmarks import launches

TABLE = launches.read()["cases"]


def test_the_table_has_every_case():
    assert TABLE.keys() == launches.CASES.keys()


@pytest.mark.parametrize("name", launches.CASES)
def test_a_pass_takes_no_more_launches_than_the_table_says(name):
    found = launches.launches(name)
    assert found.total() <= TABLE[name], found.most_common()
    if not name.startswith("mar"):
        assert found["logits::_probabilities"] > 0, "kernels of our own are among them"
