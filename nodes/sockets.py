"""The private socket types. All other sockets have ComfyUI's types."""

from comfy_api.latest import io

ARModel = io.Custom("AR_MODEL")  # a comfy_runtime.models.LoadedModel
ARDrafter = io.Custom("AR_DRAFTER")  # a comfy_runtime.models.LoadedDrafter
ARRule = io.Custom("AR_RULE")  # a rules.ChosenRule
ARTrace = io.Custom("AR_TRACE")  # a samplers.trace.Trace
ARMethod = io.Custom("AR_METHOD")  # a method.ChosenMethod
