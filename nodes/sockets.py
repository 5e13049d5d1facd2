"""The private socket types. Everything else travels in ComfyUI's own types."""

from comfy_api.latest import io

ARModel = io.Custom("AR_MODEL")  # a host.LoadedModel
ARDrafter = io.Custom("AR_DRAFTER")  # a host.LoadedDrafter
ARRule = io.Custom("AR_RULE")  # a rules.ChosenRule
ARTrace = io.Custom("AR_TRACE")  # a samplers.trace.Trace
ARMethod = io.Custom("AR_METHOD")  # a method.ChosenMethod
