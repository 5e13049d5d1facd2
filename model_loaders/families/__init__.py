"""Families of models: one module per family, in the order in which a file is compared with them.

SimpleAR is known by biases, which AutoGPTQ writes for others, too: it comes after those that are known by more.
"""

from . import chameleon, emu3, emu35, glm_image, harmon, janus, llamagen, mar, simplear, xar

FAMILIES = tuple(
    module.FAMILY for module in (llamagen, janus, chameleon, emu3, emu35, glm_image, simplear, mar, xar, harmon)
)
NAMES = ", ".join(label for family in FAMILIES for label in family.labels)
CONTINUOUS_NAMES = ", ".join(label for family in FAMILIES if family.continuous for label in family.labels)
CAPTION_MODELS = tuple(label for family in FAMILIES for label in family.caption_models)
IMAGE_PROMPT_MODELS = tuple(label for family in FAMILIES for label in family.image_prompt_models)
RELEASED_DECODERS = {kind: decoder for family in FAMILIES for kind, decoder in family.decoders.items()}
