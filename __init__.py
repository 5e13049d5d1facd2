"""ComfyUI-SpecAR: speculative decoding for autoregressive image models.

ComfyUI calls ``comfy_entrypoint``; Python users reach the headless names of ``specar`` (see ``api.py``) as attributes
of this package. Nothing heavy is imported before it is asked for.
"""

WEB_DIRECTORY = "./web"

_HEADLESS = (
    "load_model", "load_image_decoder", "load_drafter", "bundled", "sample", "methods", "structures", "rules", "Trace",
    "save_trace", "load_trace",
)


async def comfy_entrypoint():
    from .nodes.extension import SpecARExtension

    return SpecARExtension()


def __getattr__(name: str):
    if name in _HEADLESS:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
