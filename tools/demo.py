"""Queues a shipped workflow on a real ComfyUI and prints the results; see demo.sh."""

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

import aiohttp
from comfy_client import Run, run_prompt
from comfy_server import PACK, PACK_FOLDER, ComfyServer, ServerError, free_port
from comfyui_specar.batch.answers import Ended, Submission, read_answer
from comfyui_specar.batch.maps import SAMPLER
from comfyui_specar.batch.overrides import OverrideError, read_workflow, with_overrides
from comfyui_specar.batch.server import files_of, notices_of, refusal
from comfyui_specar.reports.run_report import drafting
from tqdm import tqdm

DEFAULT_WORKFLOW = PACK / "workflows/api/06 Race.json"
OUTPUT = PACK / "output"
MOST_SECONDS = 86400.0  # of a run: whoever waits can end it


class DemoError(RuntimeError):
    """Something the user can act on; printed as one line."""


def main() -> int:
    arguments = parse_arguments()
    port = arguments.port or free_port()
    log = OUTPUT / f"server-{port}.log"  # servers may run beside each other
    try:
        given = {"prompt": arguments.prompt, "seed": arguments.seed}
        prompt = with_overrides(
            read_workflow(arguments.workflow), {name: value for name, value in given.items() if value is not None}
        )
        for node in [key for key, content in prompt.items() if SAMPLER.fullmatch(content["class_type"])]:
            prompt[f"{node}_trace"] = {
                "class_type": "SpecARSaveTrace",
                "_meta": {"title": "Save Trace"},
                "inputs": {"trace": [node, 1], "filename_prefix": "specar/trace"},
            }
        make_output()
        print("Starting ComfyUI ...", flush=True)
        with ComfyServer(arguments.comfyui, log, output=OUTPUT, port=port) as server:
            make(server, prompt, arguments.workflow)
            if arguments.serve:
                serve(server)
    except KeyboardInterrupt:
        return 130
    except (DemoError, OverrideError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        print(f"error: lost ComfyUI ({str(error) or 'no answer'}); see {log}", file=sys.stderr)
        return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.sh",
        description="Generates images with the bundled model in a real, headless ComfyUI and leaves them in output/.",
    )
    parser.add_argument("--prompt", help="prompt, instead of the workflow's")
    parser.add_argument("--seed", type=int, help="the seed of all samplers")
    parser.add_argument("--workflow", type=Path, default=DEFAULT_WORKFLOW, help="a workflow in API format")
    parser.add_argument("--serve", action="store_true", help="leave ComfyUI running, to be used in a browser")
    parser.add_argument("--port", type=port_number, help="the server's port (default: any free one)")
    parser.add_argument("--comfyui", type=Path, required=True, help=argparse.SUPPRESS)
    return parser.parse_args()


def port_number(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError("a port is 1 to 65535")
    return int(text)


def make_output() -> None:
    try:
        OUTPUT.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise DemoError(f"{OUTPUT} is a file: move it away, as the images go into a folder of that name") from error


def make(server: ComfyServer, prompt: dict, workflow: Path) -> None:
    """Runs the prompt with a progress bar, then prints its files and the cost of each method."""
    start = time.monotonic()
    print(f"Running {workflow.name}", flush=True)
    progress = Progress(prompt)
    with progress.bar:
        run = asyncio.run(run_prompt(server.url, prompt, follow=progress.follow, timeout=MOST_SECONDS))
    if run.outcome != "success":
        raise DemoError(f"{failure(run)}; see {server.log}")
    print(f"Done in {time.monotonic() - start:.0f} s. In {OUTPUT}:")
    outputs = read_answer(Ended, {"outputs": run.outputs}).outputs
    for file in sorted(Path(file["subfolder"], file["filename"]) for file in files_of(outputs)):
        print(f"  {file}")
    for method, totals in sorted(costs(run).items()):
        print(
            f"  {method}: {totals['target_passes']} forward passes of the model for {totals['tokens']} tokens, "
            f"{totals['seconds']:.1f} s"
        )
    for notice in notices_of(outputs):
        print(f"  Notice: {notice}")


def costs(run: Run) -> dict[str, dict]:
    """Totals by method, in words, from the reports that Acceptance Map and Save Trace put into the history."""
    reports = [report for report in run.collect("specar") if "totals" in report]  # that of AR Model Info has none
    return {drafting(report["settings"]): report["totals"] for report in reports}


def failure(run: Run) -> str:
    if run.outcome == "rejected":
        return refusal(read_answer(Submission, {"node_errors": run.node_errors, "error": run.error}))
    if run.outcome == "interrupted":
        return "the run was interrupted"
    return f"{run.error['node_type']}: {' '.join(run.error['exception_message'].split())}"


def serve(server: ComfyServer) -> None:
    """Waits for Ctrl-C. Raises DemoError where ComfyUI ends before that."""
    print(f"ComfyUI is at {server.url} (Browse Templates > {PACK_FOLDER}).", flush=True)
    print(f"Ctrl-C ends it; only {OUTPUT.name}/ stays.", flush=True)
    code = server.process.wait()
    raise DemoError(f"ComfyUI ended ({f'signal {-code}' if code < 0 else f'code {code}'}); its log is {server.log}")


class Progress:
    """A bar in the terminal that follows the running node; without a terminal, a line for each of their titles."""

    def __init__(self, prompt: dict):
        self._titles = {key: node.get("_meta", {}).get("title", node["class_type"]) for key, node in prompt.items()}
        self._said: set[str] = set()
        # disable=None: where the output is no terminal.
        self.bar = tqdm(total=1, file=sys.stdout, disable=None, leave=False, bar_format="  [{bar:30}] {desc}")

    async def follow(self, _run: Run, event: str, data: dict) -> None:
        if event == "progress_state":
            for node, state in data["nodes"].items():
                if state["state"] == "running":
                    self.bar.total, self.bar.n = max(state["max"], 1), state["value"]
                    self.bar.set_description_str(self._titles[node])
        elif event == "executed" and self.bar.disable and (title := self._titles[data["node"]]) not in self._said:
            self._said.add(title)
            print(f"  {title}: done", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, too, and its folder goes
    sys.exit(main())
