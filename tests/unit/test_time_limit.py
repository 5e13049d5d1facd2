"""A test that hangs is named, wherever it hangs."""

import subprocess
import sys
from pathlib import Path

import pytest

from ..support.patience import PATIENCE

HANGS = {
    "python": "import time\n\ndef test_that_hangs():\n    time.sleep(600)\n",
    # One call of C that holds the interpreter's lock: no signal is handled, and no thread runs.
    "lock": "import math\n\ndef test_that_hangs():\n    math.prod(range(1, 10 ** 7))\n",
}


def test_limits(pytestconfig):
    """The longest wait of a test ends before its limit does, and what needs no lock comes last."""
    limits = float(pytestconfig.getini("timeout")), float(pytestconfig.getini("faulthandler_timeout"))
    assert PATIENCE < limits[0] < limits[1]
    assert pytestconfig.getini("faulthandler_exit_on_timeout") is True


@pytest.mark.parametrize("where", HANGS)
def test_a_hang_is_named(where, tmp_path):
    (tmp_path / "test_hang.py").write_text(HANGS[where], encoding="utf-8")
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    pytest_here = [sys.executable, "-m", "pytest", "-c", pyproject, "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    limits = ["-otimeout=1", "-ofaulthandler_timeout=3"]
    done = subprocess.run([*pytest_here, *limits, tmp_path], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    assert "test_that_hangs" in done.stdout + done.stderr
