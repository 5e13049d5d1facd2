"""Trains MAR: a masked transformer over continuous tokens, and the diffusion head that samples one token at a time.

The loss is the paper's (Li et al., 2024, arXiv:2406.11838, sections 3.2 and 3.4): the head's, at unknown positions.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...model_loaders.files.checkpoint import open_checkpoint
from ...models.networks.diffusion_head import TRAINING_STEPS, DiffusionHead, NoiseSchedule
from ...models.networks.kl_vae import KLModel
from ...models.networks.mar import MAR, MARConfig
from .captions import Captions
from .data import Images
from .kl_vae import noisy
from .loop import Training, autocast, restored
from .settings import IMAGE_SIZE, MaskedSetting, Setting
from .views import Scenes, Views

GOLDEN = (math.sqrt(5) - 1) / 2


def known_count(length: int, power: float, step: int) -> int:
    """Number of known tokens in a batch: length * u^power, from none to all but one.

    u runs through a golden-ratio sequence, so that any range of steps covers all counts evenly. In the paper, 70 to
    100 % are unknown; a sampler that adds one token at a time uses every count, and a small model must be trained on
    each.
    """
    u = (0.5 + step * GOLDEN) % 1.0
    return min(int(length * u**power), length - 1)


def random_known(count: int, length: int, known: int, generator: torch.Generator) -> Tensor:
    """Masks bool [count, length] with ``known`` random positions set in each row."""
    ranks = torch.rand(count, length, generator=generator, device=generator.device).argsort(1).argsort(1)
    return ranks < known


def word_vectors(file: Path, captions: Captions) -> Tensor:
    """The word embedding [N, F] of a trained discrete model. Raises ValueError for another vocabulary."""
    checkpoint = open_checkpoint(file)
    if checkpoint.metadata["words"] != captions.words:
        raise ValueError(f"{file} has other words than this setting: train the discrete model with the same setting.")
    return checkpoint.tensors["word_embeddings.weight"].float()


class MaskedTextToImage(nn.Module):
    """MAR with its diffusion head and a frozen word embedding.

    ``guess`` predicts the expected token from the head's vector. It is used only in training: its regression loss is
    less noisy than the head's, so the transformer learns faster.
    """

    def __init__(self, setting: Setting, cfg: MaskedSetting, words: Tensor) -> None:
        """words [N, F]: one vector per word."""
        super().__init__()
        channels, side = setting.kl_vae.config.channels, IMAGE_SIZE // setting.kl_vae.config.factor
        self.backbone = MAR(
            MARConfig(
                dim=cfg.dim,
                encoder_layers=cfg.layers,
                decoder_layers=cfg.layers,
                heads=cfg.heads,
                rows=side,
                cols=side,
                channels=channels,
                slots=setting.masked_slots,
                conditions=words.shape[1],
                captions=True,
            )
        )
        self.head = DiffusionHead(channels, cfg.dim, cfg.head_width, cfg.head_depth)
        self.guess = nn.Linear(cfg.dim, channels)
        self.register_buffer("words", words.clone(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif "pos_embed" in name:
                nn.init.normal_(parameter, std=0.3)  # of the scale of what it is added to
            elif "time_embed" in name or "mask_token" in name or "fake_latent" in name:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(("attn.proj.weight", "mlp.fc2.weight")):
                nn.init.zeros_(parameter)  # every block starts as the identity
            elif parameter.ndim == 2:
                nn.init.xavier_uniform_(parameter)
        final = self.head.net.final_layer
        modulations = [block.adaLN_modulation[-1] for block in (*self.head.net.res_blocks, final)]
        for layer in (final.linear, *modulations):
            nn.init.zeros_(layer.weight)  # and the head predicts 0 at first

    def prompt(self, captions: Tensor, dropped: Tensor) -> Tensor:
        """Slot vectors [B, slots, D]: ``MAR.prompt`` and ``MAR.unconditional`` for captions of several lengths.

        captions int64 [B, n], -1 = no word (on the right); dropped bool [B]: no caption at all.
        """
        seen = (captions >= 0) & ~dropped[:, None]
        slots = self.backbone.prompt(self.words[captions.clamp_min(0)])
        filled = nn.functional.pad(seen, (0, slots.shape[1] - seen.shape[1]))
        return torch.where(filled[..., None], slots, self.backbone.unconditional(len(slots)))

    def vectors(self, captions: Tensor, dropped: Tensor, tokens: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """The head's vectors z [N, D] and the tokens [N, C] of all unknown positions.

        tokens fp32 [B, S, C]; known bool [B, S], the same number in every row.
        """
        seen = int(known[0].sum())
        z = self.backbone(self.prompt(captions, dropped), tokens, known, seen)
        return z[~known], tokens[~known]


@dataclass(frozen=True)
class DiffusionLoss:
    """Mean squared error of the noise, and the variational bound for the variance (both per channel)."""

    error: Tensor
    bound: Tensor


def diffusion_loss(
    head: DiffusionHead, schedule: NoiseSchedule, z: Tensor, tokens: Tensor, generator: torch.Generator
) -> DiffusionLoss:
    """The loss of improved DDPM (Nichol & Dhariwal, 2021, section 3.1), one random step per row.

    z [N, D], tokens [N, C]. The mean is trained only by the error of the noise; it is detached in the bound (in bits,
    as published). At the last step the true posterior is a point; here it has the schedule's clipped variance, so that
    the same divergence applies at every step.
    """
    t = torch.randint(schedule.steps, (len(z),), generator=generator, device=z.device)
    noise = torch.randn(tokens.shape, generator=generator, device=z.device)
    noised = schedule.signal[t][:, None] * tokens + schedule.noise[t][:, None] * noise
    time = head.net.time_embed(schedule.timesteps[t], z.dtype)
    predicted, share = head.net(noised.to(z.dtype), time, head.embed(z)).float().chunk(2, dim=-1)
    fixed = torch.cat((predicted.detach(), share), dim=-1)
    mean, log_variance = schedule.mean_log_variance(noised, fixed, t)
    true_mean = schedule.from_clean[t][:, None] * tokens + schedule.from_noisy[t][:, None] * noised
    true_log_variance = schedule.log_posterior[t][:, None]
    distance = (true_mean - mean).square() * (-log_variance).exp()
    divergence = 0.5 * (log_variance - true_log_variance + (true_log_variance - log_variance).exp() + distance - 1)
    return DiffusionLoss((predicted - noise).square().mean(), divergence.mean() / math.log(2))


class Latents(Views):
    """Captions and latent tokens, sampled anew from the image's posterior each time."""

    def __init__(
        self,
        setting: Setting,
        cfg: MaskedSetting,
        images: Images,
        captions: Captions,
        vae: KLModel,
        scale: float,
        seed: int,
    ) -> None:
        """scale: factor from the autoencoder's latents to tokens."""

        device, mixed = next(vae.parameters()).device, autocast(setting)
        vae.to(memory_format=torch.channels_last)

        def encode(pixels: Tensor) -> tuple[Tensor, Tensor]:
            with mixed():
                mean, log_variance = vae.encode_moments(pixels)
            return mean.float(), log_variance.float()

        super().__init__(setting, cfg.augmentation, images, captions, device, encode, seed)
        self.scale = scale

    def sample(self, count: int, held_out: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """captions int64 [count, n] (-1 = no word, on the right), dropped bool [count], tokens fp32 [count, S, C].

        Held-out batches keep whole captions.
        """
        return self.batch(*self.encoded(count, held_out), held_out)

    def batch(self, scenes: Scenes, encodings: list[Tensor], held_out: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Captions and noise for encoded images, as :meth:`sample` returns them."""
        rows = self.words(scenes, held_out)
        captions = torch.tensor([row + [-1] * (self.captions.slots - len(row)) for row in rows], device=self.device)
        mean, log_variance = encodings
        tokens = noisy(mean, log_variance, self.generator).flatten(2).mT * self.scale
        return captions, self.dropped(len(rows), held_out), tokens


@torch.no_grad()
def held_out_error(
    model: MaskedTextToImage, schedule: NoiseSchedule, batch: tuple[Tensor, Tensor, Tensor]
) -> list[float]:
    """Error of the noise with 0, 1/4, 1/2 and 3/4 of the tokens known, with fixed random numbers."""
    captions, dropped, tokens = batch
    count, length = tokens.shape[:2]
    errors = []
    for quarter in range(4):
        generator = torch.Generator(tokens.device).manual_seed(quarter)
        known = random_known(count, length, length * quarter // 4, generator)
        z, wanted = model.vectors(captions, dropped, tokens, known)
        errors.append(round(float(diffusion_loss(model.head, schedule, z, wanted, generator).error), 4))
    return errors


def train(
    setting: Setting,
    cfg: MaskedSetting,
    images: Images,
    captions: Captions,
    words: Tensor,
    vae: KLModel,
    scale: float,
    file: Path,
    minutes: float | None = None,
) -> None:
    """Train for the time (or resume from ``file``); at the end, that file has the averaged model."""
    device, mixed = torch.device(setting.device), autocast(setting)
    images = images.select(setting.concepts)
    torch.manual_seed(2)
    model = MaskedTextToImage(setting, cfg, words).to(device)
    outer = ("pos_embed", "mask_token", "fake_latent", "z_proj", "input_proj", "final_layer.linear", "guess")
    minutes = cfg.minutes if minutes is None else minutes
    training = Training(model, file, minutes, cfg.learning_rate, outer, cfg.ema, cfg.weight_decay)
    captions.random.seed(training.step)
    latents = Latents(setting, cfg, images, captions, vae, scale, seed=training.step)
    unseen = Latents(setting, cfg, images, captions, vae, scale, seed=10**6).sample(64, held_out=True)
    schedule = NoiseSchedule.cosine(TRAINING_STEPS, device=device)
    generator = torch.Generator(device).manual_seed(training.step)

    def losses(_fraction: float) -> dict[str, Tensor]:
        caption, dropped, tokens = latents.sample(cfg.batch)
        length = tokens.shape[1]
        known = random_known(cfg.batch, length, known_count(length, cfg.known_power, training.step), generator)
        with mixed():
            z, wanted = model.vectors(caption, dropped, tokens, known)
            loss = diffusion_loss(
                model.head, schedule, z.repeat(cfg.repeats, 1), wanted.repeat(cfg.repeats, 1), generator
            )
            guessed = (model.guess(z).float() - wanted).square().mean()
        total = loss.error + loss.bound + guessed
        return {"loss": total, "error": loss.error, "bound": loss.bound, "guess": guessed}

    training.run(
        losses, lambda: f"error at 0, 1/4, 1/2, 3/4 known {held_out_error(training.average, schedule, unseen)}"
    )


def restore(setting: Setting, cfg: MaskedSetting, words: Tensor, file: Path) -> MaskedTextToImage:
    """The averaged model of ``file``, on the CPU, for inference."""
    return restored(MaskedTextToImage(setting, cfg, words), file)
