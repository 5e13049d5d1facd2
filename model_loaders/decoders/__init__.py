"""Image decoders: one module per kind, listed in the order in which they are tried for a file."""

from . import cosmos, kl_vae, movq, vq

KINDS = (movq.KIND, vq.KIND, kl_vae.KIND, cosmos.KIND)
