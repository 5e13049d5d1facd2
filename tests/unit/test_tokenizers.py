"""Tokenizers of every family: what of their files is used, and which are refused; byte pair encoding."""

import json
import shutil
from functools import partial
from itertools import pairwise

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.families import emu3, harmon, simplear
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.model_loaders.text.t5 import T5Encoder
from comfyui_specar.models.text.prompt_encoders import features_of
from comfyui_specar.models.text.tiktoken_file import tokenizer_of
from comfyui_specar.models.text.tokenizer import Tokenizer, find_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from ..support import tiny_emu3, tiny_harmon, tiny_simplear, tiny_t5
from ..support.models import of_ids
from ..support.tiny import CAPTION
from ..support.tiny_family import declared

TINY = declared("TINY")
TEXT = "a red cup " * 3
LANGUAGE = declared("LANGUAGE")


def write(family, folder):
    """A tiny model with tokenizer.json (None: the family has none). Returns what is to be loaded, and that file."""
    folder.mkdir(parents=True)
    path = TINY[family].write(folder)
    if family == "harmon":
        vocab = folder / "qwen25_tokenizer" / "vocab.json"
        Tokenizer(vocab, "missing")._open().save(str(vocab.with_name("tokenizer.json")))
    if family == "janus-pro":
        ids = dict(zip(("bos_token_id", "pad_token_id"), (260, 262), strict=True))
        stated = ids | {"generation_kwargs": {"boi_token_id": 263}}
        (path / "generation_config.json").write_text(json.dumps(stated), encoding="utf-8")
    return path, next(folder.rglob("tokenizer.json"), None)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {family: write(family, folder / family.replace(".", "-")) for family in TINY}


@pytest.fixture
def copy(sources, tmp_path):
    """(family) -> a copy of its files that a test may change: what is to be loaded, and its tokenizer.json."""

    def make(family):
        path, file = sources[family]
        root = next(each for each in file.parents if each.parent.name.startswith("families"))
        shutil.copytree(root, tmp_path / root.name)
        return (tmp_path / root.name / each.relative_to(root) for each in (path, file))

    return make


def test_every_family_with_a_tokenizer_is_here(sources):
    assert {family for family, (_, file) in sources.items() if file is not None} == LANGUAGE.keys()


def called(file, length=5, to=64):
    """Save a tokenizer as transformers does after a call that cuts and pads."""
    tokenizer = Library.from_file(str(file))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=to, pad_id=1, pad_token="x")
    tokenizer.save(str(file))


@pytest.mark.parametrize("family", LANGUAGE)
def test_neither_the_last_call_of_a_tokenizer_nor_a_byte_order_mark_changes_what_it_reads(copy, family):
    path, file = copy(family)
    wanted = api.load_model(path).encode_prompt(TEXT)[0][0]
    called(file)
    assert len(Library.from_file(str(file)).encode(TEXT).ids) == 64
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert torch.equal(api.load_model(path).encode_prompt(TEXT)[0][0], wanted)


def t5_encoder(folder):
    tiny_t5.write_words(folder)
    return T5Encoder(folder, Tokenizer(folder / "tokenizer.json", "missing", {"</s>": 1}), 120, 24)


def test_nor_in_that_of_t5(tmp_path):
    encoder = t5_encoder(tmp_path)
    called(tmp_path / "tokenizer.json")
    assert encoder.ids("a red cat " * 3) == [3, 4, 5] * 3 + [1]


def opened(tmp_path, **parts):
    """A tokenizer of one token, with parts of its file."""
    file = tmp_path / "tokenizer.json"
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": None, "decoder": None}
    whole["model"] = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    file.write_text(json.dumps(whole | parts), "utf-8")
    return Tokenizer(file, "missing")


@pytest.mark.parametrize(
    "step", [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}, {"type": "Prepend", "prepend": "aa"}]
)
def test_a_normalizer_that_makes_gigabytes_of_a_letter_is_refused(tmp_path, step):
    """The library would end the process, or compute for hours."""
    few, many = ({"type": "Sequence", "normalizers": [step] * count} for count in (3, 60))
    assert set(opened(tmp_path, normalizer=few).ids("a")) == {0}
    with pytest.raises(CheckpointError, match="writes more than 100 characters for one"):
        opened(tmp_path, normalizer={"type": "Sequence", "normalizers": [many]}).ids("a")


def test_what_a_tokenizer_puts_around_a_text_is_not_used(tmp_path):
    """It could be a thousand times the text itself."""
    template = {
        "type": "TemplateProcessing",
        "special_tokens": {},
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 9,
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
    }
    assert opened(tmp_path, post_processor=template).ids("aaa") == [0, 0, 0]


def test_a_caption_is_cleaned_up_to_a_length(tmp_path):
    """Cleaning takes the square of it: 20,000 letters take seconds."""
    encoder = t5_encoder(tmp_path)
    assert encoder.ids("a" * 4000)
    for read in (encoder.ids, encoder.notices):
        with pytest.raises(ValueError, match="4001 characters, but .* reads 120 tokens.*at most 4000 characters"):
            read("a" * 4001)


@pytest.mark.parametrize(
    ("family", "token"), [(name, token) for name, each in LANGUAGE.items() for token in each.stated]
)
def test_special_tokens_have_the_ids_that_the_model_states(copy, family, token):
    path, file = copy(family)
    other, text = LANGUAGE[family].other, file.read_text(encoding="utf-8")
    assert token in text and other in text
    file.write_text(text.replace(token, "\0").replace(other, token).replace("\0", other), encoding="utf-8")
    with pytest.raises(CheckpointError, match="tokenizer of another model") as error:
        api.load_model(path).encode_prompt(TEXT)
    assert str(file) in str(error.value)


def test_so_have_those_of_released_models_that_state_none(tmp_path):
    path = tiny_harmon.write(tmp_path)
    released = harmon.open_tokenizer(path, 151_936, [])
    with pytest.raises(CheckpointError, match=r"257 for <\|im_start\|>.* 151644 .*another model"):
        released.ids("a")
    rows = 151_672 + tiny_simplear.CODES
    tiny_simplear.tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = simplear.open_tokenizer(tmp_path / "model.safetensors", [], None)
    with pytest.raises(CheckpointError, match=r"has 264 tokens.* 151672.*another model"):
        simplear.first_code(tokenizer, rows, tiny_simplear.CODES, 151_672, path)
    assert simplear.first_code(tokenizer, rows, tiny_simplear.CODES, None, path) == 264


def test_a_folder_is_searched_for_all_names_before_the_next(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").touch()
    find = partial(find_tokenizer, tmp_path / "model" / "x.safetensors", ["other"], [])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "vocab.json").touch()
    assert find(("tokenizer.json", "vocab.json")) == tmp_path / "model" / "vocab.json"
    assert find() == tmp_path / "other" / "tokenizer.json"


# An empty prompt


@pytest.mark.parametrize("family", TINY)
@torch.inference_mode()
def test_an_empty_negative_prompt_is_the_models_own(sources, family):
    model = api.load_model(sources[family][0])
    if family == "llamagen-t2i":  # its T5 is not here
        prompt, empty = (model.encode_features(torch.ones(1, 1, CAPTION), text=text) for text in (TEXT, ""))
    else:
        prompt = model.encode_prompt("3" if family in ("llamagen-c2i", "mar", "xar") else TEXT)
        empty = model.encode_prompt("")
    assert model.unpack_prompt(empty, 1, "negative", model.grid) is None
    request = partial(model.request, prompt, cfg=1.0 if family == "glm-image" else 3.0)
    assert request(negative=empty).negative is None is request().negative
    if model.continuous:
        assert model.features(empty, 1, "negative") is None and model.start(prompt, empty, 1, model.grid, guided=True)
    elif model.guidance:
        for grid in {model.grids[0], model.grid, model.grids[-1]}:
            layout = model.layout(*grid)
            states = [model.start(prompt, negative, 1, layout, 1, guided=True) for negative in (None, empty)]
            assert torch.equal(*(state.prefill.logits for state in states)) and states[1].prefix_features[1] is None
            assert len({model.prompt_tokens(prompt, negative, 1, layout, True) for negative in (None, empty)}) == 1


@pytest.mark.parametrize("family", LANGUAGE)
def test_an_empty_prompt_is_written_for_every_grid(sources, family):
    model = api.load_model(sources[family][0])
    empty = model.encode_prompt("")
    assert empty[0][1]["ar"]["text"] == "" and of_ids(model, [1])[0][1]["ar"]["text"] is None
    written = []
    for grid in dict.fromkeys((model.grid, model.grids[0], model.grids[-1])):
        features = model.unpack_prompt(empty, 1, "positive", grid).features
        assert torch.equal(features, features_of(model.prompt_encoder.ids("", grid)))
        written.append(tuple(features.flatten().tolist()))
    if family in ("lumina-mgpt", "emu3"):  # which tell the size, and here have several
        assert len(set(written)) == len(written) > 1


@pytest.mark.parametrize("model", ["default", "classes"])
def test_where_no_word_is_no_prompt_an_empty_one_is_the_unconditional_prompt(sources, model):
    loaded = api.load_model(api.bundled("default") if model == "default" else sources["llamagen-c2i"][0])
    empty, prompt = loaded.encode_prompt(""), loaded.encode_prompt("star" if model == "default" else "3")
    request = loaded.request(empty, cfg=3.0)
    assert "prompt is empty" in request.notices[0] and len(request.notices) == 1
    own = loaded.prefix(request.conditioning.features)
    assert torch.equal(own, loaded.prefix.unconditional(request.conditioning.features, loaded.grid))
    assert not loaded.request(prompt, empty, cfg=1.0).notices  # nothing that was asked for is left out
    assert loaded.request(prompt, empty, cfg=3.0).negative is None


# Byte pair encoding


def plainly_joined(piece, ranks):
    """The definition: of all pairs join the one of the lowest rank, the leftmost first, until there is none."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [ranks[part] for part in parts]


def ids_of(word: bytes, pieces, folder) -> list[int]:
    """Ids of an ASCII word by a file with the single bytes and then these pieces."""
    ranks = [*(bytes([byte]) for byte in range(256)), *pieces]
    return tokenizer_of(tiny_emu3.write_ranks(folder, ranks) / "emu3.tiktoken", ".+", ()).encode(word.decode()).ids


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ids_are_those_of_the_definition(tmp_path, data):
    letters = data.draw(st.sampled_from([b"a", b"ab", b"abc"]))
    pieces = st.binary(min_size=2, max_size=5).map(lambda word: bytes(letters[byte % len(letters)] for byte in word))
    known = data.draw(st.lists(pieces, unique=True, max_size=20))
    ranks = {piece: i for i, piece in enumerate([*(bytes([byte]) for byte in range(256)), *known])}
    word = data.draw(st.binary(min_size=1, max_size=40).map(lambda w: bytes(letters[b % len(letters)] for b in w)))
    assert ids_of(word, known, tmp_path) == plainly_joined(word, ranks)


SPECIALS = ("<|one|>", "<|two words|>", "<||>")
PARTS = [*SPECIALS, "<|foo|>", "<|", "|>", "<", "|", ">", "one", " red", "a", "é", "<|one", "<|ONE|>", " "]


def ranked(file, specials, pattern=r"\S+|\s+"):
    return Tokenizer(file, "missing", read=partial(tokenizer_of, pattern=pattern, specials=specials))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tiny_emu3.write_ranks(tmp_path_factory.mktemp("ranks"))
    return ranked(folder / "emu3.tiktoken", SPECIALS)


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12))
def test_text_is_divided_at_names_of_the_vocabulary_alone(ranks, parts):
    text, wanted, plain = "".join(parts), [], ""

    def flush():
        return ranked(ranks.file, ()).ids(plain) if plain else []

    at = 0
    while at < len(text):
        special = next((name for name in SPECIALS if text.startswith(name, at)), None)
        if special:
            wanted += [*flush(), ranks.id(special)]
            plain = ""
        else:
            plain += text[at]
        at += len(special or "x")
    assert ranks.ids(text) == wanted + flush()


def test_what_looks_like_a_special_token_is_joined_with_its_neighbours(tmp_path):
    """As by the original tokenizer: here a space and the sign behind it are one id."""
    tiny_emu3.write_ranks(tmp_path, [*tiny_emu3.RANKS, b" <"])
    ranks = emu3.open_tokenizer(tmp_path / "model.safetensors", [])
    space, first = len(tiny_emu3.RANKS), len(tiny_emu3.RANKS) + 1
    assert ranks.ids("a <|foo|>") == [97, space, *b"|foo|>"]
    assert ranks.ids("a <|endoftext|>") == [97, 32, first]
