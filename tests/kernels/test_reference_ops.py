"""Tests that each operation of a backend equals its formula, computed naively in float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels import (
    PAGE_TOKENS,
    AttentionInput,
    Experts,
    Fp8Weight,
    KvPool,
    Ops,
    Residual,
    Rotation,
    reference,
    reference_attention,
    select_backend,
)
from kernels.rope import cos_sin_table, default_frequencies

OPS = select_backend("cpu")
EPS = 1e-5


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() < tolerance


def test_a_device_without_a_backend_is_refused() -> None:
    backend: Ops = select_backend("cuda")
    assert backend.name
    with pytest.raises(ValueError, match="device is 'mps'; supported devices: cpu, cuda"):
        select_backend("mps")


def test_embedding_of_a_shard_gives_zeros_for_foreign_tokens() -> None:
    weight = _random(10, 4)
    tokens = torch.tensor([0, 3, 9, 5, 3])
    assert torch.equal(OPS.embedding(tokens, weight, None), weight[tokens])
    parts = [OPS.embedding(tokens, weight[first : first + 5].clone(), first) for first in (0, 5)]
    assert torch.equal(parts[0] + parts[1], weight[tokens])
    assert (parts[0][2] == 0).all()


@pytest.mark.parametrize("tokens", [1, 3, 16, 130])
@pytest.mark.parametrize("shape", [(48, 64), (157, 31), (1, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_multiplies_by_packed_and_plain_weights(
    tokens: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, bias, x = (
        _random(*shape).to(dtype),
        _random(shape[0]).to(dtype),
        _random(tokens, shape[1]).to(dtype),
    )
    exact = x.double() @ weight.double().T
    tolerance = 1e-4 if dtype == torch.float32 else 0.05 * math.sqrt(shape[1])
    for form in (weight, OPS.pack_weight(weight)):
        _close(OPS.linear(x, form, None), exact, tolerance)
        _close(OPS.linear(x, form, bias), exact + bias.double(), tolerance)


def test_float32_weights_are_packed_on_a_cpu() -> None:
    assert reference.pack_weight(_random(8, 8)).is_mkldnn == torch.backends.mkldnn.is_available()


@pytest.mark.parametrize("left", [[], ["_reorder_linear_weight"], ["_linear_pointwise"]])
def test_without_torchs_packed_linear_weights_stay_plain(
    left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**dict.fromkeys(left)))
    weight, bias, x = _random(8, 6), _random(8), _random(3, 6)
    assert reference.pack_weight(weight) is weight
    _close(reference.linear(x, reference.pack_weight(weight), bias), x.double() @ weight.double().T + bias)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_are_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    x, weight = (_random(5, 64, seed=seed).to(dtype) for seed in range(2))
    ulp = torch.finfo(dtype).eps * 8
    _close(OPS.rms_norm(x, weight[0], EPS), _rms_norm(x, weight[0]), ulp)


def test_silu_mul_gates_the_second_half_with_the_first() -> None:
    gate_up = _random(7, 24)
    gate, up = gate_up.double().split(12, dim=1)
    _close(OPS.silu_mul(gate_up.clone()), gate / (1 + (-gate).exp()) * up)


HIDDEN, WIDTH = 24, 10


def _experts(router: torch.Tensor, top_k: int, normalised: bool) -> Experts:
    count = len(router)
    gate_up = _random(count, 2 * WIDTH, HIDDEN, seed=5) * HIDDEN**-0.5
    down = _random(count, HIDDEN, WIDTH, seed=6) * WIDTH**-0.5
    return Experts(router, gate_up, down, top_k, normalised)


def _mixture(x: torch.Tensor, experts: Experts) -> tuple[list[list[int]], torch.Tensor]:
    """Return each token's chosen experts and the sum of their results, computed token by token."""
    assert isinstance(experts.gate_up, torch.Tensor) and isinstance(experts.down, torch.Tensor)
    chosen, results = [], []
    for token in x.double():
        logits = experts.router.double() @ token
        best = sorted(range(len(logits)), key=lambda index: (-logits[index], index))[: experts.top_k]
        weights = (logits - logits.max()).exp()
        weights /= weights[best].sum() if experts.normalised else weights.sum()
        result = torch.zeros(HIDDEN, dtype=torch.float64)
        for index in best:
            gate, up = (experts.gate_up[index].double() @ token).split(WIDTH)
            result += weights[index] * (experts.down[index].double() @ (gate / (1 + (-gate).exp()) * up))
        chosen.append(best)
        results.append(result)
    return chosen, torch.stack(results)


@pytest.mark.parametrize("tokens", [1, 17, 40])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    ("router", "top_k"),
    [
        (_random(8, HIDDEN, seed=3), 1),
        (_random(8, HIDDEN, seed=3), 3),
        (_random(8, HIDDEN, seed=3), 8),
        (_random(128, HIDDEN, seed=3), 8),
        (torch.zeros(8, HIDDEN), 3),
    ],
    ids=["one each", "three each", "all", "128", "all tied"],
)
def test_experts_are_chosen_by_logit_and_added_by_weight(
    router: torch.Tensor, top_k: int, normalised: bool, tokens: int
) -> None:
    experts = _experts(router, top_k, normalised)
    x, gain, residual = _random(tokens, HIDDEN), _random(HIDDEN, seed=1), _random(tokens, HIDDEN, seed=2)
    chosen, expected = _mixture(reference.rms_norm(x, gain, EPS), experts)
    found = OPS.norm_experts(Residual(x), gain, EPS, experts)
    assert found.chosen.tolist() == chosen
    assert found.weights.dtype == torch.float32
    _close(OPS.experts_sum(found, experts), expected)
    added = OPS.experts_add(found, experts, Residual(residual.clone()), None).values
    _close(added, residual.double() + expected)


@pytest.mark.parametrize("top_k", [1, 2, 4, 7])
def test_of_tied_experts_the_first_ones_are_chosen(top_k: int) -> None:
    # Sums of small integers are exact, so equal rows of the router's matrix give equal logits.
    x = torch.randint(-3, 4, (50, HIDDEN), generator=torch.Generator().manual_seed(1)).float()
    router = (
        torch.randint(-3, 4, (3, HIDDEN), generator=torch.Generator().manual_seed(2)).float().repeat(3, 1)
    )
    chosen, _ = reference.route(x, router, top_k, normalised=True)
    assert chosen.tolist() == _mixture(x, _experts(router, top_k, normalised=True))[0]


def test_every_token_may_choose_the_same_experts_and_leave_the_others() -> None:
    experts = _experts(torch.zeros(8, HIDDEN), 3, normalised=True)
    found = OPS.norm_experts(Residual(_random(33, HIDDEN)), torch.ones(HIDDEN), EPS, experts)
    assert found.chosen.tolist() == [[0, 1, 2]] * 33
    _close(found.weights, torch.full((33, 3), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("fp8", [False, True])
def test_a_pass_without_tokens_has_no_experts(fp8: bool) -> None:
    experts = _experts(_random(8, HIDDEN, seed=3), 3, normalised=True)
    if fp8:
        assert isinstance(experts.gate_up, torch.Tensor) and isinstance(experts.down, torch.Tensor)
        experts = replace(experts, gate_up=_fp8(experts.gate_up), down=_fp8(experts.down))
    nothing = torch.empty(0, HIDDEN)
    found = OPS.norm_experts(Residual(nothing), torch.ones(HIDDEN), EPS, experts)
    assert found.chosen.shape == found.weights.shape == (0, 3)
    assert OPS.experts_sum(found, experts).shape == nothing.shape
    assert OPS.experts_add(found, experts, Residual(nothing), None).values.shape == nothing.shape


@pytest.mark.parametrize("fp8", [False, True])
def test_the_results_of_ranks_with_some_experts_each_add_up_to_the_sum(fp8: bool) -> None:
    whole = _experts(_random(8, HIDDEN, seed=3), 3, normalised=True)
    assert isinstance(whole.gate_up, torch.Tensor) and isinstance(whole.down, torch.Tensor)

    def result(experts: Experts, first: int, count: int) -> torch.Tensor:
        gate_up, down = (each[first : first + count] for each in (whole.gate_up, whole.down))
        part = replace(experts, gate_up=gate_up, down=down, first=first)
        if fp8:
            part = replace(part, gate_up=_fp8(gate_up), down=_fp8(down))
        found = OPS.norm_experts(Residual(x), torch.ones(HIDDEN), EPS, part)
        return OPS.experts_sum(found, part)

    x = _random(33, HIDDEN)
    expected = result(whole, 0, 8)
    for count in (1, 2, 4):
        parts = [result(whole, first, count) for first in range(0, 8, count)]
        torch.testing.assert_close(sum(parts), expected, rtol=1e-5, atol=1e-6)
    # With this router, no token chooses an expert of the second rank.
    one_sided = replace(whole, router=torch.zeros(8, HIDDEN))
    assert not result(one_sided, 4, 4).any()


def _expanded(weight: Fp8Weight) -> torch.Tensor:
    return weight.values.float() * weight.scales.unsqueeze(-1)


def _fp8(weight: torch.Tensor) -> Fp8Weight:
    values, scales = reference.quantise_fp8(weight)
    return Fp8Weight(values, scales.squeeze(-1))


def test_fp8_experts_round_both_sides_of_each_product() -> None:
    experts = _experts(_random(8, HIDDEN, seed=3), 3, normalised=True)
    assert isinstance(experts.gate_up, torch.Tensor)
    x = _random(40, HIDDEN)
    chosen = torch.arange(40) % 8
    found = reference.experts_linear(x, chosen, _fp8(experts.gate_up))
    rows, row_scales = reference.quantise_fp8(x)
    matrices = _expanded(_fp8(experts.gate_up)).double()[chosen]
    _close(found, ((rows.double() * row_scales).unsqueeze(1) @ matrices.mT).squeeze(1))


@pytest.mark.parametrize("normed", [False, True])
def test_rope_cache_write_rotates_and_writes_every_head(normed: bool) -> None:
    heads, kv_heads, size, tokens = 6, 2, 16, 9
    qkv = _random(tokens, (heads + 2 * kv_heads) * size)
    q_norm, k_norm = (_random(size, seed=4), _random(size, seed=5)) if normed else (None, None)
    positions = torch.tensor([0, 1, 2, 63, 64, 65, 500, 7, 8])
    slots = torch.randperm(4 * PAGE_TOKENS, generator=torch.Generator().manual_seed(1))[:tokens]
    keys, values = (
        _random(4, kv_heads, PAGE_TOKENS, size, seed=2),
        _random(4, kv_heads, PAGE_TOKENS, size, seed=3),
    )
    expected_keys, expected_values = keys.double(), values.double()
    expected_q = torch.empty(tokens, heads, size, dtype=torch.float64)
    for token in range(tokens):
        rows = qkv[token].double().view(-1, size)
        block, offset = divmod(int(slots[token]), PAGE_TOKENS)
        for head in range(heads + 2 * kv_heads):
            row = rows[head]
            if head >= heads + kv_heads:
                expected_values[block, head - heads - kv_heads, offset] = row
                continue
            norm = q_norm if head < heads else k_norm
            row = row if norm is None else _rms_norm(row, norm)
            turned = torch.empty_like(row)
            for i in range(size // 2):
                angle = int(positions[token]) * 10000.0 ** (-2 * i / size)
                a, b = row[i], row[i + size // 2]
                turned[i] = a * math.cos(angle) - b * math.sin(angle)
                turned[i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
            if head < heads:
                expected_q[token, head] = turned
            else:
                expected_keys[block, head - heads, offset] = turned
    table = cos_sin_table(default_frequencies(size, 10000.0), 512)
    rotation, pool = Rotation(table, q_norm, k_norm, EPS), KvPool(keys, values)
    q = OPS.rope_cache_write(qkv, positions, slots, rotation, pool, heads)
    _close(q, expected_q, 1e-4)
    _close(keys, expected_keys, 1e-4)
    _close(values, expected_values, 1e-6)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: list[int],
    position: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Compute one token's attention key by key: `[heads, head_dim]` float64."""
    heads, size = q.shape
    group = heads // keys.shape[1]
    first = 0 if window is None else max(0, position - window + 1)
    out = torch.zeros(heads, size, dtype=torch.float64)
    for head in range(heads):
        places = [
            (table[p // PAGE_TOKENS], head // group, p % PAGE_TOKENS) for p in range(first, position + 1)
        ]
        k = torch.stack([keys[place].double() for place in places])
        v = torch.stack([values[place].double() for place in places])
        scores = (k @ q[head].double()) * scale
        weights = (scores - scores.max()).exp()
        out[head] = (weights / weights.sum()) @ v
    return out


def _pool(kv_heads: int, size: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (blocks, kv_heads, PAGE_TOKENS, size)
    return _random(*shape, seed=11), _random(*shape, seed=12)


@pytest.mark.parametrize("window", [None, 1, 50, 64, 100])
@pytest.mark.parametrize(
    "lens",
    [[1], [64, 65], [5, 63, 127, 128, 129], [1, 2, 3, 4, 5, 6, 700]],
    ids=["one", "border", "ragged", "one is much longer"],
)
def test_decodes_attend_to_their_own_pages(lens: list[int], window: int | None) -> None:
    heads, kv_heads, size = 6, 2, 8
    keys, values = _pool(kv_heads, size, 40)
    order = random.Random(0)
    columns = -(-max(lens) // PAGE_TOKENS)
    tables = [[order.randrange(40) for _ in range(columns)] for _ in lens]
    q = _random(len(lens), heads, size)
    found = reference_attention.paged_attention_decode(
        q, keys, values, torch.tensor(tables), torch.tensor(lens), 0.3, window
    )
    for row, length in enumerate(lens):
        _close(found[row], _attend(q[row], keys, values, tables[row], length - 1, 0.3, window))


def test_non_finite_values_of_one_sequence_do_not_reach_another() -> None:
    """The block-table entries past the end of a sequence name blocks of other sequences."""
    keys, values = _pool(2, 8, 10)
    tables = torch.tensor([[1, 9, 9], [2, 3, 4]])
    rows, lens = torch.tensor([0, 1]), torch.tensor([60, 190])
    q = _random(2, 4, 8)
    results = []
    for broken in (0.0, math.nan):
        values[9] = broken
        plan = OPS.plan_attention(AttentionInput(tables, rows, lens, columns=3, chunks=[]))
        results.append(OPS.attention(q, keys, values, plan, 0.3, None))
    assert torch.equal(*results)


def test_many_decodes_are_computed_in_bounded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = _pool(1, 8, 30)
    lens = [70, 130, 10, 200, 64, 129, 1, 300]
    tables = torch.stack([torch.randperm(30)[:5] for _ in lens])
    q = _random(len(lens), 2, 8)
    arguments = (q, keys, values, tables, torch.tensor(lens), 0.3, None)
    whole = reference_attention.paged_attention_decode(*arguments)
    largest = []
    attend = reference_attention._attend_group

    def spy(*args: object) -> torch.Tensor:
        group = args[-1]
        assert isinstance(group, reference_attention._Group)
        largest.append(group.columns)
        return attend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reference_attention, "_GATHERED_BYTES", 6 * keys[0].nbytes)
    monkeypatch.setattr(reference_attention, "_attend_group", spy)
    assert (reference_attention.paged_attention_decode(*arguments) - whole).abs().max() < 1e-6
    assert len(largest) > 1
    assert max(largest) <= 6


@pytest.mark.parametrize("window", [None, 1, 64, 100])
@pytest.mark.parametrize(("context", "count"), [(0, 1), (63, 2), (64, 9), (130, 7)])
def test_a_chunk_attends_to_its_context_and_itself(context: int, count: int, window: int | None) -> None:
    heads, kv_heads, size = 4, 2, 8
    keys, values = _pool(kv_heads, size, 12)
    table = [7, 3, 11, 0, 5][: -(-(context + count) // PAGE_TOKENS)]
    q = _random(count, heads, size)
    found = reference_attention.paged_attention_prefill(
        q, keys, values, torch.tensor(table), context, 0.3, window
    )
    assert found.shape == q.shape
    for index in range(count):
        _close(found[index], _attend(q[index], keys, values, table, context + index, 0.3, window))
