"""Sockets and widgets that several nodes share, and reading the widgets' values."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .sockets import ARDrafter, ARModel, ARRule, ARTrace

MODELS_OWN = -1  # value of cfg, temperature, top_k, top_p for the model's default
OWN = f"Default: {MODELS_OWN} (auto), the model's own value."


def folded(inputs: list[io.Input], *names: str) -> list[io.Input]:
    """The inputs, those of these names marked as advanced: ComfyUI's new renderer folds them away until asked."""
    for field in inputs:
        if field.id in names:
            field.extra_dict["advanced"] = True
    return inputs


def removed(field: io.Input) -> io.Input:
    """A widget without effect. It keeps its place, unseen, because workflows store widgets by position."""
    field.extra_dict["hidden"] = True
    return field


def check_removed(name: str, value: Any, default: Any, why: str) -> None:
    """Raises ValueError where a workflow sets a removed widget to anything but its default."""
    if value != default:
        raise ValueError(
            f"{name} is {value!r}, but was removed: {why}. Add the node anew, or set {name} to {default!r}."
        )


def auto(name: str, value: int = 0) -> str:
    """What the front end calls a number widget that has a ``value`` for: no number of the user's, but an automatic one.
    The renderers can write nothing but a number into the widget itself."""
    return f"{name} ({value}: auto)"


def prompt_inputs() -> list[io.Input]:
    """Sockets and widgets of every sampler, first on the node."""
    return [
        ARModel.Input("model", tooltip="The model, from Load AR Checkpoint."),
        io.Conditioning.Input("positive", tooltip="The prompt: CLIP Text Encode with the model's own CLIP."),
        io.Latent.Input(
            "latent_image",
            tooltip="Size and batch (Empty AR Latent), or an encoded image with a noise "
            "mask: tokens outside the mask are kept.",
        ),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="The same seed with the same settings gives the same image. Image i of a batch uses "
            "seed + i and equals a single run with that seed, so increment would repeat images of a batch: "
            "take randomize.",
        ),
        io.Float.Input(
            "cfg",
            auto("cfg", MODELS_OWN),
            default=MODELS_OWN,
            min=-1,
            max=30,
            step=0.1,
            round=0.01,
            tooltip="Guidance: how strongly the prompt is followed. Higher: closer to the prompt, less "
            f"varied; 2 to 8 is common. 1 is off, at half the cost. {OWN}",
        ),
    ]


def temperature_input(zero: str) -> io.Input:
    """``zero``: what a temperature of 0 means."""
    return io.Float.Input(
        "temperature",
        auto("temperature", MODELS_OWN),
        default=MODELS_OWN,
        min=-1,
        max=5,
        step=0.05,
        round=0.01,
        tooltip=f"Below 1: cleaner, less varied images; above 1: more random ones; {zero}. 0.8 to 1 is common. {OWN}",
    )


def common_inputs() -> list[io.Input]:
    """Sockets and widgets of every sampler of token ids, first on the node."""
    return folded(
        [
            *prompt_inputs(),
            temperature_input("0: always the most likely token"),
            io.Int.Input(
                "top_k",
                auto("top_k", MODELS_OWN),
                default=MODELS_OWN,
                min=-1,
                max=65536,
                tooltip="Sample only from this many most likely tokens. Fewer: cleaner, less varied images; 100 "
                f"to 4000 is common. 0 is off. {OWN}",
            ),
            io.Float.Input(
                "top_p",
                auto("top_p", MODELS_OWN),
                default=MODELS_OWN,
                min=-1,
                max=1,
                step=0.01,
                round=0.001,
                tooltip="Sample only from the most likely tokens whose probabilities add up to this value. "
                f"Lower: cleaner, less varied images; 0.8 to 1 is common. 1 is off. {OWN}",
            ),
        ],
        "top_k",
        "top_p",
    )


def given(inputs: Any, *names: str) -> dict[str, Any]:
    """The widgets that are not set to the model's default."""
    values = {name: getattr(inputs, name) for name in names}
    return {name: value for name, value in values.items() if value != MODELS_OWN}


def choose(name: str, value: str, options: dict[str, Any]) -> Any:
    """The value for a combo's option. Raises ValueError for an unknown option, which ComfyUI does not check."""
    if value not in options:
        raise ValueError(f"{name} is {value!r}; choose one of: {', '.join(map(repr, options))}.")  # they contain commas
    return options[value]


def option_of(value: Any, options: dict[str, Any]) -> str:
    """The combo's option that stands for ``value``, the default of the method that the node sets."""
    return next(option for option, each in options.items() if each == value)


def negative_input() -> io.Input:
    return io.Conditioning.Input(
        "negative",
        optional=True,
        tooltip="What to avoid (negative prompt). Needs cfg above 1. Not connected or empty: the model's own "
        "unconditional prediction.",
    )


def drafter_input() -> io.Input:
    return ARDrafter.Input("drafter", tooltip="The drafter, from Load AR Drafter, loaded for the same model.")


def rule_input() -> io.Input:
    return ARRule.Input(
        "rule",
        optional=True,
        tooltip="The acceptance rule: when a draft token is accepted. Not connected: exact, the distribution of the "
        "next-token sampler.",
    )


def sampler_outputs() -> list[io.Output]:
    return [
        io.Latent.Output("latent", display_name="LATENT", tooltip="The generated tokens, for VAE Decode."),
        ARTrace.Output(
            "trace", display_name="AR_TRACE", tooltip="A record of every token, for Acceptance Map and Save Trace."
        ),
    ]
