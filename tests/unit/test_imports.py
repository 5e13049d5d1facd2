"""The packages of the pack and what each may import, read from the source; and what importing the pack costs."""

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from pathlib import Path

import comfyui_specar
import pytest
from comfyui_specar.tests.support.patience import PATIENCE

ROOT = Path(comfyui_specar.__file__).resolve().parent
HOST = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "node_helpers", "nodes", "server"}
CONTRACT = {f"samplers.{part}" for part in ("continuous_contract", "continuous_distributions", "contract", "layout")}
OWN = {  # package -> modules of the pack it may import (a package, or one module of it)
    "device": set(),
    "limits": set(),
    "kernels": {"device"},
    "models.networks": {"device", "kernels"},
    "samplers": {"device", "kernels", "limits"},
    "models": {"device", "limits", "model_loaders.files", "models.networks"} | CONTRACT,
    "model_loaders": {"device", "limits", "models"} | CONTRACT,
    "api": {"limits", "model_loaders", "models", "samplers", "reports"},
    "reports": {"limits", "samplers.registry", "samplers.trace"},
    "nodes": {"device", "kernels", "limits", "model_loaders", "models", "reports", "samplers"},
    "batch": {
        "api",
        "limits",
        "models.conditions",
        "samplers.continuous_contract",
        "samplers.contract",
        "samplers.registry",
        "samplers.settings",
    },
}
FOREIGN = {  # package -> third-party packages; all of them come with ComfyUI
    "device": {"torch"},
    "limits": set(),
    "kernels": {"torch", "triton"},
    "models.networks": {"torch", "einops"},
    "samplers": {"torch", "safetensors"},
    "models": {"torch", "einops", "safetensors", "tokenizers", "transformers", "torchvision", "PIL"},
    "model_loaders": {"torch", "einops", "safetensors", "transformers", "torchvision"},
    "api": {"torch"},
    "reports": {"torch", "numpy", "PIL"},
    "nodes": {"torch", "numpy", "PIL", "aiohttp", "huggingface_hub"} | HOST,
    "batch": {"aiohttp", "pydantic", "tqdm", "yarl", "numpy", "PIL", "ray"},  # ray: an extra, for batch/ray_cluster.py
}


def sources(package: str) -> list[Path]:
    """The files of a package, without those of packages in it that have rules of their own."""
    folder = ROOT.joinpath(*package.split("."))
    inner = [ROOT.joinpath(*other.split(".")) for other in OWN if other.startswith(f"{package}.")]
    files = [f for f in sorted(folder.glob("**/*.py")) if not any(f.is_relative_to(other) for other in inner)]
    return files or [folder.with_suffix(".py")]


def module(path: Path) -> str:
    """The dotted name of a file of the pack."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path: Path) -> list[tuple[bool, str]]:
    """(inside the pack, dotted name) of every import anywhere in a file, those inside functions included."""
    here = path.relative_to(ROOT).with_suffix("").parts
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(False, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((False, node.module))
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level], *(node.module or "").split(".")]
            base = [part for part in base if part]
            package = not node.module or ROOT.joinpath(*base).is_dir()
            found += [(True, ".".join([*base, alias.name] if package else base)) for alias in node.names]
    return found


def top(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("package", OWN)
def test_a_package_imports_only_what_it_may(package):
    for path in sources(package):
        for inside, name in imports(path):
            if inside:
                allowed = {package} | OWN[package]
                assert any(name == a or name.startswith(f"{a}.") for a in allowed), f"{path.name} imports {name}"
            else:
                known = top(name) in sys.stdlib_module_names or top(name) in FOREIGN[package]
                assert known, f"{path.name} imports {name}"


def test_no_file_needs_itself_through_others():
    """Imports for types, and those inside functions, included."""
    files = {module(path): path for package in OWN for path in sources(package)}
    needs = {
        name: {other for inside, other in imports(path) if inside and other in files and other != name}
        for name, path in files.items()
    }
    graphlib.TopologicalSorter(needs).prepare()  # which raises CycleError


def test_every_package_is_listed_for_installation():
    """pyproject.toml names each package; setuptools adds none by itself, not even inner ones."""
    shipped = {path.parent for package in OWN for path in sources(package)} - {ROOT}
    packages = {".".join(("comfyui_specar", *path.relative_to(ROOT).parts)) for path in shipped}
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("packages = [")[1].split("]")[0]
    assert sorted(re.findall(r'"(.+?)"', table)) == sorted(packages | {"comfyui_specar"})


def test_tests_import_neither_from_another_folder_nor_from_another_test():
    """What tests share is in tests/support, or in a conftest.py above them."""
    shared = {"tests.support", "tests.conftest", "tests.custom_nodes"}
    for path in sorted((ROOT / "tests").glob("*/*.py")):
        folder = f"tests.{path.parent.name}"
        for _, name in imports(path):
            name = name.removeprefix("comfyui_specar.")
            if top(name) == "tests":
                assert name.startswith((folder, *shared)), f"{path.relative_to(ROOT)} imports {name}"
                assert ".test_" not in name, f"{path.relative_to(ROOT)} imports from a test: {name}"


def test_the_scan_sees_imports_of_every_form(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "x.py"
    path.write_text(
        "import comfy.ops as o\nfrom . import a\nfrom .b import c\ndef f():\n    from ..samplers import rng\n"
        "    from ..samplers.trace import Trace\n    from .. import nodes\n    from torch import nn\n",
        encoding="utf-8",
    )
    assert set(imports(path)) == {
        (False, "comfy.ops"),
        (True, "models.a"),
        (True, "models.b"),
        (True, "samplers"),
        (True, "samplers.trace"),
        (True, "nodes"),
        (False, "torch"),
    }


def run(code: str) -> str:
    """Standard output of a fresh interpreter that can import the pack."""
    path = [p for p in sys.path if p]
    program = f"import sys; sys.path[:0] = {path!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_pack_is_cheap():
    """ComfyUI imports every pack at start: no torch, no file read, no node module, until something is asked for."""
    heavy = "torch", "numpy", "einops", "safetensors", "transformers", "comfy"
    out = run(
        f"import comfyui_specar as s\nprint([m for m in {heavy!r} if m in sys.modules], s.WEB_DIRECTORY)\n"
        "print([m for m in sys.modules if m.startswith('comfyui_specar')])"
    )
    assert out == "[] ./web\n['comfyui_specar']"


def test_the_headless_names_are_there():
    names = "load_model load_image_decoder bundled sample methods rules Trace acceptance_map timeline_frames".split()
    names += "comparison_chart comparison_table run_report".split()
    out = run(
        f"import comfyui_specar as s\nprint(all(getattr(s, n) is not None for n in {names!r}))\n"
        "print(s.methods.SJD().reuse, s.methods.NextToken, s.methods.Jacobi, s.rules.Exact)\n"
        "print('comfy' in sys.modules, 'transformers' in sys.modules)\ntry:\n    s.nonsense\n"
        "except AttributeError as e:\n    print(e)"
    )
    assert out.startswith("True\ncoupled ")
    assert out.endswith("False False\nmodule 'comfyui_specar' has no attribute 'nonsense'")


def said_by(code: str, path: Path) -> str:
    """What a Python that finds modules in ``path`` prints when it runs the code in a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=path, env=environment)
    return ended.stdout + ended.stderr


def test_a_comfyui_that_is_too_old_says_so_in_the_log(tmp_path):
    """It asks for NODE_CLASS_MAPPINGS, as every ComfyUI does, and knows nothing else."""
    (tmp_path / "folder_paths.py").touch()
    ask = "import comfyui_specar; print(hasattr(comfyui_specar, 'NODE_CLASS_MAPPINGS'))"
    said = said_by(ask, tmp_path)
    assert "ComfyUI 0.3.75" in said and "update ComfyUI" in said and "False\n" in said
    (tmp_path / "comfy_api/latest").mkdir(parents=True)
    for package in ("comfy_api", "comfy_api/latest"):
        (tmp_path / package / "__init__.py").touch()
    assert said_by(ask, tmp_path) == "False\n"
    # One that lacks something: its loader prints the exception of the entry point.
    load = "import asyncio, comfyui_specar; asyncio.run(comfyui_specar.comfy_entrypoint())"
    last = said_by(load, tmp_path).splitlines()[-1]
    assert "ImportError: ComfyUI-SpecAR does not work with this ComfyUI" in last and "update ComfyUI" in last
    assert "comfy_api.latest" in last, "what is missing"
