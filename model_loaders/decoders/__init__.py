"""Image decoders: a module for every kind, listed here in the order in which they are asked about a file."""

from . import cosmos, kl_vae, movq, vq

KINDS = (movq.KIND, vq.KIND, kl_vae.KIND, cosmos.KIND)
