"""Trains the autoregressive model on token grids that are encoded anew for every step."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.attention import additive
from ...models.networks.backbone import Backbone, BackboneConfig
from ...models.networks.positions import GridPositions, rotation_of
from ...models.networks.prefix import CaptionPrefix
from ...models.networks.vq import VQModel
from .captions import Captions
from .data import Images
from .loop import Training, autocast, restored
from .settings import IMAGE_SIZE, Setting
from .views import Scenes, Views


class TextToImage(nn.Module):
    """LlamaGen's text-conditional model, with a word embedding in place of its T5 encoder."""

    def __init__(self, setting: Setting, words: int) -> None:
        super().__init__()
        cfg, vq = setting.model, setting.tokenizer.config
        side = IMAGE_SIZE // vq.factor
        ffn_dim = -(-(8 * cfg.dim // 3) // 256) * 256
        self.backbone = Backbone(BackboneConfig(cfg.dim, cfg.layers, cfg.heads, ffn_dim, vq.codebook_size))
        self.prefix = CaptionPrefix(setting.caption_dim, setting.caption_slots, cfg.dim)
        self.words = nn.Embedding(words, setting.caption_dim)
        self.null_caption = nn.Parameter(torch.randn(setting.caption_slots, setting.caption_dim))
        self.side = side
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
        rotation = rotation_of(
            GridPositions(), slots, tokens.shape[1] - 1, (self.side, self.side), self.backbone.config.head_dim, x.device
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


@torch.no_grad()
def held_out_loss(model: TextToImage, batches: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Mean nats per token on held-out pairs of image and background."""
    losses = [F.cross_entropy(model(c, d, t).flatten(0, 1), t.flatten()) for c, d, t in batches]
    return float(torch.stack(losses).mean())


def train(
    setting: Setting, images: Images, captions: Captions, vq: VQModel, out: Path, minutes: float | None = None
) -> None:
    """Train for the time (or resume from ``out``/model.pt); at the end, that file has the averaged model."""
    cfg, device, mixed = setting.model, torch.device(setting.device), autocast(setting)
    images = images.select(setting.concepts)
    torch.manual_seed(1)
    model = TextToImage(setting, len(captions.words)).to(device)
    outer, minutes = ("tok_embeddings", "output", "words", "null_caption"), minutes or cfg.minutes
    training = Training(model, out / "model.pt", minutes, cfg.learning_rate, outer, cfg.ema, cfg.weight_decay)
    captions.random.seed(training.step)
    batches = Batches(setting, images, captions, vq.to(device).eval(), seed=training.step)
    unseen = Batches(setting, images, captions, vq, seed=10**6)
    unseen = [unseen.sample(cfg.batch, held_out=True) for _ in range(4)]
    predict = torch.compile(model, dynamic=False) if setting.compile else model

    def losses(_fraction: float) -> dict[str, Tensor]:
        caption, dropped, tokens = batches.sample(cfg.batch)
        with mixed():
            logits = predict(caption, dropped, tokens)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens.flatten())}

    training.run(losses, lambda: f"{held_out_loss(training.average, unseen):.4f} nats per token")


def restore(setting: Setting, words: int, out: Path) -> TextToImage:
    """The averaged model of ``out``/model.pt, on the CPU, for inference."""
    return restored(TextToImage(setting, words), out / "model.pt")
