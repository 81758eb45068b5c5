"""Tests of the sampling kernels against their reference implementation, `kernels.sampling`, combined as in
`engine.sampler`.

The interpreter (on a CPU, in CI) verifies that the right tokens are read, compared, counted and kept. Every
row of a mixed batch must sample the same token as the reference. Only the tests marked `gpu` verify bfloat16
logits, the hardware's logarithm, that results with and without PDL are bitwise equal, and that a graph
replays the captured kernels, all with a vocabulary of realistic size.

A sampled token may differ only where two scores, or a token's probability mass and the mass at the boundary,
are closer together than the stated errors. The cases have fixed seeds, and none of them has such a
difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from kernels import sampling as reference

triton_sampling = pytest.importorskip("kernels.triton.sampling", exc_type=ImportError)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")
COLUMNS = 9001
"""Number of columns: two and a half chunks."""


@dataclass
class Params:
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


def _draws(params: list[Params], position: int = 17) -> triton_sampling.Draws:
    """Return the parameters of a batch in which row i has slot i + 1."""
    floats = torch.zeros(len(params) + 2, 7)
    top_k = torch.zeros(len(params) + 2, dtype=torch.int64)
    base = torch.zeros(len(params) + 2, dtype=torch.int64)
    for row, p in enumerate(params, start=1):
        drawn = p.temperature > 0
        rates = (1 / p.temperature if drawn else 1.0, float(drawn), p.top_p, p.min_p)
        floats[row] = torch.tensor((*rates, p.repetition, p.frequency, p.presence))
        top_k[row] = p.top_k
        base[row] = reference.noise_base(1234 + row, row % 3)
    rows = torch.arange(1, len(params) + 1)
    positions = position + torch.arange(len(params)) * 1001
    parts = (rows, positions, base, floats, top_k)
    return triton_sampling.Draws(*(part.to(DEVICE) for part in parts))


def _expected(logits: torch.Tensor, params: list[Params], draws: triton_sampling.Draws) -> torch.Tensor:
    """Return the tokens that the reference samples. The reference sorts, and computes one row at a time."""
    keys = reference.noise_keys(draws.noise_base[draws.slots], draws.positions)
    hashes = reference.token_hashes(0, logits.shape[1], logits.device)
    tokens = []
    for row, p in enumerate(params):
        x = logits[row : row + 1].float().clone()
        if p.temperature == 0:
            values, ids = reference.best(x)
        else:
            x *= draws.floats[draws.slots[row], 0]
            if p.top_k:
                reference.keep_top_k_(x, torch.tensor([p.top_k], device=x.device), p.top_k)
            scores = reference.gumbel_noise(keys[row : row + 1], hashes) + x
            if p.min_p:
                reference.keep_min_p_(scores, x, torch.tensor([p.min_p], device=x.device))
            if p.top_p < 1:
                reference.keep_top_p_(scores, x, torch.tensor([p.top_p], device=x.device))
            values, ids = reference.best(scores)
        tokens.append(int(ids) if bool(values.isfinite()) else -1)
    return torch.tensor(tokens, device=logits.device)


def _logits(rows: int, columns: int = COLUMNS, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * spread).to(DEVICE)


def _wrap(values: torch.Tensor, **more: object) -> triton_sampling.Logits:
    hashes = reference.token_hashes(0, values.shape[1], values.device)
    return triton_sampling.Logits(values, values.shape[1], hashes=hashes, **more)


# ── greedy and plain ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("columns", [1, 50, 4096, 4097, COLUMNS])
def test_greedy_takes_the_largest_and_the_lowest_id_on_ties(columns: int) -> None:
    logits = _logits(5, columns)
    if columns > 50:
        logits[0, [7, 48]] = 50.0
        logits[1, [48, columns - 1]] = 50.0
        logits[2, columns - 1] = 50.0
    values, ids = triton_sampling.greedy(_wrap(logits))
    expected = reference.best(logits)
    assert torch.equal(ids, expected[1]) and torch.equal(values, expected[0])


def test_padding_columns_are_not_read_and_ids_begin_at_the_first() -> None:
    logits = _logits(3, 5000)
    logits[:, 4500:] = math.nan
    hashes = reference.token_hashes(1000, 4500, logits.device)
    wrapped = triton_sampling.Logits(logits, 4500, first=1000, hashes=hashes)
    assert torch.equal(triton_sampling.greedy(wrapped)[1], logits[:, :4500].argmax(1) + 1000)
    params = [Params() for _ in range(3)]
    draws = _draws(params)
    keys = reference.noise_keys(draws.noise_base[draws.slots], draws.positions)
    scores = reference.gumbel_noise(keys, hashes) + logits[:, :4500] / 0.8
    assert torch.equal(triton_sampling.plain(wrapped, draws)[1], scores.argmax(1) + 1000)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("draw", ["greedy", "plain", "full"])
def test_a_row_with_non_finite_logits_is_bad_and_affects_no_other(bad: float, draw: str) -> None:
    params = [Params(top_p=0.9), Params(top_k=5), Params(min_p=0.1)]
    logits = _logits(3)
    logits[1, 4200 if not bad < 0 else slice(None)] = bad
    call = getattr(triton_sampling, draw)
    found = call(_wrap(logits)) if draw == "greedy" else call(_wrap(logits), _draws(params))
    assert not found[0][1].isfinite() and found[0][[0, 2]].isfinite().all()
    assert found[1][1] == -1 and (found[1][[0, 2]] >= 0).all()


def test_plain_and_greedy_rows_mix() -> None:
    params = [Params(t) for t in (0.0, 0.7, 1.0, 0.0, 30.0, 1e-4)]
    logits, draws = _logits(6), _draws(params)
    assert torch.equal(triton_sampling.plain(_wrap(logits), draws)[1], _expected(logits, params, draws))


def test_padding_rows_give_a_bad_token_and_the_others_their_own() -> None:
    params = [Params(top_p=0.9), Params(), Params(top_k=3)]
    logits, draws = _logits(3), _draws(params)
    expected = _expected(logits, params, draws)
    draws.slots[1] = -1
    expected[1] = -1
    assert torch.equal(triton_sampling.full(_wrap(logits), draws)[1], expected)
    expected[2] = triton_sampling.plain(_wrap(logits), draws)[1][2]
    assert triton_sampling.plain(_wrap(logits), draws)[1].tolist()[1] == -1


def test_rows_may_share_logits() -> None:
    params = [Params(top_p=0.9), Params(), Params(top_k=3), Params(0.0)]
    logits, draws = _logits(2), _draws(params)
    index = torch.tensor([1, 0, 0, 1], device=DEVICE)
    found = triton_sampling.full(_wrap(logits, index=index), draws)[1]
    assert torch.equal(found, _expected(logits[index], params, draws))
    found = triton_sampling.greedy(_wrap(logits, index=index))[1]
    assert torch.equal(found, logits.argmax(1)[index])


# ── full ─────────────────────────────────────────────────────────────────────────────────────────────

MIXED = [
    Params(top_p=0.95),
    Params(top_p=0.5),
    Params(top_p=0.05),
    Params(top_p=1e-6),
    Params(top_k=1),
    Params(top_k=2),
    Params(top_k=50),
    Params(top_k=4000),
    Params(top_k=20, top_p=0.95),
    Params(top_k=30, top_p=0.4),
    Params(top_k=60, top_p=0.7),
    Params(top_k=1000, top_p=0.3),
    Params(top_k=20, top_p=0.95, min_p=0.2),
    Params(min_p=0.05),
    Params(min_p=1.0),
    Params(0.0, top_k=7, top_p=0.3),
    Params(),
    Params(5.0, top_p=0.9, min_p=0.5),
    Params(0.1, top_p=0.99),
]


@pytest.mark.parametrize(
    ("columns", "spread"), [(COLUMNS, 0.05), (COLUMNS, 2.0), (COLUMNS, 20.0), (4096, 2.0), (100, 1.0)]
)
def test_every_kind_of_row_draws_the_reference_token(columns: int, spread: float) -> None:
    logits, draws = _logits(len(MIXED), columns, spread, seed=int(spread)), _draws(MIXED)
    assert torch.equal(triton_sampling.full(_wrap(logits), draws)[1], _expected(logits, MIXED, draws))


@pytest.mark.parametrize("few", [16, 64])
@pytest.mark.parametrize("levels", [1, 2, 40])
def test_ties_with_the_last_kept_token_are_kept(
    levels: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits have only a few different values, so every boundary falls into a tie. With `_FEW` set to 16,
    most rows with top-k use the search for large values of top-k."""
    monkeypatch.setattr(triton_sampling, "_FEW", few)
    params = MIXED
    logits = _logits(len(params), 2000, seed=few).clamp(-6, 6)
    step = 12 / levels
    logits = (logits / step).round() * step
    draws = _draws(params)
    assert torch.equal(triton_sampling.full(_wrap(logits), draws)[1], _expected(logits, params, draws))


def test_the_search_ends_for_any_logits() -> None:
    """The logits cover the whole range of float32, over which a search with equally spaced thresholds does
    not converge. The kernel's thresholds must therefore have equally many float32 numbers between them. Some
    tokens are banned."""
    params = [Params(1.0, top_k=k, top_p=p) for k in (3, 300) for p in (0.4, 1.0)]
    logits = _logits(len(params), 3000, spread=20.0)
    logits = logits.sign() * 10 ** logits.clamp(-30, 30)
    logits[:, ::3] = -math.inf
    draws = _draws(params)
    assert torch.equal(triton_sampling.full(_wrap(logits), draws)[1], _expected(logits, params, draws))


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    logits, draws = _logits(len(MIXED)), _draws(MIXED)
    together = triton_sampling.full(_wrap(logits), draws)
    for row in (0, 8, 9):
        alone = replace(draws, slots=draws.slots[row : row + 1], positions=draws.positions[row : row + 1])
        found = triton_sampling.full(_wrap(logits[row : row + 1]), alone)
        assert torch.equal(found[1], together[1][row : row + 1])
        assert torch.equal(found[0], together[0][row : row + 1])


# ── logits processors ────────────────────────────────────────────────────────────────────────────────


def test_penalties_then_bias_then_bans() -> None:
    columns = 5000
    params = [Params(), Params(repetition=1.3, frequency=0.4, presence=0.2), Params(0.0, repetition=0.8)]
    logits, draws = _logits(3, columns), _draws(params)
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 6, (2, columns), dtype=torch.int32, generator=generator).to(DEVICE)
    index = torch.tensor([2, 0, 1, -1], device=DEVICE)
    slots = torch.tensor([1, -1, 0, -1], device=DEVICE)
    bias = (
        torch.tensor([0, 1, 1, 2, -1], device=DEVICE),
        torch.tensor([4999, 5, 6, 5, 0], device=DEVICE),
        torch.tensor([3.0, -100.0, 50.0, 2.0, 9.0], device=DEVICE),
    )
    banned = (torch.tensor([1, 2, -1], device=DEVICE), torch.tensor([6, 7, 0], device=DEVICE))
    original = logits.clone()
    edited = triton_sampling.edit(_wrap(logits), draws, index, counts, slots, bias, banned)
    assert torch.equal(logits, original)

    expected = logits[index[:3]].clone()
    for row, (source, slot) in enumerate([(2, 1), (0, -1), (1, 0)]):
        if slot >= 0:
            rates = draws.floats[source + 1]
            part = (counts[slot : slot + 1], *(rates[column : column + 1] for column in (4, 5, 6)))
            reference.penalize_(expected[row : row + 1], *part)
    expected[bias[0][:4], bias[1][:4]] += bias[2][:4]
    expected[banned[0][:2], banned[1][:2]] = -math.inf
    torch.testing.assert_close(edited[:3], expected, rtol=1e-6, atol=1e-6)

    edited_index = torch.tensor([1, 2, 0], device=DEVICE)
    wrapped = _wrap(logits, edited=edited, edited_index=edited_index)
    for params_now in (params, [replace(p, top_p=0.8, top_k=100) for p in params]):
        draws = _draws(params_now)
        found = triton_sampling.full(wrapped, draws)[1]
        assert torch.equal(found, _expected(edited[edited_index], params_now, draws))


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_real_vocabulary_draws_the_reference_tokens(dtype: torch.dtype, spread: float) -> None:
    """At most one of 256 rows may differ from the reference, and only at a near-tie: its score must be within
    1e-5 of the reference's best score."""
    generator = torch.Generator("cuda").manual_seed(5)
    logits = (torch.randn(256, 128256, device=DEVICE, generator=generator) * spread).to(dtype)
    for kind in (
        [Params()],
        [Params(top_p=0.95)],
        [Params(0.6, top_k=20, top_p=0.95)],
        MIXED,
    ):
        params = (kind * 256)[:256]
        draws = _draws(params)
        found = triton_sampling.full(_wrap(logits), draws)[1]
        assert (found != _expected(logits, params, draws)).sum() <= 1, kind
    assert torch.equal(triton_sampling.greedy(_wrap(logits))[1], logits.argmax(1))


@pytest.mark.gpu
@on_gpu
def test_draws_follow_the_distribution() -> None:
    """Applies a chi-square test at a significance level of 1e-4 to 200,000 draws over 64 tokens: without
    filters, and with top-k, top-p and min-p."""
    logits = _logits(1, 64, spread=1.5)
    draws_each = 200_000
    index = torch.zeros(draws_each, dtype=torch.int64, device=DEVICE)
    for p in (Params(1.0), Params(0.7, top_p=0.8), Params(1.0, top_k=12), Params(1.3, 30, 0.9, 0.02)):
        draws = _draws([p])
        rows = draws.slots.expand(draws_each).contiguous()
        many = replace(draws, slots=rows, positions=torch.arange(draws_each, device=DEVICE))
        found = torch.cat(
            [
                triton_sampling.full(
                    _wrap(logits, index=index[at : at + 50_000]),
                    replace(many, slots=rows[:50_000], positions=many.positions[at : at + 50_000]),
                )[1]
                for at in range(0, draws_each, 50_000)
            ]
        )
        x = (logits * draws.floats[1, 0]).clone()
        scores = torch.zeros_like(x)
        if p.top_k:
            reference.keep_top_k_(x, torch.tensor([p.top_k], device=DEVICE), p.top_k)
        if p.min_p:
            reference.keep_min_p_(scores, x, torch.tensor([p.min_p], device=DEVICE))
        reference.keep_top_p_(scores, x, torch.tensor([p.top_p], device=DEVICE))
        probabilities = x.masked_fill(scores == -math.inf, -math.inf).double().softmax(1)[0]
        counts = torch.bincount(found, minlength=64)
        assert (counts[probabilities == 0] == 0).all()
        expected = probabilities[probabilities > 0] * draws_each
        statistic = float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())
        freedom = len(expected) - 1
        # This is Wilson and Hilferty's normal approximation of chi-square; 3.72 is the standard normal
        # quantile for 1e-4.
        bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
        assert statistic < bound, (p, statistic, bound)


@pytest.mark.gpu
@on_gpu
def test_pdl_and_a_graph_change_no_bit() -> None:
    params = (MIXED * 8)[:100]
    draws = _draws(params)
    source = torch.randn(100, 128256, device=DEVICE).mul_(2).to(torch.bfloat16)
    plain = triton_sampling.full(_wrap(source), draws, pdl=False)
    for _ in range(3):
        found = triton_sampling.full(_wrap(source), draws, pdl=True)
        assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])
        for draw, more in ((triton_sampling.greedy, ()), (triton_sampling.plain, (draws,))):
            for with_pdl, without in zip(
                draw(_wrap(source), *more, pdl=True), draw(_wrap(source), *more, pdl=False), strict=True
            ):
                assert torch.equal(with_pdl, without)
        processors = (_wrap(source), draws, torch.arange(0, 100, 3, device=DEVICE))
        bias = (torch.tensor([0, 4], device=DEVICE), torch.tensor([3, 9], device=DEVICE))
        edited = [
            triton_sampling.edit(
                *processors, bias=(*bias, torch.tensor([1.0, -2.0], device=DEVICE)), banned=bias, pdl=pdl
            )
            for pdl in (True, False)
        ]
        assert torch.equal(*edited)
    logits = torch.zeros_like(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = triton_sampling.full(_wrap(logits), draws, pdl=True)
    logits.copy_(source)
    graph.replay()
    assert torch.equal(replayed[0], plain[0]) and torch.equal(replayed[1], plain[1])
