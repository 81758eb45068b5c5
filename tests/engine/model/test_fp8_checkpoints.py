"""Tests that FP8 checkpoints of every format load with the intended values, and that errors name the
malformed tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import CheckpointError
from engine.model.decoder import Decoder
from engine.model.layers import WeightShard
from kernels import Fp8Weight, Weight
from kernels.reference import quantise_fp8

from .checkpoints import (
    EXPERTS,
    MIXTRAL_PROJECTIONS,
    OLMOE_EXPERTS,
    PROJECTIONS,
    QWEN2_EXPERTS,
    QWEN3_EXPERTS,
    Case,
    Fp8,
    make,
    oracle,
    quantise,
    quantised_oracle,
)
from .driver import Driver, load_decoder, teacher_forced

LLAMA = Case("llama", "llama", {"attention_bias": True})
FORMS = [
    Fp8("a scale for each tensor"),
    Fp8("a scale for each output", per_channel=True),
    Fp8("bfloat16 scales for each output", per_channel=True, scale_dtype=torch.bfloat16),
    Fp8("quant_method fp8, scalar scales, with static scales", method="fp8", flat_scales=True, static=True),
    Fp8("a vector of scales, with static scales", per_channel=True, flat_scales=True, static=True),
    Fp8("scales in a separate file", per_channel=True, static=True, scales_apart=True),
    Fp8("one scale per tensor in a separate file", scales_apart=True),
    Fp8("k unquantised within q, k, v", quantised=tuple(p for p in PROJECTIONS if p != "k_proj")),
    Fp8("up quantised, gate not quantised", per_channel=True, quantised=("up_proj",)),
    Fp8("the output matrix as well", per_channel=True, quantised=(*PROJECTIONS, "lm_head", "embed_tokens")),
]
TOLERANCE = 1e-4
"""Tolerance for logits. It is the same as without quantisation, because the GEMMs are the same and only the
order of summation differs."""
EQUAL = 0.5
"""Minimum fraction of short sequences that must be within the tolerance. In 2 to 11 of 100 sequences, a sum
lies so close to the boundary between two e4m3 values that its last bits decide to which value it is rounded.
An error in loading would affect every sequence."""
SEQUENCES = torch.randint(3, 157, (8, 12), generator=torch.Generator().manual_seed(7)).tolist()


def _equal(decoder: Decoder, model: Any) -> float:
    """Run SEQUENCES sequences, each with a prompt of 7 tokens in two chunks and 5 more tokens. Return the
    fraction of sequences whose logits equal those of a transformers model."""
    with torch.no_grad():
        expected = model(torch.tensor(SEQUENCES)).logits
    assert expected.std() > 0.3, "the logits are too small for a meaningful comparison"
    errors = []
    for tokens, wanted in zip(SEQUENCES, expected, strict=True):
        (found,) = teacher_forced(Driver(decoder, blocks=2), tokens, [7], [4], 5)
        errors.append((found - wanted).abs().max().item())
    return sum(error < TOLERANCE for error in errors) / len(errors)


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, Fp8Weight)
    return weight.values.float() * weight.scales.unsqueeze(1)


def _saved(meant: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write the dequantised weights of a quantised checkpoint as an unquantised checkpoint."""
    save_file(meant, make(LLAMA, folder) / "model.safetensors")
    return folder


@pytest.mark.parametrize("how", FORMS, ids=lambda how: how.name)
def test_a_quantised_checkpoint_gives_the_logits_of_transformers(how: Fp8, tmp_path: Path) -> None:
    meant = quantise(make(LLAMA, tmp_path), how)
    decoder = load_decoder(tmp_path)
    assert decoder.config.fp8
    for index, layer in enumerate(decoder.layers):
        for part, weight in (
            ("q_proj", layer.attention.qkv.weight),
            ("k_proj", layer.attention.qkv.weight),
            ("v_proj", layer.attention.qkv.weight),
            ("o_proj", layer.attention.o.weight),
            ("gate_proj", layer.mlp.gate_up.weight),
            ("up_proj", layer.mlp.gate_up.weight),
            ("down_proj", layer.mlp.down.weight),
        ):
            name = next(n for n in meant if n.startswith(f"model.layers.{index}.") and f"{part}.weight" in n)
            if part not in how.quantised:
                values, scales = quantise_fp8(meant[name])
                meant[name] = values.float() * scales
            first = {"k_proj": 64, "v_proj": 96, "up_proj": 96}.get(part, 0)
            rows = _dense(weight)[first : first + len(meant[name])]
            assert torch.equal(rows, meant[name]), f"{name} differs from the checkpoint"
    assert _equal(decoder, quantised_oracle(tmp_path, meant)) >= EQUAL


MIXTURES = [
    (Case("qwen3 moe", "qwen3_moe", {**QWEN3_EXPERTS, "norm_topk_prob": True}), FORMS[1]),
    (Case("qwen2 moe", "qwen2_moe", QWEN2_EXPERTS), FORMS[6]),
    (Case("mixtral", "mixtral", EXPERTS), Fp8("w", per_channel=True, quantised=MIXTRAL_PROJECTIONS)),
    (Case("olmoe, only up_proj quantised", "olmoe", OLMOE_EXPERTS), Fp8("up", quantised=("up_proj",))),
]


@pytest.mark.parametrize(("case", "how"), MIXTURES, ids=lambda value: value.name)
def test_quantised_experts_give_the_logits_of_transformers(case: Case, how: Fp8, tmp_path: Path) -> None:
    meant = quantise(make(case, tmp_path), how)
    decoder = load_decoder(tmp_path)
    for name in meant:
        if name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")) and not any(
            part in name for part in how.quantised
        ):
            values, scales = quantise_fp8(meant[name])
            meant[name] = values.float() * scales
    assert _equal(decoder, quantised_oracle(tmp_path, meant)) >= EQUAL


@pytest.mark.parametrize("per_channel", [False, True])
def test_quantised_matrices_are_read_directly_into_the_weights(
    per_channel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(Case("plain", "llama"), tmp_path)
    meant = quantise(tmp_path, Fp8("direct", per_channel))
    monkeypatch.delattr(WeightShard, "fill_quantised")
    layer = load_decoder(tmp_path).layers[1]
    expected = meant["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(_dense(layer.mlp.down.weight), expected)


def test_the_comparison_detects_missing_activation_rounding(tmp_path: Path) -> None:
    """Checks that the comparison with transformers can fail: a missing rounding of activations must change
    the results."""
    meant = quantise(make(LLAMA, tmp_path), FORMS[1])
    assert _equal(load_decoder(tmp_path), oracle(_saved(meant, tmp_path / "meant"))) == 0


def test_without_fp8_in_the_config_a_quantised_matrix_is_expanded(tmp_path: Path) -> None:
    meant = quantise(make(LLAMA, tmp_path), FORMS[1])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    assert _equal(load_decoder(tmp_path), oracle(_saved(meant, tmp_path / "meant"))) == 1


def test_a_plain_checkpoint_is_quantised_per_output_while_it_loads(tmp_path: Path) -> None:
    make(LLAMA, tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    decoder = load_decoder(tmp_path, quantised=True)
    assert not decoder.config.fp8
    layer = decoder.layers[1]
    for name, weight in (
        ("self_attn.o_proj", layer.attention.o.weight),
        ("mlp.down_proj", layer.mlp.down.weight),
    ):
        exact = plain[f"model.layers.1.{name}.weight"]
        assert isinstance(weight, Fp8Weight)
        assert torch.equal(weight.scales, exact.abs().amax(dim=1) / 448)
        # The tolerance is half a step of e4m3: a relative error of 2⁻⁴ for normal numbers, and 2⁻¹⁰ times the
        # scale for numbers below 2⁻⁶.
        bound = torch.maximum(exact.abs() * 2**-4, weight.scales.unsqueeze(1) * 2**-10)
        assert ((_dense(weight) - exact).abs() <= bound * (1 + 1e-6)).all()
    assert torch.equal(decoder.embedding, plain["model.embed_tokens.weight"])


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

WEIGHT = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{WEIGHT}_scale"


def _refused(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str) -> None:
    quantise(make(LLAMA, folder), Fp8("per channel", per_channel=True, static=True))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    assert message.format(folder=folder, file=file) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop(SCALE),
            f"{{folder}}: tensor {SCALE} is missing; an FP8 weight needs one scale, or one per output",
        ),
        (
            # Simulate a block-wise quantised checkpoint whose config.json has been replaced.
            lambda tensors: tensors.update({f"{SCALE}_inv": tensors.pop(SCALE)}),
            f"{{folder}}: tensor {SCALE} is missing; an FP8 weight needs one scale",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.ones(1, 1)}),
            f"{{file}}: {SCALE} has shape [1, 1]; it must contain one scale, or 96 (one per output)",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.ones(64)}),
            f"{{file}}: {SCALE} has shape [64]; it must contain one scale, or 96 (one per output)",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.ones(1, 96)}),
            f"{{file}}: {SCALE} has shape [1, 96]; it must contain one scale",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.ones(96, 2)}),
            f"{{file}}: {SCALE} has shape [96, 2]; it must contain one scale",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.ones(96, dtype=torch.uint8)}),
            f"{{file}}: {SCALE} has dtype U8; expected F32, BF16 or F16",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.ones(96, 1).to(torch.float8_e4m3fn)}),
            f"{{file}}: {SCALE} has dtype F8_E4M3; expected F32, BF16 or F16",
        ),
        (
            lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].view(torch.int8)}),
            f"{{file}}: {WEIGHT} has dtype I8; expected F32, BF16, F16 or F8_E4M3",
        ),
        (
            lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].float().to(torch.float8_e5m2)}),
            f"{{file}}: {WEIGHT} has dtype F8_E5M2; expected F32, BF16, F16 or F8_E4M3",
        ),
        (
            lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].float()}),
            f"{{file}}: tensor {SCALE} is not part of the model in config.json",
        ),
        (
            lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:, :32].contiguous()}),
            f"{{file}}: {WEIGHT} has shape [96, 32], but config.json requires [96, 64]",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
            "{file}: model.norm.weight has dtype F8_E4M3; expected F32, BF16 or F16",
        ),
        (
            lambda tensors: tensors.update({f"{WEIGHT}_zero_point": torch.zeros(96, 1)}),
            f"{{file}}: tensor {WEIGHT}_zero_point is not part of the model",
        ),
    ],
    ids=[
        "no scale",
        "inverse scale",
        "a matrix of one",
        "too few",
        "a row",
        "two each",
        "integers",
        "FP8",
        "int8",
        "e5m2",
        "scale of a plain weight",
        "weight of another shape",
        "vector",
        "zero point",
    ],
)
def test_a_malformed_checkpoint_is_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    _refused(tmp_path, change, message)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_a_negative_or_non_finite_scale_is_refused(number: float, tmp_path: Path) -> None:
    _refused(
        tmp_path,
        lambda tensors: tensors[SCALE].flatten().__setitem__(95, number),
        f"{{file}}: tensor {SCALE} is invalid: scales must be finite and not negative; download it again",
    )
