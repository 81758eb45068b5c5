"""Tests that a new kind of layer needs only one class and, where necessary, one operation. Building, loading
and tuning must then find the new layer's kernels, and loading must fill its weights."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.engine import toy_layer
from tests.engine.model.checkpoints import Case, make, oracle
from tests.engine.model.driver import Driver, Sequence, load_decoder
from tests.engine.test_build import folder_of
from tests.kernels.test_compiling import compiled


def test_a_new_kind_of_layer_is_compiled_loaded_and_tuned_without_further_edits(tmp_path: Path) -> None:
    done = compiled("tests.engine.toy_layer", folder_of(tmp_path, "llama", attention_bias=False))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with_toy, without = found["with"], found["without"]
    for group, added in (
        ("built", {"_toy_gate"}),
        ("loaded", {"_toy_gate"}),
        ("tuned", {"bfloat16 256x256"}),
    ):
        assert set(with_toy[group]) - set(without[group]) == added
        assert set(without[group]) <= set(with_toy[group])


def test_its_weights_are_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    plain = make(Case("toy", "llama"), tmp_path / "plain")
    model, weights = oracle(plain), load_file(plain / "model.safetensors")
    for index, layer in enumerate(model.model.layers):
        gain = torch.rand_like(layer.input_layernorm.weight) + 0.5
        gate = torch.randn(len(gain), len(gain))
        weights[f"model.layers.{index}.gate_norm.weight"] = gain
        weights[f"model.layers.{index}.gate_proj.weight"] = gate
        layer.register_forward_hook(partial(gated, gain, gate))
    folder = shutil.copytree(plain, tmp_path / "toy")
    save_file(weights, folder / "model.safetensors")
    tokens = list(range(1, 150))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
        with toy_layer.added():
            logits = Driver(load_decoder(folder), 3).run([], [(Sequence(), tokens)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def gated(gain: torch.Tensor, gate: torch.Tensor, _: object, __: object, x: torch.Tensor) -> torch.Tensor:
    """Return the result of a toy layer, where `x` is the result of the dense layer before its gate."""
    return x * (1 + F.linear(F.rms_norm(x, gain.shape, gain, 1e-6), gate).sigmoid())
