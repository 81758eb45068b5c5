"""Tests that FP8 checkpoints with one scale per block of 128 × 128 are loaded and computed with these block
scales, on one rank and on several. Also tests the conversion of block scales to one scale per output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import FP8_BLOCK_INPUTS, CheckpointError
from engine.families import read_config
from engine.model.decoder import Decoder
from engine.model.loader import load, load_dummy
from engine.parallel import Ranks, single
from engine.progress import no_progress
from engine.sizing import weights_dtype
from kernels import Fp8Weight, select_backend
from kernels.reference import dequantise, quantise_blocks, quantise_fp8, round_in_groups
from kernels.triton.linear_plans import ALIGNMENT
from tests.engine.running.thread_ranks import on_ranks

from .checkpoints import (
    EXPERTS,
    MIXTRAL_PROJECTIONS,
    PROJECTIONS,
    QWEN2_EXPERTS,
    QWEN3_EXPERTS,
    Case,
    Fp8,
    make,
    quantise,
    quantised_oracle,
)
from .driver import Driver, teacher_forced

SIZES = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
"""Sizes with which neither a matrix nor a rank's slice of it consists of complete blocks."""
WHOLE_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}
"""Sizes with which each of two ranks has complete blocks."""
BLOCKS = Fp8("blocks", blocks=True)
CASES = [
    (Case("llama", "llama", {**SIZES, "attention_bias": True}), BLOCKS),
    (
        Case("qwen3", "qwen3", SIZES),
        Fp8(
            "bfloat16 scales in a separate file, the output matrix as well",
            blocks=True,
            scales_apart=True,
            scale_dtype=torch.bfloat16,
            quantised=(*PROJECTIONS, "lm_head", "embed_tokens"),
        ),
    ),
    (Case("qwen3 moe", "qwen3_moe", {**QWEN3_EXPERTS, **SIZES, "moe_intermediate_size": 160}), BLOCKS),
    (Case("qwen2 moe", "qwen2_moe", {**QWEN2_EXPERTS, **SIZES, "moe_intermediate_size": 144}), BLOCKS),
    (
        Case("mixtral", "mixtral", {**EXPERTS, **SIZES}),
        Fp8("mixtral", blocks=True, quantised=MIXTRAL_PROJECTIONS),
    ),
]
TOLERANCE = 1e-4
EQUAL = 0.5
"""Minimum fraction of sequences within the tolerance; see `test_fp8_checkpoints.EQUAL`."""
SEQUENCES = torch.randint(3, 157, (4, 12), generator=torch.Generator().manual_seed(7)).tolist()


def _decoder(folder: Path, ranks: Ranks | None = None, *, blocks: bool = True) -> Decoder:
    config = read_config(folder)
    cpu, ops = torch.device("cpu"), select_backend("cpu")
    return Decoder(config, ranks or single(), ops, torch.float32, cpu, fp8=True, fp8_blocks=blocks)


def _load(folder: Path, ranks: Ranks | None = None, *, blocks: bool = True) -> Decoder:
    decoder = _decoder(folder, ranks, blocks=blocks)
    load(decoder, folder, no_progress)
    return decoder


def _logits(decoder: Decoder) -> list[torch.Tensor]:
    found = []
    for tokens in SEQUENCES:
        found += teacher_forced(Driver(decoder, blocks=2), tokens, [7], [4], 5)
    return found


@pytest.mark.parametrize(("case", "how"), CASES, ids=lambda value: value.name)
def test_a_checkpoint_with_block_scales_gives_the_logits_of_its_dequantised_weights(
    case: Case, how: Fp8, tmp_path: Path
) -> None:
    meant = quantise(make(case, tmp_path), how)
    decoder = _load(tmp_path)
    assert decoder.config.fp8_blocks
    model = quantised_oracle(tmp_path, meant, group=128)
    with torch.no_grad():
        expected = model(torch.tensor(SEQUENCES)).logits
    assert expected.std() > 0.3, "the logits are too small for a meaningful comparison"
    errors = [
        (found - wanted).abs().max().item() for found, wanted in zip(_logits(decoder), expected, strict=True)
    ]
    assert sum(error < TOLERANCE for error in errors) / len(errors) >= EQUAL, errors


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("case", "how"), [CASES[0], CASES[2]], ids=lambda value: value.name)
def test_every_rank_has_the_numbers_and_scales_of_its_part(
    case: Case, how: Fp8, size: int, tmp_path: Path
) -> None:
    meant = quantise(make(case, tmp_path), how)

    def compare(ranks: Ranks) -> int:
        decoder = _decoder(tmp_path, ranks)
        shards = {shard.name: shard for shard in decoder.weight_shards()}
        load(decoder, tmp_path, no_progress)
        quantised = [shard for shard in shards.values() if shard.block is not None]
        for shard in quantised:
            assert shard.target is not None and shard.scales is not None
            part = dequantise(Fp8Weight(shard.target, shard.scales, shard.block))
            assert torch.equal(part, shard.part(meant[shard.name])), shard.name
        return len(quantised)

    # The checkpoint's scales are in the same file as the weights, and every projection has blocks.
    counts = on_ranks(size, compare)
    assert counts == [sum("proj.weight" in name for name in meant)] * size


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_ranks_whose_parts_are_complete_blocks_compute_the_logits_of_one(family: str, tmp_path: Path) -> None:
    experts = {**QWEN3_EXPERTS, "moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    quantise(make(Case("whole", family, {**experts, **WHOLE_BLOCKS}), tmp_path), BLOCKS)
    alone = _logits(_load(tmp_path))
    first, _ = on_ranks(2, lambda ranks: _logits(_load(tmp_path, ranks)))
    errors = [(found - wanted).abs().max().item() for found, wanted in zip(first, alone, strict=True)]
    assert sum(error < TOLERANCE for error in errors) / len(errors) >= EQUAL, errors


def test_ranks_that_cut_blocks_are_as_close_to_the_unquantised_model_as_one_rank(tmp_path: Path) -> None:
    case, how = CASES[2]
    meant = quantise(make(case, tmp_path), how)
    alone = torch.cat(_logits(_load(tmp_path)))
    first, *_ = on_ranks(4, lambda ranks: _logits(_load(tmp_path, ranks)))
    plain = tmp_path / "plain"
    make(case, plain)
    save_file(meant, plain / "model.safetensors")
    config = read_config(plain)
    decoder = Decoder(config, single(), select_backend("cpu"), torch.float32, torch.device("cpu"))
    load(decoder, plain, no_progress)
    exact = torch.cat(_logits(decoder))
    error_of_one, error_of_four = (
        float((found - exact).square().mean().sqrt()) for found in (alone, torch.cat(first))
    )
    assert 0.005 < error_of_four < 1.25 * error_of_one


def test_block_scales_are_converted_to_one_scale_per_output(tmp_path: Path) -> None:
    """The loader converts block scales if `quantization = "fp8"`, and on GPUs for every dtype except
    float32."""
    case, how = CASES[2]
    meant = quantise(make(case, tmp_path), how)
    layer = _load(tmp_path, blocks=False).layers[1]
    weight = layer.attention.o.weight
    assert isinstance(weight, Fp8Weight) and weight.block is None
    values, scales = quantise_fp8(meant["model.layers.1.self_attn.o_proj.weight"])
    assert torch.equal(dequantise(weight), values.float() * scales)


@pytest.mark.parametrize("width", [256, 320, 192])
def test_a_gpu_computes_with_blocks_if_the_parts_of_ranks_are_wide_enough(width: int, tmp_path: Path) -> None:
    case = Case("whole", "llama", {**WHOLE_BLOCKS, "intermediate_size": width})
    quantise(make(case, tmp_path), BLOCKS)
    config = read_config(tmp_path)

    def found(dtype: str, ranks: int, *, on_gpu: bool = True, quantization: str = "auto") -> str:
        return weights_dtype(config, quantization, dtype, on_gpu=on_gpu, tensor_parallel_size=ranks)

    assert found("bfloat16", 1) == found("float16", 1) == "fp8-block"
    assert found("bfloat16", 2) == ("fp8-block" if width == 256 else "fp8")  # otherwise, parts of 160 or 96
    assert FP8_BLOCK_INPUTS == ALIGNMENT
    assert found("float32", 2) == found("bfloat16", 2, on_gpu=False) == "fp8-block"
    assert found("bfloat16", 1, on_gpu=False, quantization="fp8") == "fp8"


def test_dummy_weights_have_block_scales(tmp_path: Path) -> None:
    quantise(make(CASES[2][0], tmp_path), BLOCKS)
    decoder = _decoder(tmp_path)
    load_dummy(decoder, seed=3)
    (logits,) = teacher_forced(Driver(decoder, blocks=2), SEQUENCES[0], [7], [4], 5)
    assert logits.isfinite().all()
    down = decoder.layers[0].attention.o.weight
    assert isinstance(down, Fp8Weight)
    assert dequantise(down).std().item() == pytest.approx(192**-0.5, rel=0.05)


def test_rounding_in_groups_uses_the_largest_magnitude_of_each_group() -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    x[0, :128] *= 1000.0
    x[1, 128:256] = 0.0
    found = round_in_groups(x, 128)
    for first in (0, 128, 256):
        values, scales = quantise_fp8(x[:, first : first + 128])
        assert torch.equal(found[:, first : first + 128], values.float() * scales)


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (128, 16), (1, 128)])
def test_quantised_blocks_keep_the_largest_value_of_each_block(block: tuple[int, int]) -> None:
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    values, scales = quantise_blocks(x, block)
    found = dequantise(Fp8Weight(values, scales, block))
    rows, columns = block
    for row, column in ((0, 0), (128 // rows * rows, 0), (0, 256 // columns * columns)):
        part, exact = (each[row : row + rows, column : column + columns] for each in (found, x))
        assert part.abs().max().item() == pytest.approx(exact.abs().max().item(), rel=1e-6)
        assert ((part - exact).abs() <= exact.abs() * 2**-4 + exact.abs().max() / 448 * 2**-10).all()


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

WEIGHT = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop(SCALE),
            f"{{folder}}: tensor {SCALE} is missing; an FP8 weight needs scales, one per block",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.ones(2, 2)}),
            f"{{file}}: {SCALE} has shape [2, 2]; it must be [3, 2], with one scale per block",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.ones(3, 2, dtype=torch.uint8)}),
            f"{{file}}: {SCALE} has dtype U8; expected F32, BF16 or F16",
        ),
        (
            lambda tensors: tensors[SCALE].flatten().__setitem__(4, float("nan")),
            f"{{file}}: tensor {SCALE} is invalid: scales must be finite and not negative",
        ),
        (
            lambda tensors: tensors.update({WEIGHT: tensors.pop(WEIGHT).bfloat16()}) or tensors.pop(SCALE),
            f"{{file}}: {WEIGHT} has dtype BF16; with weight_block_size, every matrix of a layer must be "
            'F8_E4M3; set quantization = "fp8" to convert all of them',
        ),
    ],
    ids=["no scales", "too few", "integers", "not a number", "unquantised matrix"],
)
def test_a_malformed_checkpoint_is_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    quantise(make(CASES[0][0], tmp_path), BLOCKS)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        _load(tmp_path)
    assert message.format(folder=tmp_path, file=file) in str(caught.value)


def test_an_unquantised_matrix_is_loaded_if_all_are_converted(tmp_path: Path) -> None:
    some = Fp8("only up", blocks=True, quantised=("up_proj",))
    meant = quantise(make(CASES[0][0], tmp_path), some)
    weight = _load(tmp_path, blocks=False).layers[1].mlp.down.weight
    values, scales = quantise_fp8(meant["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(dequantise(weight), values.float() * scales)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight_block_size": [64, 64]},
            r"weight_block_size is \[64, 64\]; blocks of \[128, 128\] are supp",
        ),
        (
            {"weight_block_size": [1, 128]},
            r"weight_block_size is \[1, 128\]; blocks of \[128, 128\] are supp",
        ),
        ({"weight_block_size": 128}, r"weight_block_size is 128; blocks of \[128, 128\] are supported"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'; with weight_block_size it must be"),
    ],
)
def test_other_blocks_are_refused_before_any_file_is_opened(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    make(CASES[0][0], tmp_path)
    path = tmp_path / "config.json"
    described = {"quant_method": "fp8", "weight_block_size": [128, 128]} | changes
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": described}))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        _load(tmp_path)
