"""A model that runs jobs without ComfyUI: what the actors of a Ray cluster hold (see ray_cluster.py)."""

import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from .. import api
from ..models.conditions import DTYPES, INT8_CACHE, STORAGE, conditions
from ..samplers.continuous_contract import ContinuousParams
from ..samplers.contract import Method, SamplingParams, chosen_params
from ..samplers.registry import METHODS, PUBLISHED
from ..samplers.settings import Setting, settings_of
from .jobs import Job, JobsError, for_each
from .overrides import OverrideError, convert

EXAMPLES = {"int": 0, "int | None": 0, "float": 0.0, "bool": False, "str": "", "str | None": ""}  # of settable types
SAMPLING = {"seed": "int", "cfg": "float", "temperature": "float", "top_k": "int", "top_p": "float"}
TEXTS = {"prompt": "str", "negative": "str"}
Made = tuple[dict[str, Any], bytes, bytes]  # of a job: fields of its result; PNGs of image and map, empty without one


@dataclass(frozen=True)
class Recipe:
    """How a method is made. settings: the dataclass whose plain fields jobs may set."""

    build: Callable[..., Any]
    settings: type
    needs_drafter: bool = True

    def columns(self) -> dict[str, str]:
        """Setting -> its type, a name of EXAMPLES."""
        own = (field for field in fields(self.settings) if field.init and field.name != "name")
        return {field.name: str(field.type) for field in own if str(field.type) in EXAMPLES}


def recipe_of(method: type[Method]) -> Recipe:
    """The recipe of a method that is made of its own settings."""
    if "drafter" in signature(method).parameters:
        return Recipe(method, method)
    return Recipe(lambda _drafter, **settings: method(**settings), method, needs_drafter=False)


RECIPES = {method.name: recipe_of(method) for method in METHODS}
RECIPES |= {each.name: Recipe(each.build, each.settings) for each in PUBLISHED.values()}


@dataclass(frozen=True)
class ModelOptions:
    """Which files to use, and how. Each is the name of a bundled model, or a path that all machines have. dtype: a name
    of DTYPES."""

    model: str
    method: str
    decoder: str | None = None
    drafter: str | None = None
    device: str = "cpu"
    dtype: str = "auto"

    def check(self) -> None:
        """Raises JobsError for a precision that there is not, and for a file that is not there."""
        if self.dtype not in DTYPES:
            raise JobsError(f"there is no dtype {self.dtype}; there are {', '.join(DTYPES)}")
        for name in filter(None, (self.model, self.decoder, self.drafter)):
            try:
                api.find_model(name)
            except FileNotFoundError as error:
                raise JobsError(f"there is no file or folder {name}. {error}") from error

    def recipe(self) -> Recipe:
        """Raises JobsError for a method that there is not, or that lacks its drafter."""
        if self.method not in RECIPES:
            raise JobsError(f"there is no method {self.method}; there are {', '.join(RECIPES)}")
        recipe = RECIPES[self.method]
        if recipe.needs_drafter and not self.drafter:
            raise JobsError(f"{self.method} needs --drafter, such as default/eagle for the bundled model")
        return recipe

    def settings(self, jobs: list[Job]) -> dict[str, dict[str, Any]]:
        """Job id -> its settings in their types. Raises RowsError with the lines of all jobs that do not fit."""
        recipe = self.recipe()
        known, legal = TEXTS | SAMPLING | recipe.columns(), settings_of(recipe.settings)

        def of(job: Job) -> dict[str, Any]:
            if unknown := ", ".join(name for name in job.overrides if name not in known):
                raise OverrideError(f"there is no setting {unknown}; this method has {', '.join(known)}")
            found = {
                name: convert_value(name, value, known[name], legal.get(name)) for name, value in job.overrides.items()
            }
            if "prompt" not in found:
                raise OverrideError("there is no prompt")
            check_sampling(found, getattr(recipe.settings, "continuous", False))
            return found

        return for_each(jobs, of)


def convert_value(name: str, value: Any, kind: str, legal: Setting | None) -> Any:
    """The value in a type of EXAMPLES. Raises ValueError for one that does not fit."""
    found = convert(value, EXAMPLES[kind], name, kind.startswith("int"))
    if legal:
        legal.check(name, found)
    return found


def check_sampling(found: dict[str, Any], continuous: bool) -> None:
    """Raises ValueError for parameters that no model samples with. (How far top_k goes, only the model knows.)"""
    chosen = {name: found[name] for name in SAMPLING if name in found and name != "seed"}
    if continuous:
        chosen_params(ContinuousParams(), chosen, "continuous models").check()
    else:
        replace(chosen_params(SamplingParams(), chosen, "models of token ids"), top_k=0).check(0)


class ModelWorker:
    """Loads a model, and generates with it. maps: acceptance maps, too."""

    def __init__(self, options: ModelOptions, maps: bool = False):
        self.options, self.recipe, self.maps = options, options.recipe(), maps
        self.model = api.load_model(
            api.find_model(options.model),
            device=options.device,
            dtype=DTYPES[options.dtype],
            storage=STORAGE.get(options.dtype),
            int8_cache=options.dtype == INT8_CACHE,
        )
        self.decoder = api.load_image_decoder(api.find_model(options.decoder or options.model), device=options.device)
        self.drafter = api.load_drafter(api.find_model(options.drafter), self.model) if options.drafter else None

    def generate(self, settings: dict[str, Any]) -> tuple[bytes, bytes, dict[str, Any], list[str]]:
        """PNGs of the image and of its acceptance map (empty unless wanted), with what it takes to repeat the image and
        the totals in them under `specar`; the run's totals and its notices. Raises what the sampler raises."""
        given = dict(settings)
        prompt, negative = (given.pop(name, "") for name in TEXTS)
        sampling = {name: given.pop(name) for name in SAMPLING if name in given}
        out = api.sample(
            self.model,
            self.model.encode_prompt(prompt),
            self.recipe.build(self.drafter, **given),
            # A blank one is none, as in CLIP Text Encode.
            negative=self.model.encode_prompt(negative) if negative.strip() else None,
            **sampling,
        )
        decoded = self.decoder.decode(out.latent)
        pixels = (decoded[0] * 255).clamp(0, 255).byte().cpu().numpy()  # as Save Image does
        totals = {"method": out.trace.settings.get("method"), **out.trace.summary()}
        files = {name: getattr(self.options, name) for name in ("model", "decoder", "drafter")}
        about = {"settings": settings, "method": out.trace.settings, **files, **conditions(self.model)}
        about["totals"] = totals
        overlay = png(api.acceptance_map(out.trace, decoded)[0], about) if self.maps else b""
        return png(pixels, about), overlay, totals, out.notices

    def run(self, settings: dict[str, Any]) -> Made:
        """Runs a job. One that fails has the reason in its record."""
        begun, image, overlay = time.monotonic(), b"", b""
        record = {"status": "success", "traces": [], "warnings": [], "error": ""}
        try:
            image, overlay, totals, notices = self.generate(settings)
            record |= {"traces": [totals], "warnings": notices}
        except Exception as error:  # of any kind: the other jobs go on
            record |= {"status": "error", "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        return record | {"seconds": round(time.monotonic() - begun, 3)}, image, overlay


def png(pixels: np.ndarray, about: dict[str, Any]) -> bytes:
    """An image [H, W, 3] of uint8 as a PNG, with `about` in JSON under `specar`."""
    texts, out = PngInfo(), io.BytesIO()
    texts.add_text("specar", json.dumps(about))
    Image.fromarray(pixels).save(out, format="PNG", pnginfo=texts)
    return out.getvalue()
