"""A tiny masked continuous model with random weights, whose numbers stay of order one, and requests to it."""

import torch
from comfyui_specar.models.continuous_model import MaskedModel
from comfyui_specar.models.networks.diffusion_head import DiffusionHead
from comfyui_specar.models.networks.mar import MAR, MARConfig
from comfyui_specar.models.text.prompt_encoders import ClassEncoder
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest

SIDE, CHANNELS, STEPS = 3, 4, 5
LENGTH = SIDE * SIDE


def tiny(seed: int) -> MaskedModel:
    """Random weights, those of the noise prediction small; the published first steps would blow them up."""
    torch.manual_seed(seed)
    config = MARConfig(
        dim=16,
        encoder_layers=1,
        decoder_layers=1,
        heads=2,
        rows=SIDE,
        cols=SIDE,
        channels=CHANNELS,
        slots=3,
        conditions=5,
    )
    backbone, head = MAR(config), DiffusionHead(CHANNELS, 16, 16, 1, first=600)
    for parameter in (*backbone.parameters(), *head.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(head.net.final_layer.linear.weight, std=0.05)
    torch.nn.init.zeros_(head.net.final_layer.linear.bias)
    return MaskedModel(backbone, head, "mar", 0.2, ContinuousParams(steps=STEPS), ClassEncoder(5)).eval()


def prompt(model, *classes):
    return model.encode_features(torch.tensor(classes, dtype=torch.float32)[:, None, None])


def request(model, batch=1, seed=0, negative=None, kept=None, tokens=None, **params):
    params = ContinuousParams(**{"steps": STEPS} | params)
    return ContinuousRequest(
        model, prompt(model, 3), model.grid, params, negative, seed, batch, kept=kept, tokens=tokens
    )
