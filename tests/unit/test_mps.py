"""All that runs on a device, on Apple's: as far as tests/support/mps.py knows it, and that it knows something."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.kernels import noise
from comfyui_specar.model_loaders.detect import load_drafter, load_image_decoder, load_model
from comfyui_specar.samplers.contract import Request
from comfyui_specar.samplers.drafts.structures import Static
from comfyui_specar.samplers.generate import generate
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.rng import Purpose, Stream

from ..support import tiny_chameleon, tiny_emu3, tiny_simplear, tiny_xar
from ..support.every_family import FAMILIES, METHODS, Family, asked, make_family
from ..support.mps import DEVICE, MetalTensor, metal
from ..support.tiny_mar import write_mar

pytestmark = pytest.mark.whole

BOTH = ("llamagen-c2i", "emu3")  # without and with tokens between rows: every method runs on one of them
FEW = ("sjd coupled", "static")  # those that run on the others
PROMPT = "heart, 3d, on a blue background"
STORAGE = (None, torch.int8, torch.float8_e4m3fn)


def both(make):
    """What is made on the CPU and on the device."""
    on_cpu = make("cpu")
    with metal():
        return on_cpu, make(DEVICE)


def same(found, wanted) -> bool:
    return isinstance(found, MetalTensor) and torch.equal(found.inner, wanted)


# Methods


@pytest.fixture(scope="module")
def families(request, tmp_path_factory) -> tuple[Family, Family]:
    folder = tmp_path_factory.mktemp("family")
    return both(lambda device: make_family(request.param, folder, device))


def request(family: Family, guided: bool, alone: bool) -> Request:
    two = asked(family, guided)
    return replace(two, batch=1, layout=replace(two.layout, forced=two.layout.forced[:1])) if alone else two


@pytest.mark.parametrize(
    ("families", "name"),
    [
        *((BOTH[number % 2], name) for number, name in enumerate(METHODS)),
        *((family, name) for family in FAMILIES if family not in BOTH for name in FEW),
    ],
    indirect=["families"],
)
@torch.inference_mode()
def test_every_method_generates_what_it_generates_on_the_cpu(families, name):
    on_cpu, on_metal = families
    guided = (list(METHODS).index(name) // 2 + list(FAMILIES).index(on_cpu.model.family)) % 2 > 0
    alone = on_cpu.model.family != "emu3"  # parts of one image's tensors are contiguous, those of two are not
    wanted = METHODS[name](on_cpu).sample(request(on_cpu, guided, alone))
    with metal() as device:
        found = METHODS[name](on_metal).sample(request(on_metal, guided, alone))
    assert same(found.tokens, wanted.tokens) and len(device.called) > 30
    assert not any(isinstance(x, MetalTensor) for x in (found.trace.positions | found.trace.rounds).values())


@pytest.mark.parametrize("storage", STORAGE, ids=str)
def test_the_bundled_model_generates_what_it_generates_on_the_cpu(storage):
    """With drafters, text encoder and image decoder, and its matrices in one byte per number, too."""
    folder = api.bundled("default")

    def drawn(device):
        model = load_model(folder, device, torch.float32, storage=storage)
        drafter = load_drafter(folder / "eagle", model)
        request = Request(model, model.encode_prompt(PROMPT), model.layout().beginning(32), model.defaults)
        with torch.inference_mode():
            return [method.sample(request).tokens for method in (SJD(window=6), DraftTree(drafter, Static()))]

    wanted, found = both(drawn)
    assert all(map(same, found, wanted))


def mar(folder):
    return write_mar(folder / "model.safetensors", defaults={"steps": 4})


@pytest.mark.parametrize(
    ("write", "mode", "keeping"),
    [
        (mar, "plain", False),
        (mar, "block", True),
        (mar, "prefix", False),
        (mar, "exact", True),
        (partial(tiny_xar.write, defaults={"steps": 3}), "block", False),
    ],
)
def test_vectors_are_those_of_the_cpu(write, mode, keeping, tmp_path):
    file = write(tmp_path)

    def drawn(device):
        model = load_model(file, device, torch.float32)
        if device == "cpu":  # from the mapped file to where copies lie: last bits depend on the address on AMD's Zen 5
            for weight in model.backbone.parameters():
                weight.data = weight.data.clone()
        method = api.methods.ContinuousNextToken(8)
        if mode != "plain":
            method = api.methods.ContinuousSpeculative(model, length=3, mode=mode, tolerance=0.5)
        rows, cols = model.grid
        kept = (torch.arange(2 * rows * cols) % 3 == 0).view(2, rows, cols)
        keep = {"kept": kept, "tokens": torch.ones(2, rows, cols, 16)} if keeping else {}
        return api.sample(model, model.encode_prompt("3"), method, seed=1, batch_size=2, cfg=2.0, **keep).tokens

    wanted, found = both(drawn)
    assert same(found, wanted)


DECODERS = {
    "vq": lambda folder: api.bundled("default") / "vq.safetensors",
    "kl": lambda folder: api.bundled("continuous") / "vae.safetensors",
    "chameleon": lambda folder: tiny_chameleon.write_vqgan(folder / "vqgan.ckpt"),
    "movq": tiny_emu3.write_decoder,
    "cosmos": tiny_simplear.write_cosmos,
}


def moved(module):
    """As ComfyUI moves a model to its device when a run begins."""
    module.to(DEVICE).device = torch.device(DEVICE)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_a_model_may_be_moved_after_its_prompts_were_read(kind, tmp_path):
    def asked():
        model = load_model(api.bundled("default") if kind == "discrete" else mar(tmp_path), "cpu", torch.float32)
        batch, rows, cols = 1, *model.grid
        kept = (torch.arange(rows * cols) % 3 == 0).view(1, rows, cols)
        if kind == "discrete":
            drafter = load_drafter(api.bundled("default/eagle"), model)
            methods = [SJD(window=6), DraftTree(drafter, Static())]
            kept, tokens, strength = kept, torch.ones_like(kept, dtype=torch.int64), kept.float()
            prompts = model.encode_prompt(PROMPT), model.encode_prompt("blue")
            request = model.request(*prompts, batch=batch, kept=kept, tokens=tokens, strength=strength, cfg=2.0)
            return request, methods, (model, drafter.module)
        methods = [api.methods.ContinuousSpeculative(model, length=3)]
        request = model.request(
            model.encode_prompt("3"), None, batch=batch, kept=kept, tokens=torch.ones(*kept.shape, 16)
        )
        return request, methods, (model,)

    request, methods, _ = asked()
    wanted = [generate(method, request).tokens for method in methods]
    request, methods, modules = asked()
    with metal():
        for module in modules:
            moved(module)
        found = [generate(method, request).tokens for method in methods]
    assert all(map(same, found, wanted))


@pytest.mark.parametrize("name", DECODERS)
def test_images_are_those_of_the_cpu(name, tmp_path):
    path = DECODERS[name](tmp_path)

    def decoded(device):
        decoder = load_image_decoder(path or tmp_path, device)
        pixels = torch.rand(1, *[4 * decoder.factor] * 2, 3, generator=torch.Generator().manual_seed(1))
        latent = decoder.encode_latent(pixels)
        return latent, decoder.decode(latent)

    wanted, found = both(decoded)
    assert all(map(same, found, wanted))


# Random numbers


def numbers(device):
    stream = Stream.of(2**63 + 2**33 + 5, 2, device)
    at = torch.arange(5, device=device).expand(2, -1)
    return (
        *stream.uniforms(at, (Purpose.ACCEPT, Purpose.REDRAW), 2),
        stream.gumbel(at, 9),
        stream.normal(at, 6, Purpose.NOISE, torch.tensor([[3]], device=device)),
    )


@pytest.mark.parametrize("exact", [True, False])
def test_random_numbers_are_those_of_the_cpu(exact, caplog):
    """Even where large int64 products were rounded."""
    noise.multiplies_exactly.cache_clear()
    wanted = numbers("cpu")
    with metal(exact):
        if not exact:
            word = torch.tensor([noise.WORD], device=DEVICE)
            assert (word * word).tolist() != [noise.WORD**2 - 2**64], "the device is as wrong as meant"
        found = numbers(DEVICE)
    noise.multiplies_exactly.cache_clear()
    assert all(map(same, found, wanted))
    assert ("multiplies int64 numbers wrongly" in caplog.text) is not exact


# The device itself

INTS, FLOATS = torch.arange(6), torch.rand(2, 3)


@pytest.mark.parametrize(
    ("error", "message", "run"),
    [
        (NotImplementedError, "no kernel for take", lambda x, f: x.take(x)),
        (NotImplementedError, "no kernel for _cummax_helper", lambda x, f: x.cummax(0)),
        (NotImplementedError, "no kernel for linalg_svd|no kernel for _linalg_svd", lambda x, f: torch.linalg.svd(f)),
        (TypeError, "float64", lambda x, f: f.double()),
        (TypeError, "float64", lambda x, f: torch.rand(2, dtype=torch.float64).to(DEVICE)),
        (TypeError, "float8", lambda x, f: f.to(torch.float8_e4m3fn)),
        (RuntimeError, "different devices", lambda x, f: f + torch.ones(3)),
        (RuntimeError, "int64 numbers behind", lambda x, f: x.argsort()),
        (RuntimeError, "strides", lambda x, f: f.t().sort()),
        (RuntimeError, "as fp32", lambda x, f: (x + 2**24) // 7),
        (RuntimeError, "another place", lambda x, f: (x > 2)[1:] & (x < 4)[1:]),
    ],
)
@torch.inference_mode()
def test_the_device_refuses(error, message, run):
    with metal(), pytest.raises(error, match=message):
        run(INTS.to(DEVICE), FLOATS.to(DEVICE))


@torch.inference_mode()
def test_the_device_computes():
    """Views share memory, what is written in place is seen, and operators made of others come to what they are made
    of."""
    with metal() as device:
        x = FLOATS.clone().to(DEVICE)
        view = x[:, 1:]
        view.mul_(2)
        x.reshape(-1)[0] = 7
        row = torch.tensor([1, 0], device=DEVICE)
        found = torch.stack((x[row], x.softmax(-1).flip(0)))
    wanted = FLOATS.clone()
    wanted[:, 1:] *= 2
    wanted[0, 0] = 7
    assert same(found, torch.stack((wanted[[1, 0]], wanted.softmax(-1).flip(0))))
    assert {"mul_.Tensor", "index.Tensor", "_softmax", "cat"} <= device.called
    assert x.device == torch.device(DEVICE) and x.device.type not in ("cpu", "cuda") and not x.is_cuda
