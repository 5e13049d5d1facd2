"""ComfyUI-SpecAR: speculative decoding for autoregressive image models.

ComfyUI calls ``comfy_entrypoint``; Python users reach the headless names of ``specar`` (see ``api.py``) as attributes
of this package. Nothing heavy is imported before it is asked for.
"""

import logging
from importlib.util import find_spec

WEB_DIRECTORY = "./web"
OLDEST_COMFYUI = "0.3.75"  # that was tested

_HEADLESS = (
    "load_model",
    "load_image_decoder",
    "load_drafter",
    "bundled",
    "find_model",
    "sample",
    "methods",
    "structures",
    "rules",
    "Trace",
    "save_trace",
    "load_trace",
    "acceptance_map",
    "timeline_frames",
    "comparison_chart",
    "comparison_table",
    "run_report",
)


async def comfy_entrypoint():
    try:
        from .nodes.extension import SpecARExtension
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"ComfyUI-SpecAR does not work with this ComfyUI ({error}). It needs {OLDEST_COMFYUI} or newer: update "
            "ComfyUI, and then ComfyUI-SpecAR."
        ) from error
    return SpecARExtension()


def _has_entrypoints() -> bool:
    """Does this ComfyUI know nodes of its V3 interface?"""
    return bool(find_spec("comfy_api") and find_spec("comfy_api.latest"))


def __dir__() -> list[str]:
    return sorted({*globals(), *_HEADLESS})


def __getattr__(name: str):
    if name in _HEADLESS:
        from . import api

        return getattr(api, name)
    if name == "NODE_CLASS_MAPPINGS" and find_spec("folder_paths") and not _has_entrypoints():
        logging.getLogger(__name__).error(
            "ComfyUI-SpecAR needs ComfyUI %s or newer. Its nodes are missing: update ComfyUI.", OLDEST_COMFYUI
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
