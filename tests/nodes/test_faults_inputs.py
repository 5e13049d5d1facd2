"""Every input of every node, given everything: the node works, or says in a ValueError which input is wrong."""

import json
import math
import os
import re
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from comfy_api.latest import io
from comfyui_specar.limits.printable import printable_lines
from comfyui_specar.nodes import checks, extension
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import CODES, GRID, KL, defaults

REFUSALS = (ValueError, FileNotFoundError)
WIDGETS = ("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO")
NAMES = [node.GET_SCHEMA().node_id for node in extension.node_classes()]
CHOSEN = {  # small where it can be
    "SpecARSJDSampler": {"window": 4},
    "SpecARFindFastest": {"tokens": 16, "seconds": 1},
    "SpecARTimeline": {"frames": 2, "hold": 1},
    "SpecARDecodeGLMImage": {"steps": 1},
    "SpecAREmptyLatent": {"width": 32, "height": 32},
    "SpecARLoadCheckpoint": {"model_name": "tiny"},
    "SpecARLoadDrafter": {"drafter_name": "eagle"},
    "SpecARLoadLora": {"lora_name": "style"},
}


def fuzz(share: float = 1.0):
    """Some examples, always the same ones; SPECAR_FUZZ says how many, and then they are new ones."""
    count = max(1, round(share * int(os.environ.get("SPECAR_FUZZ", 4))))
    return settings(
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="SPECAR_FUZZ" not in os.environ,
        max_examples=count,
        database=None,
    )


@pytest.fixture(scope="session")
def traces(sample, draw_vectors):
    """A trace of token ids, one of vectors, and one of a batch."""
    return {"ids": sample("SJD")[1], "vectors": draw_vectors("")[1], "batch": sample("DraftTree", batch=2)[1]}


@pytest.fixture(scope="module")
def sound(nodes, tiny, drafter, lora, continuous, small_vectors, glm_image, janus, emu35, traces, run, save):
    """sound(name) -> legal inputs of a node: its defaults and something for every socket that must be connected."""

    def sound(name: str) -> dict:
        vectors, schema = "Continuous" in name, nodes[name].GET_SCHEMA()
        model, draws = (continuous, small_vectors) if vectors else (tiny, drafter)
        made = {
            "AR_MODEL": lambda: model[0],
            "AR_DRAFTER": lambda: draws,
            "AR_TRACE": lambda: traces["ids"],
            "CONDITIONING": lambda: model[1].encode_from_tokens_scheduled("red apple"),
            "LATENT": lambda: {"samples": torch.zeros(1, KL.channels if vectors else 8, GRID, GRID)},
            "IMAGE": lambda: torch.rand(1, 32, 32, 3),
            "VAE": lambda: model[2],
            "MASK": lambda: torch.rand(1, 8, 8),
        }
        inputs = defaults(nodes[name]) | CHOSEN.get(name, {})
        inputs |= {i.id: made[i.io_type]() for i in schema.inputs if i.io_type in made and not i.optional}
        if "neighbours" in inputs:
            inputs["neighbours"] = 5
        if name == "SpecARDecodeGLMImage":
            prompt = glm_image[1].encode_from_tokens_scheduled("a red cup")
            inputs |= {"samples": {"samples": torch.ones(1, 1, 2, 2)}, "vae": glm_image[2], "positive": prompt}
        if name == "SpecARCaption":
            inputs |= {"model": janus[0], "max_tokens": 4}
        if name == "SpecARImagePrompt":
            inputs |= {"model": emu35[0], "vae": emu35[2], "text": "red"}
        if name == "SpecARLoadTrace":
            [_, file] = save(traces["ids"], "faults/t")["files"]
            inputs["trace_name"] = f"{file['subfolder']}/{file['filename']} [output]"
        if name == "SpecARMethodSampler":
            found = run(nodes["SpecARFindFastest"], **sound("SpecARFindFastest")).result
            inputs["method"] = next(each for each in found if type(each).__name__ == "ChosenMethod")
        return inputs

    kept = {}
    return lambda name: dict(kept[name] if name in kept else kept.setdefault(name, sound(name)))


def refused(run, node, inputs, *names):
    """The message with which a node refuses inputs; None if it takes them. It names what is wrong."""
    try:
        run(node, **inputs)
    except REFUSALS as error:
        message = str(error)
        assert len(message) > 20 and message[-1] in ".)" and message == printable_lines(message), message
        assert not names or any(name in message for name in names), (names, message)
        return message
    return None


NUMBERS = [2**31, 2**63, 2**64, 10**400, math.nan, math.inf, -math.inf, -0.0, 1e308]
ACTS = "\x1b[2J\x9b\u202e\u2028"  # on a terminal
TEXTS = ["", " ", "0", "\0", ACTS, "ü" * 9999, "../../etc/passwd", "/etc/passwd", "C:\\x", "nan", "-1"]
THINGS = [None, True, False, {}, {"samples": 3}, [[1, 2]], [1, 2, 3], b"x"]
TENSORS = [
    torch.zeros(0),
    torch.zeros(()),
    torch.zeros(1, 4),
    torch.full((1, 8, 4, 4), math.nan),
    torch.ones(2, 32, 32, 3),
    torch.zeros(1, 4, 4, dtype=torch.uint8),
]
CONVERTED = {"STRING": str, "COMBO": str, "BOOLEAN": bool}  # what ComfyUI makes of such a widget's value
ANYTHING = st.one_of(
    st.integers(-2, 70), st.floats(), st.text(max_size=30), *map(st.sampled_from, (NUMBERS, TEXTS, THINGS, TENSORS))
)


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_any_value_of_any_input_is_taken_or_named(name, sound, nodes, run):
    inputs = {i.id: i for i in nodes[name].GET_SCHEMA().inputs}
    if not inputs:
        return

    @fuzz()
    @given(st.sampled_from(sorted(inputs)), ANYTHING)
    def check(key, value):
        if not isinstance(value, CONVERTED.get(inputs[key].io_type, object)):
            return
        words = key, "does not generate", "is not in", "no trace", "lies outside"
        message = refused(run, nodes[name], sound(name) | {key: value}, *words)
        kind = inputs[key].io_type
        if kind not in ("STRING", "COMBO", "MASK", "IMAGE", "LATENT", "CONDITIONING", "INT", "FLOAT", "BOOLEAN", "VAE"):
            assert message or value is None and inputs[key].optional

    check()


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_in_place_of_an_object_is_named(name, sound, nodes, run):
    """ComfyUI passes on what an API client writes there."""
    for wanted in nodes[name].GET_SCHEMA().inputs:
        if wanted.io_type not in WIDGETS:
            for value in (5, 2.5, True, "x", "", b"x", [], [1], {}, {"samples": 5}, *[None] * (not wanted.optional)):
                assert refused(run, nodes[name], sound(name) | {wanted.id: value}, wanted.id, "CONDITIONING", "prompt")


def test_what_acts_on_a_terminal_is_in_no_message_and_no_line_of_the_log(sound, nodes, run, tiny, caplog):
    """ComfyUI's log is a terminal's: choices, also before a run, words of a prompt, and whatever an error quotes."""
    for name in NAMES:
        for wanted in nodes[name].GET_SCHEMA().inputs:
            if wanted.io_type in ("STRING", "COMBO"):
                refused(run, nodes[name], sound(name) | {wanted.id: ACTS})
                if "validate_inputs" in vars(nodes[name]) and "_name" in wanted.id:
                    said = nodes[name].validate_inputs(**{wanted.id: ACTS})
                    assert isinstance(said, str) and said == printable_lines(said)
    prompt = tiny[1].encode_from_tokens_scheduled(f"<lora:zzz{ACTS}:1> apple")
    run(nodes["SpecARNextTokenSampler"], **sound("SpecARNextTokenSampler") | {"positive": prompt})
    assert "zzz" in caplog.text and caplog.text == printable_lines(caplog.text)


def test_an_error_and_those_before_it_are_printable():
    class Broken(io.ComfyNode):
        @classmethod
        def define_schema(cls):
            return io.Schema(node_id="Broken", inputs=[])

        @classmethod
        def execute(cls):
            try:
                raise KeyError(ACTS, 5)
            except KeyError as error:
                raise RuntimeError(f"of {ACTS}\nno") from error

    with pytest.raises(RuntimeError) as caught:
        checks.checked(Broken).execute()
    shown = "".join(traceback.format_exception(caught.value))
    assert shown == printable_lines(shown) and "\nno" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_sound_inputs_are_taken_and_open_ones_may_be_none(name, sound, nodes, run):
    schema = nodes[name].GET_SCHEMA()
    assert refused(run, nodes[name], sound(name) | {i.id: None for i in schema.inputs if i.optional}) is None


def latents():
    good = torch.randn(1, 8, GRID, GRID, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 1, 32, 32)
    mask[..., 16:, :] = 1
    yield "no samples", {}
    yield "several latents in one", {"samples": SimpleNamespace(is_nested=True, tensors=[good, good])}
    yield "none", {"samples": None}
    yield "a list", [good]
    yield "five dimensions", {"samples": good[None]}
    yield "three dimensions", {"samples": good[0]}
    yield "no images", {"samples": good[:0]}
    yield "no rows", {"samples": good[:, :, :0]}
    yield "whole numbers", {"samples": good.long()}
    yield "nan", {"samples": good * math.nan, "noise_mask": mask}
    yield "other channels", {"samples": good[:, :4], "noise_mask": mask}
    yield "other grid", {"samples": torch.zeros(1, 8, 5, 7)}
    yield "mask of nan", {"samples": good, "noise_mask": mask * math.nan}
    yield "empty mask", {"samples": good, "noise_mask": mask[:, :, :0]}
    yield "mask of one dimension", {"samples": good, "noise_mask": mask[0, 0, 0]}
    yield "mask of five dimensions", {"samples": good, "noise_mask": mask[None]}
    yield "three masks", {"samples": good, "noise_mask": mask.expand(3, 1, 32, 32)}
    yield "mask is a list", {"samples": good, "noise_mask": [1]}
    yield "seeds out of order", {"samples": good.expand(2, -1, -1, -1), "batch_index": [3, 1]}
    yield "no seeds", {"samples": good, "batch_index": []}
    yield "too few seeds", {"samples": good.expand(2, -1, -1, -1), "batch_index": [0]}
    yield "seeds that are none", {"samples": good, "batch_index": ["x"]}


BAD_LATENTS = dict(latents())
FINE_LATENTS = {
    "bool mask": {"noise_mask": torch.ones(1, 8, 8, dtype=torch.bool)},
    "tokens of another size": {"ar_tokens": torch.zeros(1, 9, 9, dtype=torch.int64), "noise_mask": torch.ones(1, 4, 4)},
    "tokens out of range": {"ar_tokens": torch.full((1, 4, 4), 10**6), "noise_mask": torch.ones(1, 4, 4)},
    "tokens that are none": {"ar_tokens": "x", "noise_mask": torch.ones(1, 4, 4)},
    "half precision": {},
}


@pytest.mark.once
@pytest.mark.parametrize("latent", BAD_LATENTS.values(), ids=BAD_LATENTS)
def test_bad_latents_are_named(latent, sound, nodes, run):
    """All samplers read them with the same code."""
    message = refused(run, nodes["SpecARSJDSampler"], sound("SpecARSJDSampler") | {"latent_image": latent})
    assert re.search("latent_image|noise mask|8 x 8|model does not generate", message)


@pytest.mark.once
@pytest.mark.parametrize("more", FINE_LATENTS.values(), ids=FINE_LATENTS)
def test_odd_latents_are_generated(more, sound, nodes, run):
    samples = torch.randn(1, 8, GRID, GRID, generator=torch.Generator().manual_seed(0))
    latent = {"samples": samples if more else samples.half(), **more}
    drawn, _ = run(nodes["SpecARSJDSampler"], **sound("SpecARSJDSampler") | {"latent_image": latent}).result
    tokens = drawn["ar_tokens"]
    assert tokens.shape == (1, GRID, GRID) and tokens.min() >= 0 and tokens.max() < CODES


def test_numbers_of_numpy_are_numbers(sound, nodes, run):
    inputs = sound("SpecARSJDSampler") | {"window": np.int64(3), "cfg": np.float32(2), "seed": np.uint8(5)}
    _, trace = run(nodes["SpecARSJDSampler"], **inputs).result
    assert json.dumps(trace.report()) and trace.settings["window"] == 3 and trace.totals["seed"] == 5
    message = refused(run, nodes["SpecARSJDSampler"], inputs | {"seed": np.float64(5)})
    assert re.search(r"seed.* 5\.0.* 0 to 18446744073709551615", message)


@pytest.mark.once
@pytest.mark.parametrize("key", ["positive", "negative"])
def test_bad_conditionings_are_named(key, sound, nodes, run, tiny, continuous):
    good = tiny[1].encode_from_tokens_scheduled("red apple")
    tensor, more = good[0]
    cases = {
        "of another family": continuous[1].encode_from_tokens_scheduled("red apple"),
        "several": good * 2,
        "two dimensions": [[tensor[0], more]],
        "other width": [[tensor[..., :3], more]],
        "nan": [[tensor * math.nan, more]],
        "whole numbers": [[tensor.long(), more]],
        "of Stable Diffusion": [[torch.rand(1, 77, 768), {"pooled_output": None}]],
        "no dictionary": [[tensor, None]],
        "a tuple": [(tensor, more)],
        "nothing in it": [[]],
        "text": "red apple",
        "no list": tensor,
        "batch": [[tensor.expand(3, -1, -1), more]],
        "odd ar": [[tensor, {"ar": 5}]],
        "empty": [],
        "too long": [[tensor.expand(1, 2, -1).repeat(1, 50, 1), more]],
    }
    node, inputs = nodes["SpecARNextTokenSampler"], sound("SpecARNextTokenSampler") | {"cfg": 2.0}
    taken = {
        name
        for name, case in cases.items()
        if not refused(run, node, inputs | {key: case}, key, "CONDITIONING", "prompt")
    }
    assert taken == {"whole numbers", "a tuple", "too long"}


def test_models_drafters_and_traces_of_others(sound, nodes, run, tiny, continuous, drafter, small_vectors, traces):
    for name in NAMES:
        inputs = {i.id: i.io_type for i in nodes[name].GET_SCHEMA().inputs}
        if "Sampler" in name:
            other = tiny if "Continuous" in name else continuous
            assert refused(run, nodes[name], sound(name) | {"model": other[0]})
        if "AR_DRAFTER" in inputs.values():
            other = drafter if "Continuous" in name else small_vectors
            assert "drafter" in refused(run, nodes[name], sound(name) | {"drafter": other})
    for trace in traces.values():
        for image in (torch.rand(1, 32, 32, 3), torch.rand(2, 5, 7, 4), torch.rand(1, 1, 1, 3)):
            for name, more in (("SpecARAcceptanceMap", {"metric": "entropy"}), ("SpecARTimeline", {"picture": 1})):
                refused(run, nodes[name], sound(name) | {"trace": trace, "image": image} | more)
    together = {f"trace_{i}": trace for i, trace in enumerate(traces.values(), 1)}
    assert refused(run, nodes["SpecARCompareTraces"], together) is None


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("SpecARContinuePicture", "vae", "", "vae"),
        ("SpecARContinuePicture", "vae", b"x", "bytes"),
        ("SpecARSJDSampler", "temperature", 5e-324, "5e-324"),
        ("SpecARLoadDrafter", "drafter_name", "n" * 999, "nnn"),
        ("SpecARLoadDrafter", "drafter_name", ".", "models/ar_drafters"),
        ("SpecARLoadLora", "lora_name", "../ar_models/tiny", "models/loras"),
        ("SpecARLoadTrace", "trace_name", "n" * 999, "trace"),
        ("SpecARLoadTrace", "trace_name", "\0", "trace"),
        ("SpecARLoadTrace", "trace_name", "", "trace"),
    ],
)
def test_what_fuzzing_found_stays_found(name, key, value, says, sound, nodes, run):
    assert says in refused(run, nodes[name], sound(name) | {key: value})


@pytest.mark.once
@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(1, 0, 0, 3),
        torch.zeros(0, 32, 32, 3),
        torch.zeros(1, 32, 32, 3).byte(),
        torch.zeros(32, 32, 3),
        torch.full((1, 32, 32, 3), math.nan),
        torch.zeros(1, 32, 32, 1),
        torch.zeros(1, 2, 32, 32, 3),
        "image",
    ],
    ids=str,
)
def test_bad_images_are_named(image, sound, nodes, run):
    for name in ("SpecARAcceptanceMap", "SpecARTimeline"):
        assert "image" in refused(run, nodes[name], sound(name) | {"image": image})


def test_texts_of_any_kind_are_encoded_or_refused(tiny, continuous):
    @fuzz(2)
    @given(st.one_of(st.text(), st.sampled_from(["\0", "red " * 5000, "ü" * 10**5, "red\nапple", "-1", "1e9", "None"])))
    def check(text):
        for model in (tiny, continuous):
            try:
                model[1].encode_from_tokens_scheduled(model[1].tokenize(text))
            except REFUSALS as error:
                assert len(str(error)) < 2000

    check()
