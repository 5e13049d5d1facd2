"""Starts and stops a real headless ComfyUI that has only this pack, in a base directory of its own."""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

PACK = Path(__file__).resolve().parent.parent
PACK_FOLDER = "ComfyUI-SpecAR"
NO_PAID_NODES = "--disable-api-nodes"
START_SECONDS, STOP_SECONDS = 600, 10
PR_SET_PDEATHSIG = 1


class ServerError(RuntimeError):
    """The server cannot start, did not start, or did not take the pack; the message says why or names its log."""


class ComfyServer:
    """Context manager around one ComfyUI process.

    `url` answers once the block is entered; `base` is ComfyUI's base directory (models/, input/, temp/, user/), created
    for it and removed at the end; `log` keeps the server's output. The whole process group is terminated on leaving the
    block. `more_nodes`: folders of other custom nodes to load.
    """

    def __init__(
        self,
        comfyui: Path,
        log: Path,
        output: Path | None = None,
        port: int | None = None,
        previews: str = "auto",
        more_nodes: Sequence[Path] = (),
    ):
        self.comfyui = Path(comfyui).resolve()
        self.log = Path(log).resolve()
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._output = output
        self._previews = previews
        self._custom_nodes = {PACK_FOLDER: PACK, **{folder.name: folder for folder in more_nodes}}

    def __enter__(self) -> "ComfyServer":
        if in_use(self.port):
            raise ServerError(f"port {self.port} is in use by another program: choose another one")
        self._directory = tempfile.TemporaryDirectory(prefix="specar-comfyui-", ignore_cleanup_errors=True)
        self.base = Path(self._directory.name)
        self.output = Path(self._output or self.base / "output").resolve()
        prepare_base(self.base, self.output, self._custom_nodes)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        try:
            shutil.copy(self.comfyui / "input/example.png", self.base / "input")  # what Load Image has chosen at first
            self.start()
            if "(IMPORT FAILED)" in self.log.read_text(errors="replace", encoding="utf-8"):
                raise ServerError(f"ComfyUI could not import this pack; see {self.log}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self) -> None:
        """Starts the process and waits for it. May be called again after it has ended, with the same base directory."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(),
                cwd=self.base,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self._wait_until_ready()

    def __exit__(self, *_exc) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(STOP_SECONDS)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._directory.cleanup()

    def _command(self) -> list[str]:
        command = [
            sys.executable,
            str(self.comfyui / "main.py"),
            "--base-directory",
            str(self.base),
            "--output-directory",
            str(self.output),
            "--port",
            str(self.port),
            "--database-url",
            f"sqlite:///{self.base}/user/comfyui.db",
            "--disable-all-custom-nodes",
            "--whitelist-custom-nodes",
            *self._custom_nodes,
            "--preview-method",
            self._previews,
        ]
        if find_spec("comfyui_frontend_package") is None:  # an interface without pages
            command += ["--front-end-root", str(self.base / "input")]
        if NO_PAID_NODES in (self.comfyui / "comfy/cli_args.py").read_text(encoding="utf-8"):  # it is deprecated
            command.append(NO_PAID_NODES)
        return command if torch.cuda.is_available() else [*command, "--cpu"]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"ComfyUI ended with code {self.process.returncode} while starting; see {self.log}")
            try:
                with urllib.request.urlopen(f"{self.url}/system_stats", timeout=5) as reply:
                    if json.dumps(str(self.base)) not in reply.read().decode(errors="replace"):  # its --base-directory
                        raise ServerError(f"another ComfyUI took port {self.port} meanwhile: choose another one")
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise ServerError(f"ComfyUI did not answer on {self.url} within {START_SECONDS} s; see {self.log}")


def end_with_parent() -> None:
    """Makes Linux terminate this process when its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def prepare_base(base: Path, output: Path, custom_nodes: Mapping[str, Path]) -> None:
    """Lays out ComfyUI's base directory with links to the custom nodes."""
    for name in ("custom_nodes", "models", "input", "temp", "user/default"):
        (base / name).mkdir(parents=True)
    output.mkdir(parents=True, exist_ok=True)
    for name, folder in custom_nodes.items():
        (base / "custom_nodes" / name).symlink_to(folder, target_is_directory=True)
    # Without this the tutorial's dialog covers the canvas on the first visit.
    (base / "user/default/comfy.settings.json").write_text(json.dumps({"Comfy.TutorialCompleted": True}), "utf-8")


def in_use(port: int) -> bool:
    """Does anything listen there, on this machine?"""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
