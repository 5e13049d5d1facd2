"""The kernels from compiled code, in an environment of their own."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Small kernels, also at the sizes of released models; `bash tools/ttsem.sh` also runs the slow cases.
QUICK = (
    "tests/ttsem",
    "tests/unit/test_kernels.py",
    "tests/unit/test_kernels_linear.py::test_the_kernel_does_what_a_block_does",
)


@pytest.mark.ttsem
def test_kernels_from_compiled_code_have_no_access_out_of_bounds_and_no_race():
    run = subprocess.run(
        ["bash", "tools/ttsem.sh", "-q", *QUICK],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if run.returncode == 77:
        pytest.skip(run.stderr.strip().splitlines()[-1])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
