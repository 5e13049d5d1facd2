"""GLM-Image's two stages: a language model that generates codes, and a decoder of codes and prompt to pixels.

Not one of the FAMILIES yet: their image decoders need no prompt. This one takes a node of its own.
"""
