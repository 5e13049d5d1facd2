"""Measure the share of a run that progress and previews take in ComfyUI.

    COMFYUI_PATH=/path/to/ComfyUI python -m tools.benchmarks previews [--models default llamagen-b] [--out FILE.json]

Times the nodes' callback during runs of whole images, for every --preview-method. Messages go to a ComfyUI server
without clients, so the cost of a browser is not included. On a busy machine, the share of the run's own processor time
is more reliable than that of wall time. ``default`` is the bundled model; the others have released shapes and random
weights, with an image decoder of the size of VQ-16.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch
from comfyui_specar.model_loaders.decoders.image_decoder import ImageDecoder
from comfyui_specar.models.vq import VQConfig, VQModel
from comfyui_specar.samplers.methods.next_token import NextToken

from . import sizes
from .report import commit, machine, versions, write

SCHEMA = "specar.previews/1"
PREVIEWS = ("none", "latent2rgb", "auto")
PROMPT = "heart, 3d, on a blue background"


def start_comfyui(device: str) -> None:
    """ComfyUI in this process, with its own hook behind progress bars, and a server's loop in another thread."""
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    from comfy.cli_args import args

    args.cpu = device == "cpu"
    import main

    route = main.hijack_progress  # main must be imported before the rest
    from comfy_execution.progress import WebUIProgressHandler, add_progress_handler, reset_progress_state
    from server import PromptServer

    class Prompt:
        """The graph of one node."""

        def get_display_node_id(self, node: str) -> str:
            return node

        get_parent_node_id = get_real_node_id = get_display_node_id

    loop = asyncio.new_event_loop()
    server = PromptServer(loop)
    server.last_prompt_id, server.last_node_id, server.client_id = "prompt", "1", None
    route(server)
    reset_progress_state("prompt", Prompt())
    add_progress_handler(WebUIProgressHandler(server))
    threading.Thread(target=loop.run_until_complete, args=(server.publish_loop(),), daemon=True).start()


class Timed:
    """A callback that is timed. It also counts passes, images, and those that were decoded."""

    def __init__(self, report: Any):
        self.report, self.passes, self.shown, self.decoded = report, 0, 0, 0
        self.seconds = self.computing = 0.0  # wall clock, processor time of this thread
        if report.previews:
            self._count(report.previews)

    def _count(self, previews: Any) -> None:
        draw, decode = previews._rendered, previews._decode

        def drawn(*what: Any) -> Any:
            self.shown += 1
            return draw(*what)

        def decoded(*what: Any) -> Any:
            self.decoded += 1
            return decode(*what)

        previews._rendered, previews._decode = drawn, decoded

    def __call__(self, progress: Any) -> None:
        began, computing = time.perf_counter(), time.thread_time()
        self.passes += 1
        self.report(progress)
        self.seconds += time.perf_counter() - began
        self.computing += time.thread_time() - computing


def loaded(name: str, device: torch.device, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A model as Load AR Checkpoint hands it out, and a conditioning of it. dtype: of random weights (None: fp32 on a
    CPU, otherwise bf16)."""
    from comfyui_specar.nodes.comfy_runtime import folders, models

    if name == "default":
        folders.register_folders()
        found = models.open_model(folders.BUNDLED, "auto", None)
        return found, found.model.encode_prompt(PROMPT)
    model = sizes.build(sizes.SIZES[name], dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16), device)
    with torch.device(device):
        torch.manual_seed(0)
        module = VQModel(VQConfig(model.vocab, 8, (1, 1, 2, 2, 4))).eval().requires_grad_(False)
    decoder = ImageDecoder(module, 16, 8, "random VQ-16")
    model.attach_codebook(decoder.codebook, decoder.factor)
    loaded = models.LoadedModel(model, models.patcher_of(model, model), models.managed(decoder), name)
    return loaded, sizes.prompt(model)


def measure(model: Any, conditioning: Any, how: str, method: Callable[..., Any]) -> dict[str, Any]:
    """One run under a --preview-method."""
    from comfy.cli_args import LatentPreviewMethod, args
    from comfyui_specar.nodes.comfy_runtime import runs

    args.preview_method = LatentPreviewMethod(how)
    request, began = model.model.request(conditioning), time.perf_counter()
    with runs.sampling(model, None, method(), request) as report:
        timed, start, computing = Timed(report), time.perf_counter(), time.thread_time()
        method().sample(replace(request, callback=timed))
        seconds, computing = time.perf_counter() - start, time.thread_time() - computing
    return {
        "previews": how,
        "seconds": seconds,
        "passes": timed.passes,
        "in_callback": timed.seconds,
        "share": timed.seconds / seconds,
        "share_of_processor": timed.computing / computing,
        "shown": timed.shown,
        "decoded": timed.decoded,
        "before": start - began,
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks previews",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device (default: %(default)s)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=["default", "llamagen-b"],
        choices=["default", *sizes.SIZES],
        help="models to run (default: default llamagen-b)",
    )
    parser.add_argument(
        "--previews", nargs="+", default=PREVIEWS, choices=PREVIEWS, help="preview methods (default: all)"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="JSON report to write")
    chosen = parser.parse_args()
    sys.argv[1:] = []  # ComfyUI reads them, too
    if "COMFYUI_PATH" not in os.environ:
        parser.error("COMFYUI_PATH does not name a ComfyUI tree")
    torch.set_num_threads(chosen.threads)
    start_comfyui(chosen.device)
    device = torch.device(chosen.device)
    report = {"schema": SCHEMA, "machine": machine(device), "versions": versions(), "commit": commit(), "runs": []}
    for name in chosen.models:
        model, conditioning = loaded(name, device)
        for method in (NextToken, specar.methods.SJD):
            for how in chosen.previews:
                run = {"model": name, "method": method.__name__, **measure(model, conditioning, how, method)}
                report["runs"].append(run)
                print(
                    f"{name:12} {run['method']:10} {how:10} {run['seconds']:7.2f} s, {run['passes']:4} passes, "
                    f"callback {run['share']:6.2%} of the time, {run['share_of_processor']:6.2%} of the "
                    f"processor's, {run['shown']} previews ({run['decoded']} decoded), "
                    f"before {run['before']:.2f} s",
                    flush=True,
                )
                if chosen.out:
                    write(report, chosen.out)


if __name__ == "__main__":
    main()
