"""Sockets and widgets that several nodes share, and reading the widgets' values."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .sockets import ARDrafter, ARModel, ARRule, ARTrace

MODELS_OWN = -1  # value of cfg, temperature, top_k, top_p for the model's default
RENAMED = {  # a combo's option in older workflows -> its name now
    "fast, exact": "fast, same quality",
    "same image as next token": "fast, same image as slow",
    "next token": "slow",
    "same seed, same picture (Gumbel, exact)": "same seed, same image (Gumbel, exact)",
    "TV leak": "drift bound",
}


def fold_away(widget: io.WidgetInput) -> io.WidgetInput:
    """A widget that few touch: ComfyUI's new renderer folds it away until asked."""
    widget.extra_dict["advanced"] = True
    return widget


def removed(field: io.WidgetInput) -> io.WidgetInput:
    """A widget that a node no longer has. It keeps its place, unseen, because workflows store widgets by position; the
    check of inputs (checks.py) refuses every value but the default, and does not pass it on."""
    field.extra_dict["hidden"] = True
    return field


def prompt_inputs() -> list[io.Input]:
    """Sockets and widgets of every sampler, first on the node."""
    return [
        ARModel.Input("model"),
        io.Conditioning.Input("positive"),
        io.Latent.Input("latent_image"),
        io.Int.Input("seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=True),
        io.Float.Input("cfg", default=MODELS_OWN, min=-1, max=30, step=0.1, round=0.01),
        io.Float.Input("temperature", default=MODELS_OWN, min=-1, max=5, step=0.05, round=0.01),
    ]


def common_inputs() -> list[io.Input]:
    """Sockets and widgets of every sampler of token ids, first on the node."""
    return [
        *prompt_inputs(),
        fold_away(io.Int.Input("top_k", default=MODELS_OWN, min=-1, max=65536)),
        fold_away(io.Float.Input("top_p", default=MODELS_OWN, min=-1, max=1, step=0.01, round=0.001)),
    ]


def collect_given(inputs: Any, *names: str) -> dict[str, Any]:
    """The widgets that are not set to the model's default. Raises ValueError for numbers that are too low."""
    values = {name: getattr(inputs, name) for name in names}
    for name, value in values.items():
        least = 1 if name == "cfg" else 0
        if value < least and value != MODELS_OWN:
            raise ValueError(
                f"{name} is {value}, but must be {MODELS_OWN} (auto: the model's own) or at least {least}"
                f"{' (no guidance)' * (name == 'cfg')}."
            )
    return {name: value for name, value in values.items() if value != MODELS_OWN}


def renamed(option: str) -> str:
    """A combo's option by its name now."""
    return RENAMED.get(option, option)


def choose(name: str, value: str, options: dict[str, Any]) -> Any:
    """The value for a combo's option, by its name now or an older one. Raises ValueError for an unknown option, which
    ComfyUI does not check."""
    if renamed(value) not in options:
        raise ValueError(f"{name} is {value!r}; choose one of: {', '.join(map(repr, options))}.")  # they contain commas
    return options[renamed(value)]


def valid_choice(name: str, value: str | None, options: dict[str, Any]) -> bool | str:
    """True for a combo's option, by its name now or an older one, else the error message: ComfyUI, which knows only the
    list that it shows, would refuse older ones. value None: comes from a link and is not known yet."""
    try:
        return value is None or choose(name, value, options) is not None
    except ValueError as error:
        return str(error)


def option_of(value: Any, options: dict[str, Any]) -> str:
    """The combo's option that stands for ``value``, the default of the method that the node sets."""
    return next(option for option, each in options.items() if each == value)


def negative_input() -> io.Input:
    return io.Conditioning.Input("negative", optional=True)


def drafter_input() -> io.Input:
    return ARDrafter.Input("drafter")


def rule_input() -> io.Input:
    return ARRule.Input("rule", optional=True)


def sampler_outputs() -> list[io.Output]:
    return [io.Latent.Output("latent"), ARTrace.Output("trace")]
