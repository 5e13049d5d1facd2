"""Dynamic VRAM without a GPU: what ComfyUI's main.py switches on for an NVIDIA card, as a custom node of test servers.

Models that are loaded to a CPU stay under the older management, as in ComfyUI itself. What differs is how modules are
built and files are read, and what runs after every node.
"""

import logging

import comfy.model_patcher

try:
    import comfy.memory_management as memory_management
except ImportError:  # a ComfyUI without dynamic VRAM
    memory_management = None

NODE_CLASS_MAPPINGS: dict[str, type] = {}


def enable() -> bool:
    """Switch it on. False where this ComfyUI has no dynamic VRAM."""
    if not hasattr(memory_management, "aimdo_enabled"):
        return False
    memory_management.aimdo_enabled = True
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    return True


ENABLED = enable()
logging.info("Dynamic VRAM is simulated" if ENABLED else "This ComfyUI has no dynamic VRAM")
