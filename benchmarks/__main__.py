"""Measure this pack:  python -m benchmarks WHAT [options]  (each also runs as python -m benchmarks.WHAT)

    speed       what a pass costs: every method beside transformers' generate and a plain loop, alternating in one
                process; shares, distance to the memory floor, image sizes, batches; on a GPU also kernels and a trace
    gpu         the first command on a new GPU, in 3, 10 or 25 minutes: do kernels and CUDA graphs compute what they
                should, and what does a pass cost? Without a GPU a dry run
    launches    how many launches a pass takes on a GPU, counted without one
    methods     how many passes every method needs on the bundled model, and what its images lose
    continuous  the same for the continuous pair (MAR and its small drafter)
    loading     seconds and memory of loading checkpoints of released sizes
    storage     what weights in bf16, fp8 and int8 do to a model's predictions
    soak        hundreds of prompts over all workflows on one ComfyUI server: memory, files, repeated images
    fuzz        what every loader does with files that went wrong, by accident and on purpose
    faults      what the server does with workflows of which one input is spoiled
    determinism whether the same seed gives the same image in another process, in a batch, with more threads
    same_seed   how often the same-seed mode, and a batch, give the image that next token draws alone
    throughput  how many images a machine makes, by batch size, processes and threads
    previews    what share of a run progress and previews take in ComfyUI (which COMFYUI_PATH names)

python -m benchmarks WHAT --help explains the options. Reports are JSON, in benchmarks/results/ those that we made.
"""

from __future__ import annotations

import sys
from importlib import import_module

WHAT = ("speed", "gpu", "launches", "methods", "continuous", "loading", "storage", "throughput", "previews", "soak",
        "determinism", "same_seed", "fuzz", "faults")


def main(arguments: list[str]) -> None:
    """Hand the arguments to the measurement that the first of them names."""
    if not arguments or arguments[0] not in WHAT:
        print(__doc__)
        asked_for_help = not arguments or arguments[0] in ("-h", "--help")
        sys.exit(None if asked_for_help else f"There is no measurement {arguments[0]!r}: {', '.join(WHAT)}.")
    sys.argv[1:] = arguments[1:]
    import_module(f".{arguments[0]}", __package__).main()


if __name__ == "__main__":
    main(sys.argv[1:])
