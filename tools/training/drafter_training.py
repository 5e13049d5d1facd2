"""Training objectives of the two kinds of drafters, and their training loop.

Both imitate the target's guided probabilities: for every example both branches are drafted, and the loss is the soft
cross-entropy under a random guidance scale (0: the unconditional branch, 1: the conditional one).
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model_loaders.families.eagle import image_embeddings
from ...models.discrete_model import DiscreteModel
from ...models.networks.backbone import Backbone, BackboneConfig, Block
from ...models.networks.eagle import Eagle
from ...models.networks.positions import rotation_at
from ...models.networks.prefix import CaptionPrefix, ClassPrefix
from .drafter_data import Batch, Pool
from .loop import Training

GUIDANCE = 3.0  # scales are sampled from 0 to this
NOISE = 0.1  # half-width of the uniform noise on the target's features
FIRST_STEP_ONLY = 0.5  # fraction of the time in which an EAGLE drafter trains only on the target's features
FEATURE_WEIGHT = 0.5  # of the smooth L1 distance between features


def guide(logits: Tensor, scale: Tensor | float) -> Tensor:
    """Guidance with one scale per example: logits [2B, T, V], scale [B, 1, 1] or a number -> [B, T, V]."""
    conditional, unconditional = logits.chunk(2)
    return unconditional + scale * (conditional - unconditional)


def head(model: DiscreteModel, hidden: Tensor) -> Tensor:
    """Logits [..., V] (fp32) of the target's head for hidden states of any dtype."""
    return model.backbone.logits(hidden.to(model.dtype))[..., : model.vocab].float()


def sampled(model: DiscreteModel, first: int) -> Tensor:
    """Which of the tokens ``first`` .. S - 1 are sampled [S - first] (bool); the others are forced."""
    return model.layout().forced[0, first:] < 0


def guidance(batch: Batch) -> Tensor:
    """A random guidance scale per image [B, 1, 1]."""
    return GUIDANCE * torch.rand(len(batch.tokens), 1, 1, device=batch.tokens.device)


def cross_entropy(target: Tensor, drafter: Tensor, scale: Tensor) -> Tensor:
    """Cross-entropy [B, T] (nats) of the guided distributions of two models, from their logits [2B, T, V]."""
    return -(guide(target, scale).softmax(-1) * guide(drafter, scale).log_softmax(-1)).sum(-1)


class Objective(Protocol):
    """Training of a drafter for ``model``: ``module`` has the parameters, in fp32 on the model's device."""

    model: DiscreteModel
    module: nn.Module

    def loss(self, batch: Batch, fraction: float) -> Tensor:
        """The scalar loss after ``fraction`` (0 .. 1) of the training time."""
        ...

    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        """Logits [2B, S - 1, V] for the tokens 1 .. S - 1, each drafted from the decided tokens before it."""
        ...


def initialise(module: nn.Module) -> None:
    """Small random matrices; blocks start as the identity."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, Block):
            nn.init.zeros_(part.attention.wo.weight)
            nn.init.zeros_(part.feed_forward.w2.weight)


class EagleObjective:
    """Features of an EAGLE drafter, compared with the target's own.

    Its block has the target's architecture, without the first norm and those after its two parts. The slots of a prompt
    are paired with id 0.

    depth: in the second half of training the drafter also continues its own predictions, as within a draft. A pair that
    is g drafts after the last decided token attends to the decided pairs and the g - 1 drafted ones between. There is
    no gradient through predictions that are fed back.
    """

    def __init__(self, model: DiscreteModel, depth: int) -> None:
        self.model, self.depth = model, depth
        self.module = Eagle(replace(model.backbone.config, layers=1, attention_norm=False, post_norms=False))
        initialise(self.module)
        nn.init.zeros_(self.module.fc.bias)
        self.module.tok_embeddings.weight.data.copy_(image_embeddings(model))
        self.module.to(model.device)

    def features(self, module: Eagle, batch: Batch, depth: int, noise: float = 0.0) -> list[Tensor]:
        """Predictions [2B, S - 1, D] of the target's states at the tokens 0 .. S - 2, one entry per draft
        depth."""
        if len(set(batch.prompts())) == 1:
            return self._branch(module, torch.cat(batch.hidden), batch, depth, noise)
        branches = [self._branch(module, hidden, batch, depth, noise) for hidden in batch.hidden]
        return [torch.cat(features) for features in zip(*branches, strict=True)]

    def _branch(self, module: Eagle, hidden: Tensor, batch: Batch, depth: int, noise: float) -> list[Tensor]:
        """The same for hidden [R, n + S - 1, D] of the batch, once or twice, after prompts of the same length."""
        hidden = hidden[:, :-1]
        hidden = hidden + noise * (2 * torch.rand_like(hidden) - 1)
        length = hidden.shape[1]
        prompt = length - batch.tokens.shape[1] + 1
        ids = F.pad(batch.tokens[:, :-1], (prompt, 0)).repeat(len(hidden) // len(batch.tokens), 1)
        head_dim = module.config.head_dim
        rotation = rotation_at(
            self.model.positions, prompt, length - prompt, self.model.grid, head_dim, self.model.device
        )
        fed, out = [hidden], [hidden]
        for groups in range(1, depth + 1):
            with torch.set_grad_enabled(torch.is_grad_enabled() and groups == depth):
                turn = rotation._replace(cos=rotation.cos.repeat(1, groups, 1), sin=rotation.sin.repeat(1, groups, 1))
                mask = draft_mask(length, groups).to(hidden.device)[None, None]
                out = module(torch.cat(fed, dim=1), ids.repeat(1, groups), turn, mask=mask).chunk(groups, dim=1)
            fed.append(F.pad(out[-1][:, :-1], (0, 0, 1, 0)))
        return [features[:, prompt:] for features in out]

    def loss(self, batch: Batch, fraction: float) -> Tensor:
        scale = guidance(batch)
        depths = 1 if fraction < FIRST_STEP_ONLY else self.depth
        total = torch.zeros((), device=batch.tokens.device)
        for depth, feature in enumerate(self.features(self.module, batch, depths, NOISE)):
            # The first drafts follow the first token, not the prompt.
            wanted, feature = batch.states(1 + depth), feature[:, depth:]
            entropy = cross_entropy(head(self.model, wanted), head(self.model, feature), scale)
            entropy = entropy[:, sampled(self.model, 1 + depth)].mean()
            total = total + entropy + FEATURE_WEIGHT * F.smooth_l1_loss(feature, wanted)
        return total / depths

    def predict(self, module: Eagle, batch: Batch) -> Tensor:
        return head(self.model, self.features(module, batch, 1)[0])


def draft_mask(length: int, groups: int) -> Tensor:
    """Attention mask [groups * length, groups * length] (bool) of decided pairs (group 0) and g-th drafts (group g).

    The parent of entry i of group g is entry i - 1 of group g - 1: it attends to the decided pairs up to i - g, and to
    one entry of every group between.
    """
    group = torch.arange(groups).repeat_interleave(length)
    root = torch.arange(length).repeat(groups) - group  # the last decided pair that an entry attends to
    same_draft = root[:, None] == root
    return torch.where(
        group == 0, torch.arange(length).repeat(groups) <= root[:, None], same_draft & (group <= group[:, None])
    )


class SmallObjective:
    """Logits of a small model of the target's family, compared with the target's. Only for LlamaGen's architecture:
    smaller language models are available, and training one from scratch would take too long."""

    def __init__(self, model: DiscreteModel, dim: int, layers: int) -> None:
        """Raises ValueError for a target that is a language model."""
        config, prefix = model.backbone.config, model.prefix
        if not isinstance(prefix, CaptionPrefix | ClassPrefix):
            raise ValueError(
                f"A small model can be trained only for targets with LlamaGen's architecture; {model.family} is a "
                "language model. Train an EAGLE drafter (--kind eagle), or use a smaller model of its family."
            )
        head_dim = config.head_dim
        heads = max(1, dim // head_dim)
        ffn_dim = -(-(8 * dim // 3) // 64) * 64
        self.model = model
        backbone = Backbone(BackboneConfig(heads * head_dim, layers, heads, ffn_dim, config.vocab, config.norm_eps))
        if isinstance(prefix, CaptionPrefix):
            small_prefix = CaptionPrefix(prefix.uncond_embedding.shape[1], prefix.slots, backbone.config.dim)
            small_prefix.uncond_embedding.copy_(prefix.uncond_embedding)
        else:
            small_prefix = ClassPrefix(prefix.classes, backbone.config.dim)
        self.module = DiscreteModel(
            backbone,
            small_prefix,
            model.family,
            model.grid,
            model.defaults,
            model.prompt_encoder,
            model.pixels_per_token,
            positions=model.positions,
        )
        initialise(self.module)
        self.module.to(model.device)

    def logits(self, module: DiscreteModel, batch: Batch) -> Tensor:
        """Logits [2B, S, V] for every token."""
        unconditional = module.prefix.unconditional(batch.features, module.grid)
        prefix = torch.cat((module.prefix(batch.features), unconditional.expand(len(batch.tokens), -1, -1)))
        return module(prefix, batch.tokens.repeat(2, 1))

    def loss(self, batch: Batch, fraction: float) -> Tensor:
        target = head(self.model, batch.states(0))
        return cross_entropy(target, self.logits(self.module, batch), guidance(batch)).mean()

    def predict(self, module: DiscreteModel, batch: Batch) -> Tensor:
        return self.logits(module, batch)[:, 1:]


@torch.no_grad()
def overlap(objective: Objective, module: nn.Module, pool: Pool, cfg: float) -> float:
    """Acceptance rate of single drafts: the mean of sum min(p, q) at temperature 1, over the sampled tokens after the
    first."""
    rates = []
    for batch in pool.all(16):
        batch = batch.to(objective.model.device)
        p = guide(head(objective.model, batch.states(1)), cfg).softmax(-1)
        q = guide(objective.predict(module, batch), cfg).softmax(-1)
        rates.append(torch.minimum(p, q).sum(-1)[:, sampled(objective.model, 1)].mean(-1))
    return float(torch.cat(rates).mean())


def train(
    objective: Objective,
    pool: Pool,
    held_out: Pool,
    file: Path,
    minutes: float,
    batch: int = 8,
    learning_rate: float = 3e-3,
) -> nn.Module:
    """Train for the time, or resume from ``file``; returns the averaged module."""
    module = objective.module.train().requires_grad_(True)
    training = Training(module, file, minutes, learning_rate, ("tok_embeddings", "output", "embedding_table", "_norm"))
    choice = random.Random(training.step)
    torch.manual_seed(training.step)

    def losses(fraction: float) -> dict[str, Tensor]:
        return {"loss": objective.loss(pool.sample(batch, choice).to(objective.model.device), fraction)}

    def report() -> dict[str, float]:
        return {
            f"overlap, guidance {cfg:g}": round(overlap(objective, training.average, held_out, cfg), 4)
            for cfg in (1.0, 2.0)
        }

    return training.run(losses, report, save_minutes=2.0)
