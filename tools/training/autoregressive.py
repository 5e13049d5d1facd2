"""Trains the autoregressive model on token grids that are encoded anew for every step."""

import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.attention import additive
from ...models.backbone import Backbone, BackboneConfig
from ...models.positions import GridPositions, rotation_of
from ...models.prefix import CaptionPrefix
from ...models.vq import VQModel
from . import resume
from .captions import Captions
from .data import Images
from .loop import Average, Budget, Checkpoint, Team, autocast, compiled, rate, set_rate
from .muon import Muon, split_parameters
from .settings import IMAGE_SIZE, Setting
from .views import Scenes, Views

log = logging.getLogger(__name__)


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
    setting: Setting,
    images: Images,
    captions: Captions,
    vq: VQModel,
    out: Path,
    minutes: float | None = None,
    team: Team = Team(),  # noqa: B008 (a single process)
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Trains for the budget (or resumes from ``out``/model.pt); at the end, that file has the averaged model.

    weights: of a model to start from.
    """
    cfg, device = setting.model, torch.device(setting.device)
    images = images.select(setting.concepts)
    torch.manual_seed(1)
    model = TextToImage(setting, len(captions.words)).to(device)
    resume.start(model, weights)
    average = Average(model, cfg.ema)
    matrices, others = split_parameters(model, keep_out=("tok_embeddings", "output", "words", "null_caption"))
    muon = Muon(matrices, lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    adamw = torch.optim.AdamW(others, lr=cfg.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    checkpoint = Checkpoint(out / "model.pt", model=model, average=average.module, muon=muon, adamw=adamw)
    counters = checkpoint.resume() or {"step": 0, "spent": 0.0}
    step, budget, mixed = counters["step"], Budget(minutes or cfg.minutes, counters["spent"]), autocast(setting)
    captions.random.seed(step * team.size + team.rank)
    batches = Batches(setting, images, captions, vq.to(device).eval(), seed=step * team.size + team.rank)
    unseen = Batches(setting, images, captions, vq, seed=10**6)
    unseen = [unseen.sample(cfg.batch, held_out=True) for _ in range(4)]
    log.info("%.2f M parameters, %d images", sum(p.numel() for p in model.parameters()) / 1e6, len(images.code))
    predict = compiled(setting, model)
    begin, running, fraction = step, 0.0, budget.fraction
    while fraction < 1.0:
        set_rate([muon, adamw], cfg.learning_rate, rate(fraction, step))
        caption, dropped, tokens = batches.sample(cfg.batch // team.size)
        with mixed():
            logits = predict(caption, dropped, tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        model.zero_grad()
        loss.backward()
        fraction = team.agree(list(model.parameters()), budget.fraction)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
        average.update(model, step)
        step += 1
        running += (loss.item() - running) / min(step - begin, 50)
        if team.rank > 0:
            continue
        if step % 50 == 0:
            views = step * cfg.batch / len(images.code)
            log.info("step %d, %.1f min, loss %.4f, %.0f views", step, budget.spent / 60, running, views)
        if checkpoint.save(force=fraction >= 1.0, step=step, spent=budget.spent):
            log.info("step %d, train %.4f, held-out %.4f", step, running, held_out_loss(average.module, unseen))


def restore(setting: Setting, words: int, out: Path) -> TextToImage:
    """The averaged model of ``out``/model.pt, on the CPU, for inference."""
    model = TextToImage(setting, words)
    model.load_state_dict(torch.load(out / "model.pt", map_location="cpu", weights_only=True)["average"])
    return model.eval().requires_grad_(False)
