"""Nothing in the pack assumes Linux or the encoding of this system, as far as its source tells. (That it needs no newer
Python than pyproject.toml says is checked by basedpyright and ruff.)"""

import ast
import re
import subprocess
from pathlib import Path

import comfyui_specar
import pytest

from ..support import other_systems

ROOT = Path(comfyui_specar.__file__).resolve().parent
PACK = ("api", "batch", "device", "kernels", "limits", "model_loaders", "models", "nodes", "samplers")
FOLDERS = (*PACK, "tests", "tools")


def sources(folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    """Every module of folders of the repository, or of that name."""
    patterns = (pattern for name in folders for pattern in (f"{name}.py", f"{name}/**/*.py"))
    return [ROOT / "__init__.py", *(path for pattern in patterns for path in sorted(ROOT.glob(pattern)))]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


# Encodings


OPENING = ("open", "fdopen", "TemporaryFile", "NamedTemporaryFile")


def without_encoding(found: ast.AST) -> list[int]:
    """Lines that read or write text in the system's encoding. (ruff's PLW1514 sees only those of a known type.)"""
    lines = []
    for call in (node for node in ast.walk(found) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if any(keyword.arg in ("encoding", None) for keyword in call.keywords):
            continue
        function = isinstance(call.func, ast.Name)
        place = 1 if function or name == "fdopen" else 0  # of the mode, which a path's own method has first
        given = [*call.args[place : place + 1], *(word.value for word in call.keywords if word.arg == "mode")]
        modes = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        text = (
            name == "read_text"
            and not call.args
            or name == "write_text"
            and len(call.args) < 2
            or name in OPENING
            and any(re.fullmatch(r"[rwax]\+?t?\+?", mode) for mode in modes)
            or function
            and name == "open"
            and not modes
        )
        lines += [call.lineno] * bool(text)
    return lines


def test_text_is_read_and_written_in_a_named_encoding():
    assert {str(path.relative_to(ROOT)): found for path in sources() if (found := without_encoding(tree(path)))} == {}


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("p.read_text()", True),
        ("p.read_text('utf-8')", False),
        ("p.write_text(x, 'utf-8')", False),
        ("open(p, 'rb')", False),
        ("p.open('w+b')", False),
        ("cache.open(tokens)", False),
        ("os.fdopen(1, 'w')", True),
        ("open(p, **how)", False),
        ("tempfile.TemporaryFile(mode='w+')", True),
        ("archive.open('a.pkl', 'w')", False),
    ],
)
def test_the_scan_knows_text_from_bytes(code, bad):
    assert without_encoding(ast.parse(code)) == [1] * bad


# Systems


def test_every_module_can_be_imported_without_posix():
    """Those of nodes/, which need ComfyUI, in tests/nodes/test_schema.py."""
    assert other_systems.imported([part for part in PACK if part != "nodes"]) > 100


@pytest.mark.parametrize("code", ["import fcntl", "signal.alarm", "os.sched_getaffinity(0)"])
def test_what_windows_lacks_is_taken_away(code):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        other_systems.run(f"import os, signal\nother_systems.take_away()\n{code}")
    assert re.search("ModuleNotFoundError|ImportError|AttributeError", caught.value.stderr)


GUARDED = {("batch/journal.py", "fcntl")}  # for a system that is asked for first


def posix_names(found: ast.AST) -> set[str]:
    names = {f"os.{name}" for name in other_systems.POSIX_OS}
    names |= {f"signal.{name}" for name in (*other_systems.posix_signals(), "SIGKILL", "SIGHUP")}
    used = {ast.unparse(node) for node in ast.walk(found) if isinstance(node, ast.Attribute)}
    imports = (node for node in ast.walk(found) if isinstance(node, ast.ImportFrom))
    used |= {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    modules = {alias.name for node in ast.walk(found) if isinstance(node, ast.Import) for alias in node.names}
    return (used & names) | (modules & set(other_systems.POSIX_MODULES))


def test_the_pack_uses_no_name_of_posix_that_is_not_guarded():
    """Inside functions too, which importing does not show."""
    found = {(path.relative_to(ROOT).as_posix(), name) for path in sources(PACK) for name in posix_names(tree(path))}
    assert found == GUARDED
    code = "import os, resource\nfrom signal import SIGKILL\nos.sched_getaffinity(0)"
    assert posix_names(ast.parse(code)) == {"resource", "signal.SIGKILL", "os.sched_getaffinity"}
