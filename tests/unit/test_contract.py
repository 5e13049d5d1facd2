"""Every method of the registry answers what the contract asks, and one function runs them all."""

import json
from contextlib import contextmanager

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.samplers.continuous_contract import ContinuousRequest
from comfyui_specar.samplers.contract import Method, Request
from comfyui_specar.samplers.generate import generate
from comfyui_specar.samplers.registry import METHODS, PUBLISHED, RULES, STRUCTURES, method_of

PROMPT = "heart, 3d, on a blue background"


@pytest.fixture(scope="module")
def models():
    return {
        continuous: api.load_model(api.bundled(name)) for continuous, name in ((False, "default"), (True, "continuous"))
    }


@pytest.fixture(scope="module")
def make(models):
    """make(class or function) -> a method, with a drafter where it needs one, and a request for its kind of model."""
    drafters = {
        False: api.load_drafter(api.bundled() / "small", models[False]),
        True: api.load_drafter(api.bundled("continuous") / "small", models[True]),
    }

    def make(build):
        continuous = getattr(build, "continuous", False)
        try:
            method = build()
        except TypeError:
            method = build(drafters[continuous])
        model = models[continuous]
        return method, model.request(model.encode_prompt(PROMPT), seed=3, batch=2)

    return make


BUILDS = [*METHODS, *(each.build for each in PUBLISHED.values())]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_a_method_answers_what_the_contract_asks(build, make):
    method, request = make(build)
    assert isinstance(method, Method)
    assert type(request) is (ContinuousRequest if method.continuous else Request)
    method.check(request)
    assert method.width(request) >= 1 and method.run_bytes(request) > 0
    settings = json.loads(json.dumps(method.describe(request)))
    assert settings["method"] == method.name and settings["lossless"] == method.lossless
    assert isinstance(method, method_of(settings)) and method.in_words(settings)
    assert method.session_key(request) == method.session_key(request)


@pytest.mark.parametrize(("group", "name"), [(METHODS, "name"), (RULES, "name"), (STRUCTURES, "kind")])
def test_names_are_unique(group, name):
    names = [getattr(each, name) for each in group]
    assert all(names) and len(set(names)) == len(names)


def test_memory_is_reserved_before_a_run_and_given_back_after_it(make):
    method, request = make(api.methods.SJD)
    events = []

    @contextmanager
    def reserve(asked, wanted):
        events.append(asked.run_bytes(wanted))
        yield lambda progress: events.append("pass")
        events.append("given back")

    output = generate(method, request, reserve)
    assert events == [method.run_bytes(request), *["pass"] * output.trace.totals["target_passes"], "given back"]
    assert torch.equal(output.tokens.flatten(1), method.sample(request).tokens)
    assert torch.equal(output.latent, request.model.dequantize(output.tokens))


def test_an_illegal_request_reserves_nothing(make):
    method, request = make(api.methods.SJD)

    @contextmanager
    def reserve(asked, wanted):
        raise AssertionError("nothing is to be reserved")
        yield

    with pytest.raises(ValueError, match="window.* 2"):
        generate(api.methods.SJD(window=1), request, reserve)
    with pytest.raises(ValueError, match="token ids.*vectors"):
        generate(method, make(api.methods.ContinuousNextToken)[1], reserve)


def test_parameters_that_a_model_does_not_have_are_named(models):
    for continuous, unfit in ((True, {"top_k": 3, "strength": torch.ones(1, 8, 8)}), (False, {"steps": 3})):
        model = models[continuous]
        with pytest.raises(ValueError, match=".*".join(sorted(unfit))):
            model.request(model.encode_prompt(PROMPT), **unfit)


def test_a_prompt_is_unpacked_once(models, monkeypatch):
    model = models[False]
    unpacked, prompt = [], model.encode_prompt(PROMPT)
    whole = type(model).unpack_prompt

    def unpack_prompt(self, given, *rest):
        unpacked.append(type(given).__name__)
        return whole(self, given, *rest)

    monkeypatch.setattr(type(model), "unpack_prompt", unpack_prompt)
    request = model.request(prompt, layout=model.layout().beginning(2))
    method = api.methods.NextToken()
    method.run_bytes(request)
    method.sample(request)
    assert unpacked.count("list") == 1 and set(unpacked) == {"list", "EncodedPrompt", "NoneType"}
