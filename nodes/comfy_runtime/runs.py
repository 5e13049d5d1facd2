"""A run under ComfyUI: model and drafter on the compute device, with memory, progress and previews."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

import comfy.model_management as mm
import torch
from comfy.cli_args import LatentPreviewMethod, args

from ...device import graphs
from ...models.image_decoder import Autoencoder
from ...samplers.contract import Method
from ...samplers.generate import AnyRequest
from .memory import Patcher, cast_room, fit_in_memory, is_out_of_memory, load_models_gpu, total_memory
from .models import LoadedDecoder, LoadedDrafter, LoadedModel
from .previews import Previews, Sketcher, measure_palette, measured_tokens
from .progress import Report, Status

log = logging.getLogger(__name__)


class Beside(Protocol):
    """What a run needs on the compute device beside the model: a drafter, or what reads images."""

    @property
    def patcher(self) -> Patcher: ...


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Raise ComfyUI's interruption if Cancel was pressed before; hold one that comes meanwhile until this is over, as
    ComfyUI's own layers would raise it in the midst of a capture."""
    with mm.interrupt_processing_mutex:
        mm.throw_exception_if_processing_interrupted()
        yield


graphs.uninterrupted = hold_interrupts


class TooLargeError(ValueError):
    """A run needs more memory than the device has."""


@contextmanager
def place(loaded: LoadedModel, beside: Beside | None, method: Method, request: AnyRequest) -> Iterator[int]:
    """Model and what it needs beside it on the compute device, with memory for the run: yields how many bytes it will
    still take. Raises TooLargeError if it needs more than there is: on a CPU, the system would kill the process."""
    memory, session_key = method.run_bytes(request) + cast_room(loaded.model), method.session_key(request)
    there_is = total_memory(loaded.patcher.load_device)
    if memory > there_is:
        raise TooLargeError(
            f"This run needs {memory / 2**30:.1f} GiB of memory beside the model, more than the "
            f"{there_is / 2**30:.1f} GiB in total. Generate fewer images at once (batch_size), or smaller ones."
        )
    together = [loaded.patcher] if beside is None else [loaded.patcher, beside.patcher]  # neither may evict the other
    if not fit_in_memory(together, bytes_missing(loaded, memory, session_key)):
        loaded.patcher.release()
    load_models_gpu(together, memory_required=bytes_missing(loaded, memory, session_key))
    for patcher in together:
        bring_the_rest(patcher.model, loaded.model.device)
    try:
        yield bytes_missing(loaded, memory, session_key)  # moving the model may have ended its sessions
    finally:
        mm.soft_empty_cache()


@contextmanager
def sampling(
    loaded: LoadedModel, drafter: LoadedDrafter | None, method: Method, request: AnyRequest
) -> Iterator[Report]:
    """Model and drafter placed (see ``place``), and the callback of the run, which shows progress and previews and
    raises if the user interrupts."""
    with place(loaded, drafter, method, request) as memory:
        previews = previews_of(loaded, memory, request.length, request.sketch)
        report = Report(request.length, previews, Status(request).show)
        yield report
        report.finish()


def bytes_missing(loaded: LoadedModel, memory: int, session_key: Hashable) -> int:
    """Additional bytes that a run needs: none if an earlier run with the same settings left its session with the model,
    whose caches and captured steps are reused."""
    return 0 if session_key is not None and session_key in loaded.model.sessions else memory


def previews_of(loaded: LoadedModel, memory: int, length: int, sketch: Sketcher) -> Previews | None:
    """Previews by the user's --preview-method: none, colours (latent2rgb), or decoded if time allows.

    No model is unloaded for them: if the decoder does not fit in addition to the run (``memory`` bytes), previews are
    colours if an earlier run has fitted a palette, else none.
    """
    method, found = args.preview_method, loaded.decoder
    if found is None or method == LatentPreviewMethod.NoPreviews:
        return None
    decoder = None
    if method != LatentPreviewMethod.Latent2RGB or found.palette is None:
        decoder = preview_decoder(found, memory, max(length, measured_tokens(found.decoder.channels)))
        if decoder is not None and found.palette is None:
            try:
                found.palette = measure_palette(decoder, loaded.model)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
    if found.palette is None:
        log.info("No previews: not enough free memory beside the model to decode them.")
        return None
    wanted = None if method == LatentPreviewMethod.Latent2RGB else decoder
    return Previews(sketch, found.palette, wanted, found.decoder.factor, args.preview_size)


def preview_decoder(loaded: LoadedDecoder, memory: int, length: int) -> Autoencoder | None:
    """The decoder, fully on the compute device, if that leaves ``memory`` bytes for the run in addition to decoding an
    image of ``length`` tokens; else None."""
    memory += loaded.bytes_for(length * loaded.area)
    if not fit_in_memory([loaded.patcher], memory):
        return None
    load_models_gpu([loaded.patcher], memory_required=memory, force_full_load=True)
    return loaded.decoder


def bring_the_rest(model: torch.nn.Module, device: torch.device) -> None:
    """Move what ComfyUI does not move when it loads a model partially: buffers, and the weights of modules that cannot
    cast them on use (position tables, mask tokens)."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        if not hasattr(module, "comfy_cast_weights"):
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, torch.nn.Parameter(parameter.to(device), requires_grad=False))
