"""Special tokens that a user writes into a prompt or a question: they stay what they are, and a notice says so."""

import re
from base64 import b64encode
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model, load_reader
from comfyui_specar.model_loaders.families import emu3
from comfyui_specar.model_loaders.text.t5 import T5Encoder
from comfyui_specar.models.image_reader import square
from comfyui_specar.models.text.prompt_encoders import ClassEncoder, MissingEncoder, TokenEncoder
from comfyui_specar.models.text.tokenizer import Tokenizer
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from ..support import tiny_chameleon, tiny_emu3, tiny_janus
from ..support.tiny_family import declared
from ..support.tiny_folder import byte_tokenizer

TINY = declared("TINY")
LANGUAGE = declared("LANGUAGE")
READERS = {"janus-pro": tiny_janus.write, "lumina-mgpt": tiny_chameleon.write, "emu3": tiny_emu3.write}


@pytest.fixture(params=TINY)
def model(request, tmp_path):
    return load_model(TINY[request.param].write(tmp_path))


def test_special_tokens_in_a_prompt_stay_and_are_named(model):
    encoder, plain = model.prompt_encoder, model.encode_prompt
    if not isinstance(encoder, TokenEncoder):
        assert isinstance(encoder, ClassEncoder | MissingEncoder) and model.family not in LANGUAGE
        return
    first, second = LANGUAGE[model.family].tokens
    text = f"a {first} red {second} and {first} cup"
    ids, without = (plain(each)[0][0].flatten().tolist() for each in (text, "a  red  and  cup"))
    for token, times in ((first, 2), (second, 1)):
        id = encoder.tokenizer.id(token)
        assert ids.count(id) == without.count(id) + times
    [notice] = model.text_notices(text)
    assert f"special tokens, not as words: {first}, {second}. Leave them out" in notice
    assert not model.text_notices("a <red> cup, <b>bold</b>, für 3 < 4")
    assert notice in model.request(plain(text)).notices
    if model.family != "glm-image":  # which has no guidance
        assert notice in model.request(plain("a cup"), plain(text), cfg=2.0).notices


def test_lone_surrogates_of_json_are_no_hindrance(tmp_path):
    model = load_model(TINY["glm-image"].write(tmp_path))
    [notice] = model.text_notices("a \ud800 cup<sop>")
    assert "<sop>" in notice


def test_many_are_shortened(tmp_path):
    model = load_model(TINY["emu3"].write(tmp_path))
    [notice] = model.text_notices(" ".join(f"<|visual token {i:06}|>" for i in range(32)))
    assert "<|visual token 000000|>" in notice and "[...]" in notice and len(notice) < 500


@pytest.mark.parametrize("family", READERS)
def test_special_tokens_in_a_question_are_named(family, tmp_path):
    folder = READERS[family](tmp_path)
    reader = load_reader(folder, load_model(folder))
    images = torch.arange(8).view(1, 2, 4) if reader.tokens else square(torch.rand(9, 9, 3), 64)[None]
    token = LANGUAGE[family].tokens[0]
    asked = (reader.request(reader.prompt(images, each), 4).notices for each in (f"Is {token} a word?", "What?", ""))
    said, *others = asked
    assert len(said) == 1 and token in said[0] and others == [(), ()]


def test_what_cleaning_leaves_of_a_caption_is_named():
    specials = re.compile("sep|</s>")
    tokenizer = SimpleNamespace(specials_in=specials.findall, beyond=lambda text, count: "")
    found = [T5Encoder(None, tokenizer, 9, 4).notices(text) for text in ("a cat sep", "a cat</s>")]
    assert [any("special tokens" in notice for notice in notices) for notices in found] == [True, False]


def test_letters_among_the_added_tokens_of_a_file_are_words(tmp_path):
    """As in DeepSeek's files. Others add their special tokens without marking them as such."""
    library = byte_tokenizer(["[gMASK]", "<s>"])
    library.add_tokens([AddedToken("ü", special=False), AddedToken("<|t2i|>", special=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", "")
    assert tokenizer.specials_in("für <|t2i|>[gMASK], <|t2i|> <s") == ["<|t2i|>", "[gMASK]"]


def test_an_unknown_letter_is_no_special_token(tmp_path):
    library = Library(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", "")
    assert tokenizer.specials_in("a b") == [] and tokenizer.specials_in("a <unk>") == ["<unk>"]


def test_special_tokens_of_a_file_of_ranks(tmp_path):
    pieces = (b64encode(bytes([byte])).decode() for byte in range(256))
    (tmp_path / "emu3.tiktoken").write_text("\n".join(f"{piece} {i}" for i, piece in enumerate(pieces)), "utf-8")
    tokenizer = emu3.open_tokenizer(tmp_path / "model.safetensors", [])
    found = tokenizer.specials_in("<|image end|> <|extra_900|> <|extra_0|><|image end|>")
    assert found == ["<|image end|>", "<|extra_0|>"]
