"""Trains the autoregressive model on token grids that are encoded anew for every step, or once beforehand.

Views that are encoded beforehand (:func:`encode`) can be trained on where the images are not; their captions are drawn
anew. Take many: a model that sees the same tokens four times overfits.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.attention import additive
from ...model_loaders.detect import load_model
from ...models.discrete_model import DiscreteModel
from ...models.networks.backbone import Backbone, BackboneConfig
from ...models.networks.positions import GridPositions, rotation_at
from ...models.networks.prefix import CaptionPrefix
from ...models.networks.vq import VQModel
from ...models.text.prompt_encoders import WordEncoder
from .captions import Captions, View
from .data import Images
from .loop import Training, autocast, restored
from .settings import IMAGE_SIZE, Setting
from .views import Scenes, Views

log = logging.getLogger(__name__)

VIEWS, HELD_OUT_VIEWS = 2000, 128  # of a file
VIEWS_FOLDER = "views"


class TextToImage(nn.Module):
    """LlamaGen's text-conditional model, with a word embedding in place of its T5 encoder."""

    def __init__(self, setting: Setting, words: int) -> None:
        super().__init__()
        cfg, vq = setting.model, setting.tokenizer.config
        side = IMAGE_SIZE // vq.factor
        ffn_dim = -(-(8 * cfg.dim // 3) // 128) * 128
        self.backbone = Backbone(BackboneConfig(cfg.dim, cfg.layers, cfg.heads, ffn_dim, vq.codebook_size))
        self.prefix = CaptionPrefix(setting.caption_dim, setting.caption_slots, cfg.dim)
        self.words = nn.Embedding(words, setting.caption_dim)
        self.null_caption = nn.Parameter(torch.randn(setting.caption_slots, setting.caption_dim))
        self.side, self.positions = side, GridPositions(prompt_keys=setting.prompt_keys)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and "words" not in name and "null_caption" not in name:
                nn.init.normal_(parameter, std=0.02)
        for block in self.backbone.layers:  # every block starts as the identity
            nn.init.zeros_(block.attention.wo.weight)
            nn.init.zeros_(block.feed_forward.w2.weight)

    def forward(self, captions: Tensor, dropped: Tensor, tokens: Tensor) -> Tensor:
        """Teacher-forced logits [B, S, V] fp32.

        captions int64 [B, n], right-aligned, -1 = padding; dropped bool [B]: use the null caption of the same length;
        tokens int64 [B, S].
        """
        slots = captions.shape[1]
        valid = captions >= 0
        features = self.words(captions.clamp_min(0))
        features = torch.where(dropped[:, None, None], self.null_caption[-slots:], features)
        prefix = self.prefix(features) * valid[:, :, None]
        x = torch.cat([prefix, self.backbone.tok_embeddings(tokens[:, :-1])], dim=1)
        seen = F.pad(valid, (0, tokens.shape[1] - 1), value=True)[:, None, :]
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device)
        mask = (causal.tril() & seen) | torch.eye(length, dtype=torch.bool, device=x.device)
        rotation = rotation_at(
            self.positions, slots, tokens.shape[1] - 1, (self.side, self.side), self.backbone.config.head_dim, x.device
        )
        hidden = self.backbone(x, rotation, mask=additive(mask[:, None], x.dtype))
        return self.backbone.logits(hidden[:, slots - 1 :]).float()


class Batches(Views):
    """Random (caption, tokens) pairs."""

    def __init__(self, setting: Setting, images: Images, captions: Captions, vq: VQModel, seed: int) -> None:
        cfg, device, mixed = setting.model, next(vq.parameters()).device, autocast(setting)
        vq.to(memory_format=torch.channels_last)

        def encode(pixels: Tensor) -> tuple[Tensor]:
            with mixed():
                latent = vq.encode_latent(pixels)
            return (vq.quantize_latent(latent.float()).flatten(1),)  # distances in fp32, as at inference

        super().__init__(setting, cfg.augmentation, images, captions, device, encode, seed)

    def sample(self, count: int, held_out: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """captions [count, n], dropped [count], tokens [count, S].

        Held-out batches keep whole captions.
        """
        return self.batch(*self.encoded(count, held_out), held_out)

    def batch(self, scenes: Scenes, encodings: list[Tensor], held_out: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Captions for encoded images, as :meth:`sample` returns them."""
        [tokens] = encodings
        captions = torch.tensor(self.captions.padded(self.words(scenes, held_out)), device=self.device)
        return captions, self.dropped(len(tokens), held_out), tokens


class Stored:
    """Random (caption, tokens) pairs of views that :func:`encode` wrote to a folder."""

    def __init__(self, setting: Setting, captions: Captions, folder: Path, seed: int) -> None:
        self.setting, self.captions, self.device = setting, captions, torch.device(setting.device)
        self.generator = torch.Generator().manual_seed(seed)
        self._parts = {
            held_out: _read_views(sorted(folder.glob("held-out.npz" if held_out else "views-*.npz")))
            for held_out in (False, True)
        }

    def sample(self, count: int, held_out: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Batches.sample`."""
        tokens, views = self._parts[held_out]
        chosen = torch.randint(len(tokens), (count,), generator=self.generator)
        drop, drop_caption = (0.0, 0.0) if held_out else (self.setting.drop_part, self.setting.drop_caption)
        rows = self.captions.padded([self.captions.of(views[i], drop) for i in chosen.tolist()])
        dropped = torch.rand(count, generator=self.generator) < drop_caption
        return (torch.tensor(rows, device=self.device), dropped.to(self.device), tokens[chosen].long().to(self.device))


def _read_views(files: list[Path]) -> tuple[Tensor, list[View]]:
    tokens, views = [], []
    for file in files:
        with np.load(file) as data:
            tokens.append(torch.from_numpy(data["tokens"]))
            views += [View(**each) for each in json.loads(str(data["views"]))]
    return torch.cat(tokens), views


def encode(setting: Setting, source: Callable[[int], Batches], folder: Path) -> None:
    """Encode held-out views and then the setting's into ``folder``, in files of VIEWS, where they are missing.

    source: seed -> images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"views-{i:04}": VIEWS for i in range(setting.views // VIEWS)}
    for seed, (name, count) in enumerate({"held-out": HELD_OUT_VIEWS, **files}.items()):
        if (file := folder / f"{name}.npz").exists():
            continue
        batches = source(seed)
        scenes, [tokens] = batches.encoded(count, held_out=name == "held-out")
        views = json.dumps([view._asdict() for view in batches.views(scenes)])
        np.savez_compressed(file, tokens=tokens.short().cpu().numpy(), views=views)
        log.info("%s: %d views", file, count)


def hard_negatives(captions: Captions, rows: Tensor, dropped: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``count`` hard negatives [count, n] of captions, and the rows [count] of these.

    rows: captions [B, n], -1 = padding. Where fewer have one, some appear again; if none has, they are the captions.
    """
    found = []
    for i in (~dropped).nonzero().flatten().tolist():
        said = dict.fromkeys(word for word in rows[i].tolist() if word >= 0)
        if negatives := captions.hard_negatives(list(said)):
            found.append((i, captions.random.choice(list(negatives.values()))))
    chosen = [found[k % len(found)] for k in range(count)] if found else []
    index = torch.tensor([i for i, _ in chosen] or [0] * count, dtype=torch.int64, device=rows.device)
    negatives = torch.tensor(captions.padded([negative for _, negative in chosen]), device=rows.device)
    return (negatives if chosen else rows[index]), index


def contrastive_loss(nll: Tensor, negative_nll: Tensor) -> Tensor:
    """The mean cross-entropy of Bayes' posterior of an image's caption and a hard negative, by the negative
    log-likelihood [N] of the image under both.

    It has its minimum where the likelihoods are right. Unlike their mean over tokens, it weighs those that depend on
    the word, such as the few of a mouth.
    """
    return F.softplus(nll - negative_nll).mean()


@torch.no_grad()
def measure_words(model: TextToImage, captions: Captions, batches: Batches, count: int) -> dict[str, dict[str, float]]:
    """How many nats the log-likelihood of a held-out portrait loses with a hard negative of its caption, in the mean of
    ``count`` images: style -> kind of word -> nats (without a style that none of them has)."""
    scenes, [tokens] = batches.encoded(count, held_out=True)
    lost: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for view, row, image in zip(batches.views(scenes), batches.words(scenes, held_out=True), tokens, strict=True):
        if negatives := captions.hard_negatives(row):
            rows = torch.tensor(captions.padded([row, *negatives.values()]), device=tokens.device)
            logits = model(rows, torch.zeros(len(rows), dtype=torch.bool), image.expand(len(rows), -1))
            nll = F.cross_entropy(logits.mT, image.expand(len(rows), -1), reduction="none").sum(1)
            for kind, value in zip(negatives, (nll[1:] - nll[0]).tolist(), strict=True):
                lost[view.words[0]][kind].append(value)
    return {style: {kind: fmean(nats) for kind, nats in kinds.items()} for style, kinds in lost.items()}


@torch.no_grad()
def held_out_loss(model: TextToImage, batches: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Mean nats per token on held-out pairs of image and background."""
    losses = [F.cross_entropy(model(c, d, t).flatten(0, 1), t.flatten()) for c, d, t in batches]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def take_weights(model: TextToImage, words: Sequence[str], file: Path) -> None:
    """Copy the weights of an exported model of the same structure, with any number of slots, which knows all
    ``words``."""
    trained = load_model(file, dtype=torch.float32)
    assert isinstance(trained, DiscreteModel) and isinstance(trained.prompt_encoder, WordEncoder)
    model.backbone.load_state_dict(trained.backbone.state_dict())
    model.prefix.cap_proj.load_state_dict(trained.prefix.get_submodule("cap_proj").state_dict())
    nothing = trained.prefix.get_buffer("uncond_embedding")
    model.null_caption.copy_(nothing[torch.arange(len(model.null_caption)) % len(nothing)])
    known = trained.prompt_encoder.words
    model.words.weight.copy_(trained.prompt_encoder.table[[known.index(word) for word in words]])


def train(
    setting: Setting,
    captions: Captions,
    source: Callable[[int], Batches | Stored],
    out: Path,
    minutes: float | None = None,
    start: Path | None = None,
) -> None:
    """Train for the time (or resume from ``out``/model.pt); at the end, that file has the averaged model.

    source: seed -> training images. start: the file of an exported model to begin from.
    """
    cfg, device, mixed = setting.model, torch.device(setting.device), autocast(setting)
    torch.manual_seed(1)
    model = TextToImage(setting, len(captions.words))
    if start is not None:
        take_weights(model, captions.words, start)
    model.to(device)
    outer = ("tok_embeddings", "output", "words", "null_caption")
    minutes = cfg.minutes if minutes is None else minutes
    training = Training(model, out / "model.pt", minutes, cfg.learning_rate, outer, cfg.ema, cfg.weight_decay)
    seed = training.step + 10**5 * (start is not None)  # other views than those of the steps before
    captions.random.seed(seed)
    batches, unseen = source(seed), source(10**6)
    unseen = [unseen.sample(cfg.batch, held_out=True) for _ in range(4)]
    predict = torch.compile(model, dynamic=False) if setting.compile else model

    with ThreadPoolExecutor(1) as pool:  # a batch is encoded while the model learns the last one
        following = pool.submit(batches.sample, cfg.batch)

        def losses(_fraction: float) -> dict[str, Tensor]:
            nonlocal following
            caption, dropped, tokens = following.result()
            following = pool.submit(batches.sample, cfg.batch)
            negatives, index = hard_negatives(captions, caption, dropped, cfg.batch // 2 if cfg.contrastive else 0)
            tokens = torch.cat((tokens, tokens[index]))
            with mixed():
                logits = predict(torch.cat((caption, negatives)), torch.cat((dropped, dropped[index])), tokens)
            nll = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)
            mean = nll[: cfg.batch].mean()
            if not cfg.contrastive:
                return {"loss": mean}
            contrastive = contrastive_loss(nll[index].sum(1), nll[cfg.batch :].sum(1))
            return {"loss": mean + cfg.contrastive * contrastive, "nats": mean, "contrastive": contrastive}

        training.run(losses, lambda: f"{held_out_loss(training.average, unseen):.4f} nats per token")


def restore(setting: Setting, words: int, out: Path) -> TextToImage:
    """The averaged model of ``out``/model.pt, on the CPU, for inference."""
    return restored(TextToImage(setting, words), out / "model.pt")
