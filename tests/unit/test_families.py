"""What every language model that generates images is asked alike: what it says of itself, which prompts it takes, that
it finds its tokenizer, and that files which cannot be used are refused. What only one family does is in its own file.
"""

import shutil

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.families import FAMILIES
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.models.latents import quantize
from comfyui_specar.samplers.contract import SamplingParams
from safetensors.torch import save_file
from tokenizers import Tokenizer

from ..support import tiny_chameleon, tiny_emu3, tiny_simplear
from ..support.bad_files import refused
from ..support.closeness import fp64
from ..support.every_family import FAMILIES as TINY
from ..support.models import of_ids
from ..support.tiny import vq_weights
from ..support.tiny_family import declared
from ..support.tiny_folder import byte_tokenizer, edited

WRITE = {name: tiny.write for name, tiny in TINY.items() if not name.startswith("llamagen")}
LANGUAGE = declared("LANGUAGE", continuous=False)
PROMPTS = {name: each.prompts for name, each in LANGUAGE.items() if each.prompts}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family -> its folder, which tests must not change."""
    return {family: write(tmp_path_factory.mktemp(family), layers=1) for family, write in WRITE.items()}


@pytest.fixture(scope="module")
def models(folders):
    return {family: load_model(folder) for family, folder in folders.items()}


@pytest.fixture
def copied(folders, tmp_path):
    """Copies a family's folder, with what lies beside it in a release: copied(family) -> folder."""

    def copy(family):
        source = folders[family]
        if family == "glm-image":
            return shutil.copytree(source.parent, tmp_path / "release") / source.name
        return shutil.copytree(source, tmp_path / source.name)

    return copy


@pytest.fixture(params=WRITE)
def family(request):
    return request.param


def start(model, prompt, negative=None):
    return model.start(prompt, negative, 1, model.layout(), 2, guided=model.guidance or negative is not None)


def tokenizer_of(folder):
    beside = folder.parent / "processor" / "tokenizer.json"
    return beside if beside.is_file() else folder / "tokenizer.json"


# What it is


def test_what_a_model_says_of_itself(models, family):
    model, says = models[family], LANGUAGE[family]
    longest, channels, pixels = says.sizes
    codes = [] if says.first is None else range(says.first, says.first + 32)
    assert (model.family, model.vocab, model.vocab_total) == (family, 32, 32 + len(says.specials))
    assert model.word_ids == (*codes, *says.specials) and model.layout().forced.tolist() == [list(says.forced)]
    assert model.grid == (4, 4) and (4, 4) in model.grids and model.longest == longest
    assert model.defaults == SamplingParams(**says.params) and model.dtype == torch.float32
    assert model.codebook.shape == (32, channels) and model.pixels_per_token == pixels
    assert not any(p.requires_grad for p in model.parameters())
    codes = torch.arange(32).view(1, 4, 8)
    assert torch.equal(quantize(model, model.dequantize(codes)), codes), "latents stay the same tokens"


def test_no_family_recognises_an_image_decoder_alone():
    decoders = vq_weights(), tiny_emu3.vq_weights(), tiny_simplear.cosmos_weights(), tiny_chameleon.vqgan_weights()
    for decoder in decoders:
        assert not any(family.recognise(decoder) for family in FAMILIES)


@pytest.mark.parametrize("wanted", [(5, 5), (90, 90), (10**9, 1)])
def test_other_grids_are_refused(folders, family, wanted):
    with pytest.raises(ValueError, match=r"does not generate.*nearest.* \d+ x \d+|between 1 and 1024"):
        load_model(folders[family], grid=wanted)
    assert load_model(folders[family], grid=(4, 4)).grid == (4, 4)


# Prompts


@pytest.mark.parametrize("family", PROMPTS)
def test_prompts_are_framed_as_in_training(models, folders, family):
    model, tokenizer = models[family], Tokenizer.from_file(str(tokenizer_of(folders[family])))
    prompt = model.encode_prompt("a {} cup")
    for name, text in (("positive", PROMPTS[family][0]), ("negative", PROMPTS[family][-1])):
        wanted = tokenizer.encode(text.replace("{}", "a {} cup"), add_special_tokens=False).ids
        assert model.unpack_prompt(prompt, 1, name, (4, 4)).features.flatten().tolist() == wanted


@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, lambda ids: ids * 0.5, lambda ids: torch.cat((ids, ids), dim=1), lambda ids: ids[:, 1:]],
    ids=["zeroed", "averaged", "joined", "cut"],
)
@pytest.mark.parametrize("side", ["positive", "negative"])
def test_a_prompt_that_another_node_changed_is_refused(models, family, change, side):
    model = models[family]
    [[ids, extra]] = prompt = model.encode_prompt("a red circle")
    changed = [[change(ids), extra]]
    with pytest.raises(ValueError, match=f"{side}.*another node"):
        start(model, *((changed, None) if side == "positive" else (prompt, changed)))


@pytest.mark.parametrize("ids", [[10**6], [-1], [], [1.5], [0, float("nan")]])
def test_ids_that_are_no_words_are_refused(models, family, ids):
    with pytest.raises(ValueError, match="words"):
        start(models[family], of_ids(models[family], ids))


def test_image_tokens_written_into_a_prompt_are_refused(models):
    with pytest.raises(ValueError, match="Image tokens"):
        start(models["emu3"], models["emu3"].encode_prompt("a <|visual token 000001|> b"))


def test_a_prompt_may_hold_anything_that_json_can(models, family):
    prompt = models[family].encode_prompt("half a character: \ud83d, braces: {0} {}, %s, 日本語 🎨 \x00")
    assert start(models[family], prompt).prefill.logits.isfinite().all()


@torch.inference_mode()
def test_branches_of_several_lengths_do_not_disturb_each_other(models, family):
    """Of two prompts, and of a prompt and the unconditional one, if nobody wrote another."""
    model, layout = models[family], models[family].layout()
    short, long = model.encode_prompt("a cup"), model.encode_prompt("anything but a very long prompt")
    cases = [(short, long, model.unpack_prompt(long, 1, "negative", model.grid).features)]
    if model.guidance:
        cases.append((short, None, model.prefix.null(short[0][0], model.grid)))
    for prompt, negative, ids in cases:
        with fp64():
            state = model.start(prompt, negative, 2, layout, slack=0, guided=True)
            alone = [
                model.start(each, None, 1, layout, slack=0, guided=False).prefill.logits[0]
                for each in (prompt, model.encode_features(ids))
            ]
        assert state.cache.lengths.tolist() == [prompt[0][0].shape[1]] * 2 + [ids.shape[1]] * 2
        torch.testing.assert_close(state.prefill.logits[[0, 2]], torch.stack(alone))


def test_memory_is_what_was_announced(models, family):
    model, layout = models[family], models[family].layout()
    short, long = model.encode_prompt("a cup"), model.encode_prompt("anything but a very long prompt")
    for negative, guided in ((None, False), (None, model.guidance), (long, True)):
        cache = model.start(short, negative, 2, layout, slack=7, guided=guided).cache
        longest = model.prompt_tokens(short, negative, 2, layout, guided)
        assert model.kv_bytes(2, layout, 7, guided, longest) == cache.keys.nbytes + cache.values.nbytes


def test_a_prompt_that_leaves_no_space_for_the_image(models, family):
    model = models[family]
    with pytest.raises(ValueError, match=rf"{model.longest}.*Shorten"):
        start(model, of_ids(model, [0] * int(model.longest)))


def test_a_missing_tokenizer_is_named_when_it_is_used(models, copied, family):
    """Ids generate the same image without one."""
    folder = copied(family)
    tokenizer_of(folder).unlink()
    bare, prompt = load_model(folder), models[family].encode_prompt("a cup")[0][0]
    with pytest.raises(FileNotFoundError, match=rf"(?s){LANGUAGE[family].repository}.*{folder.name}") as caught:
        bare.encode_prompt("a cup")
    assert "tokenizer.json" in str(caught.value)
    images = [
        api.sample(model, model.encode_features(prompt), negative=model.encode_features(prompt), temperature=0).tokens
        for model in (models[family], bare)
    ]
    assert torch.equal(*images)
    if family in ("janus-pro", "simplear", "emu3", "emu3.5"):  # whose unconditional prompt is made of words
        with pytest.raises(FileNotFoundError):
            api.sample(bare, bare.encode_features(prompt))


@pytest.mark.parametrize("specials", [("<s>", "</s>"), ("<|endoftext|>", "<racm3:break>")])
def test_the_tokenizer_of_another_model_is_refused(copied, family, specials):
    folder = copied(family)
    file = tokenizer_of(folder)
    byte_tokenizer(specials).save(str(file))
    with pytest.raises(CheckpointError, match="tokenizer.*another model"):
        load_model(folder).encode_prompt("a cup")
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="tokenizer.json.*Download"):
        load_model(folder).encode_prompt("a cup")


# Weights


def test_one_of_several_shards_is_no_model(tmp_path, family):
    folder = WRITE[family](tmp_path, shards=2)
    with pytest.raises(CheckpointError, match="shards"):
        load_model(folder / "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2 shards.*missing.*model-00002-of-00002.safetensors"):
        load_model(folder)


def test_a_model_that_overflows_generates_nothing(folders):
    """With every method: test_faults."""
    model = load_model(folders["janus-pro"])
    model.backbone.norm.weight.data[0] = torch.inf
    with pytest.raises(ValueError, match="NaN.*torch.float32.*bf16"):
        api.sample(model, model.encode_prompt("a"))


# Settings


CASES = [(family, *case) for family, each in LANGUAGE.items() for case in each.nonsense]


@pytest.mark.parametrize(("family", "key", "value"), CASES)
def test_settings_that_make_no_sense(copied, family, key, value):
    refused(edited(copied(family), **{"specar": None} | {key: value}))


@pytest.mark.parametrize(
    "value", [{"grid": [10**9, 10**9]}, {"grid": None}, {"defaults": {"foo": 1}}, {"defaults": {"cfg": "x"}}], ids=str
)
def test_metadata_that_makes_no_sense(copied, family, value):
    refused(edited(copied(family), specar=value))


# Decoders beside a model


@pytest.mark.parametrize("family", [name for name in WRITE if name != "glm-image"])
def test_a_decoder_of_another_model_is_left_and_named(copied, family, caplog):
    """The model keeps its own, or stays without one."""
    folder = copied(family)
    save_file(vq_weights() | {"quantize.embedding.weight": torch.randn(64, 8)}, str(folder / "vq.safetensors"))
    assert load_model(folder).codebook.shape == (32, LANGUAGE[family].sizes[1])
    assert "vq.safetensors" in caplog.text and "32 codes" in caplog.text
    if beside := LANGUAGE[family].decoder:
        (folder / beside).rename(folder / "elsewhere")
        assert load_model(folder).codebook is None


def test_a_decoder_that_cannot_be_read_does_not_keep_a_model_from_loading(folders, tmp_path):
    (tmp_path / "vqgan.ckpt").write_bytes(b"junk")
    for family in ("anole", "lumina-mgpt"):
        assert load_model(folders[family], search_folders=[tmp_path]).codebook.shape[0] == 32
