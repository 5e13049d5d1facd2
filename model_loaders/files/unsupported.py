"""Files of other programs, known by the names of their tensors: what they are, and what to use instead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from .errors import CheckpointError

ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json")  # files of PEFT
MERGE = (
    "It only changes the model that it was trained for. PEFT's LoRAs belong into models/loras, for the node AR LoRA. "
    "Merge others into that model (in PEFT: merge_and_unload(), then save_pretrained) and choose the result."
)
_RELEASED = (
    "Use the weights as they were released (fp32, bf16 or fp16), plain fp8 (float8_e4m3fn), or a file in one of the "
    "formats of ComfyUI (int8_tensorwise, nvfp4 ...), bitsandbytes (nf4) or GPTQ."
)
_KINDS = (  # pattern for the name of a tensor; what its file is; what to do. The first that matches
    (
        r"\.(base_layer|original_module|modules_to_save)\.",
        "holds the weights of an adapter (PEFT) that is not merged into the model",
        "Merge it (merge_and_unload(), then save_pretrained) and choose the result.",
    ),
    (
        r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b|[._]lora([._]|_linear_layer\.)(down|up)\.|\.(hada_w|lokr_w|"
        r"ia3_l|oft_|dora_scale|vera_lambda|diff(_b)?$)",
        "is an adapter (LoRA or the like)",
        MERGE,
    ),
    (
        r"(^|\.)_?flat_param(_\d+)?$",
        "holds flattened parameters of FSDP, often of one process only",
        "Save the whole model (state_dict_type FULL_STATE_DICT) and choose the result.",
    ),
    (r"\.W_q$", "is quantised by HQQ, which is not supported", _RELEASED),
    (r"\.(zero_point|svd_up|svd_down)$", "is quantised by SDNQ, which is not supported", _RELEASED),
    (r"\.biases$", "is quantised by MLX, which is not supported", _RELEASED),
    (
        r"(weight_scale|scale_weight|weight_scale_inv|scaled_fp8|comfy_quant|\.qweight|\.absmax|\.SCB|\.weight_packed|"
        r"\.weight\._(data|scale))$",
        "is quantised with scales, which is not supported",
        _RELEASED,
    ),
)


def refuse_unsupported(names: Iterable[str], path: Path) -> None:
    """Raise CheckpointError for tensors that are no model's own weights: adapters, and matrices with scales in other
    formats than those of ``scaled``."""
    listed = list(names)
    for pattern, what, remedy in _KINDS:
        if found := next((name for name in listed if re.search(pattern, name)), None):
            raise CheckpointError(f"{path.name} {what} ({found[:100]}). {remedy}")
