"""Compares a decoder that fuses norms into its GEMMs with the reference implementation, in Triton's
interpreter. Each norm must use its own weight, residual and sum of squares, whichever GEMMs fuse it. Both
decoders use the reference attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.families import read_config
from engine.model.decoder import Decoder
from engine.model.loader import load_dummy
from engine.parallel import single
from kernels import Residual, reference
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import PlanEntry, Product, Table
from tests.engine.model.driver import Driver, Sequence
from tests.engine.test_build import SMALL

fused = pytest.importorskip("kernels.triton.fused", exc_type=ImportError)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 linears need the interpreter")

LAYERS, HIDDEN, INTERMEDIATE = 2, 192, 256
SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "torch_dtype": "float32",
    "attention_bias": True,
    "mlp_bias": True,
}
PRODUCTS = {
    "qkv": (320, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
PLANS = {
    "qkv": GemmPlan("dot", 16, 64, 64, 4, 2),
    "o": GemmPlan("dot", 16, 128, 64, 4, 2),
    "gate_up": GemmPlan("dot", 16, 64, 32, 4, 2, split=2),
    "down": GemmPlan("dot", 16, 64, 64, 4, 2, split=2),
}


@pytest.mark.parametrize(
    ("librarys", "norms"),
    [
        # Two norms are never fused: the first layer's qkv reads the embedding, and the output matrix reads
        # selected rows.
        ((), 2),
        (("o",), 2 + LAYERS),
        (("gate_up",), 2 + LAYERS),
        (("down",), 2 + LAYERS - 1),
        (("qkv",), 2 + LAYERS - 1),
        (tuple(PRODUCTS), 2 + 2 * LAYERS - 1),
    ],
)
def test_gemms_with_fused_norms_compute_the_same_model(
    librarys: tuple[str, ...], norms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.cuda import CudaOps

    class Products(CudaOps):
        plan_attention = staticmethod(reference.plan_attention)
        attend = staticmethod(reference.attend)

    table = Table()
    for name, shape in PRODUCTS.items():
        entry = PlanEntry(None if name in librarys else PLANS[name], 0.0, 0.0)
        table = table.with_entry(Product(torch.float32, *shape), 16, entry)
    launched = []
    norm = fused.rms_norm

    def counted(*arguments: object, **options: object) -> torch.Tensor:
        launched.append(arguments)
        return norm(*arguments, **options)

    monkeypatch.setattr(fused, "rms_norm", counted)
    (tmp_path / "config.json").write_text(json.dumps(SMALL | SHAPE))
    found, expected = (logits(tmp_path, ops) for ops in (Products(0, table, pdl=False), reference))
    assert len(launched) == 2 * norms
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 2e-5 * other.abs().max()


def logits(folder: Path, ops: object) -> list[torch.Tensor]:
    """Return the logits of a pass with prompts and of a decode pass."""
    decoder = Decoder(read_config(folder), single(), ops, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    load_dummy(decoder, seed=1)
    generator = torch.Generator().manual_seed(2)
    for layer in decoder.layers:
        for gain in (layer.input_norm, layer.post_norm):
            gain.copy_(torch.rand(gain.shape, generator=generator) + 0.5)
    driver = Driver(decoder, 4)
    sequences = [Sequence() for _ in range(3)]
    prompts = [(sequence, [7 * index + 1] * (index + 2)) for index, sequence in enumerate(sequences)]
    return [driver.run([], prompts), driver.run([(one, 5) for one in sequences], [])]


def test_float16_fuses_no_norm_because_x_times_its_gain_may_overflow() -> None:
    from kernels.cuda import CudaOps

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 64, generator=generator).mul(3000).half()
    weight = torch.randn(64, 64, generator=generator).div(8).half()
    gain = torch.full((64,), 40.0).half()
    results = []
    for ops in (CudaOps(pdl=False), reference):
        stream = ops.linear_add(x, weight, None, Residual(x.clone()), gain)
        results.append(ops.norm_linear(stream, gain, 1e-5, weight, None))
    assert (results[0] - results[1]).abs().max() < 2e-3 * results[1].abs().max()
