"""Metrics of a folder of images: prompts are found, networks are asked as they are meant to be, what lacks is named."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from comfyui_specar.tools.benchmarks import quality, quality_folder
from PIL import Image
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

WORDS = "<|startoftext|> <|endoftext|> c a t t</w> ca cat</w> d o do g g</w> dog</w>".split()
MERGES = ["c a", "ca t</w>", "d o", "do g</w>"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Eight images, whose prompts stand beside them or in a list."""
    for name in ("HF_HUB_OFFLINE", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"):  # which the command sets
        monkeypatch.setenv(name, "1")
    generator = np.random.default_rng(0)
    for name in ("made", "real"):
        (tmp_path / name).mkdir()
        for i in range(8):
            image = Image.fromarray(generator.integers(0, 255, (40, 30 + i, 3), dtype=np.uint8))
            image.save(tmp_path / name / f"{i}.png")
    for i in range(4):
        (tmp_path / "made" / f"{i}.txt").write_text("cat\n", encoding="utf-8")
    lines = [json.dumps({"file_name": f"{i}.png", "text": "dog"}) for i in range(4, 8)]
    (tmp_path / "made" / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["quality", *map(str, arguments), "--device", "cpu"])
    quality.main()
    return json.loads(capsys.readouterr().out)


def write_clip(folder):
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"vocab_size": len(WORDS) + 2, "eos_token_id": 1, "bos_token_id": 0}
    vision = small | {"image_size": 32, "patch_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    model.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    (folder / "words.json").write_text(json.dumps({word: i for i, word in enumerate(WORDS)}), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES]), encoding="utf-8")
    CLIPTokenizer(str(folder / "words.json"), str(folder / "merges.txt")).save_pretrained(folder)


def test_images_are_compared_with_others_in_the_classifiers_features(folder, monkeypatch, capsys):
    found = run(monkeypatch, capsys, folder / "made", "--real", folder / "real", "--out", folder / "report.json")
    assert found["features"] == "classifier" and found["images"] == found["real"] == 8 and found["frechet"] > 0
    assert json.loads((folder / "report.json").read_text(encoding="utf-8")).items() >= found.items()
    same = run(monkeypatch, capsys, folder / "real", "--real", folder / "real")
    assert same["frechet"] == pytest.approx(0, abs=1e-6) and same["precision"] == same["recall"] == 1


def test_clip_compares_every_image_with_its_own_prompt(folder, monkeypatch, capsys):
    write_clip(folder)
    found = run(monkeypatch, capsys, folder / "made", "--clip", folder)["clip"]
    score = quality_folder.clip_score(folder, torch.device("cpu"))
    files = quality_folder.images_in(folder / "made")
    prompts = ["cat"] * 4 + ["dog"] * 4
    assert quality_folder.prompts_of(files) == prompts
    with torch.inference_mode():
        each = [score(file, prompt) for file, prompt in zip(files, prompts, strict=True)]
        assert score(files[0], "cat") != score(files[0], "dog")
    assert found["value"] == pytest.approx(sum(each) / 8) and -1 <= min(each) < max(each) <= 1


def test_packages_get_files_and_prompts_as_they_read_them(folder, monkeypatch, capsys):
    """Stand-ins with the signatures of torch-fidelity 0.3.0, image-reward 1.5 and hpsv2 1.2.0."""

    class Inception(nn.Module):
        def __init__(self, name, features_list, feature_extractor_weights_path=None):
            super().__init__()
            assert features_list == ["2048"] and feature_extractor_weights_path.endswith("inception.pth")

        def forward(self, x):
            assert x.dtype == torch.uint8 and x.shape[0] == 1
            return (x.float().mean((2, 3)),)

    class Reward(nn.Module):
        def score(self, prompt, image):
            return len(prompt) if image.endswith(".png") else None

    class Preference(nn.Module):
        def forward(self, image, text):
            return {"image_features": image, "text_features": text}

    def module(name, **content):
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    def read(image):
        return torch.tensor([0.25, 0.0])

    module("torch_fidelity")
    module("torch_fidelity.feature_extractor_inceptionv3", FeatureExtractorInceptionV3=Inception)
    module("ImageReward", load=lambda name, device, med_config: Reward())
    module("hpsv2")
    module(
        "hpsv2.img_score",
        create_model_and_transforms=lambda name, output_dict: (Preference(), None, read),
        get_tokenizer=lambda name: lambda texts: torch.tensor([[1.0, 0.0]]),
    )
    torch.save({"state_dict": {}}, folder / "hps.pt")
    (folder / "inception.pth").touch()
    networks = {"--inception": "inception.pth", "--image-reward": "", "--hps": "hps.pt", "--real": "real"}
    named = [part for name, file in networks.items() for part in (name, folder / file)]
    found = run(monkeypatch, capsys, folder / "made", *named)
    assert found["features"] == "inception" and found["image_reward"]["value"] == 3 and found["hps"]["value"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--image-reward", "."), "package image-reward"), (("--clip", "no-such-folder"), "no-such-folder")],
)
def test_what_lacks_is_named(arguments, words, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ImageReward", None)
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, folder / "made", *arguments)
    assert words in capsys.readouterr().err


def test_an_image_without_a_prompt_and_a_folder_without_images_are_named(folder):
    (folder / "made" / "3.txt").unlink()
    with pytest.raises(ValueError, match=r"3\.png has no prompt"):
        quality_folder.prompts_of(quality_folder.images_in(folder / "made"))
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="no images"):
        quality_folder.images_in(folder / "empty")
