"""Writes copies of the demo model, and of mixtures made from it, as FP8 checkpoints with one scale per block
of 128 × 128, the format of Qwen3-FP8 and DeepSeek."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.config import FP8_BLOCK
from kernels.reference import quantise_blocks

_QUANTISED = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""Suffixes of the quantised matrices' names."""
_DESCRIPTION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}


def write_blocks(model: Path, folder: Path) -> Path:
    """Write the model in `model` to `folder` with block scales, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.iterdir()):
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        elif file.is_file() and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    for name in [name for name in tensors if name.endswith(_QUANTISED)]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantise_blocks(
            tensors[name].float(), (FP8_BLOCK, FP8_BLOCK)
        )
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = _DESCRIPTION
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return folder
