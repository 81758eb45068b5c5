"""Tests of the routers of mixture-of-experts layers against their reference implementation.

The interpreter verifies the choice of experts (including ties) and the reads and writes, in float32 and
float16. Only the tests marked `gpu` verify bfloat16, the quantised result and PDL.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import ChoiceCount, reference
from tests.kernels.experts_cases import E4M3, in_both_dtypes, random_tensor, routed, routes
from tests.kernels.linear_cases import DEVICE, EPS, linear, on_gpu
from tests.kernels.test_triton_linear import check_bits

CASES = [
    # Fields: tokens, experts, top_k, hidden.
    (1, 5, 2, 48),
    (3, 130, 8, 40),
    (18, 13, 13, 64),
    (2, 4, 1, 100),
    (19, 7, 3, 200),
]


class Case:
    """Tokens and a router. Some experts have equal rows in the router's matrix, and therefore equal
    logits."""

    def __init__(self, tokens: int, experts: int, top_k: int, hidden: int, dtype: torch.dtype) -> None:
        self.x = random_tensor(tokens, hidden, seed=1, dtype=dtype)
        self.gain = random_tensor(hidden, seed=2, dtype=dtype)
        self.router = random_tensor(experts, hidden, seed=3, dtype=dtype) * hidden**-0.5
        self.router[experts // 2] = self.router[0]
        self.router[experts - 1] = self.router[0]
        self.top_k = top_k
        self.live = torch.arange(tokens, device=DEVICE) % 4 - 1
        """One number per token, [tokens] int64. Negative numbers mark padding, which is not counted."""

    def run(
        self,
        way: str,
        *,
        normalised: bool,
        values: torch.dtype | None = None,
        count: ChoiceCount | None = None,
        pdl: bool = False,
    ):
        router = (self.x, self.gain, EPS, self.router, self.top_k)
        options = {"normalised": normalised, "values": values, "count": count, "pdl": pdl}
        if way == "many":
            return routes.route_many(*router, **options)
        workspace = linear.allocate_workspace(DEVICE)
        found = routes.route(*router, workspace=workspace, **options)
        assert workspace.arrived.eq(0).all()
        return found


def _check(case: Case, found: routes.Routed, normalised: bool) -> None:
    normed = reference.rms_norm(case.x, case.gain, EPS)
    eps = torch.finfo(case.x.dtype).eps
    torch.testing.assert_close(found.normed, normed, rtol=2 * eps, atol=2 * eps)
    # Compute the expected logits from the rounded values that the kernel itself computed.
    logits = found.normed.double() @ case.router.double().T
    chosen, top_k = found.chosen.long(), case.top_k
    assert chosen.shape == (len(case.x), top_k) and found.chosen.dtype == torch.int32
    assert chosen.min() >= 0 and chosen.max() < len(case.router)
    assert (chosen.sort(dim=1).values.diff(dim=1) > 0).all()
    near = 1e-5 * logits.abs().max()
    best = logits.gather(1, chosen)
    assert (best[:, 1:] <= best[:, :-1] + near).all()
    others = logits.scatter(1, chosen, -torch.inf)
    assert (others.max(dim=1).values <= best[:, -1] + near).all()
    # Experts with equal router rows are chosen in the order of their ids.
    same = (case.router == case.router[0]).all(dim=1)
    taken = same[chosen]
    expected = same.nonzero().flatten()[(taken.cumsum(dim=1) - 1).clamp(min=0)]
    assert ((chosen == expected) | ~taken).all()
    weights = best.softmax(-1) if normalised else logits.softmax(-1).gather(1, chosen)
    torch.testing.assert_close(found.weights.double(), weights, rtol=1e-4, atol=1e-7)
    if found.places is not None and found.counts is not None:
        counted = routed(found.chosen, len(case.router))
        assert torch.equal(found.places, counted.places) and torch.equal(found.counts, counted.counts)


@pytest.mark.parametrize("way", ["few", "many"])
@pytest.mark.parametrize(("case", "dtype"), in_both_dtypes(CASES), ids=str)
def test_the_experts_with_the_highest_logits_are_chosen(case: tuple, dtype: torch.dtype, way: str) -> None:
    made = Case(*case, dtype)
    for normalised in (True, False):
        _check(made, made.run(way, normalised=normalised), normalised)


@pytest.mark.parametrize("way", ["few", "many"])
def test_tied_experts_are_chosen_in_the_order_of_their_ids(way: str) -> None:
    case = Case(3, 7, 4, 32, torch.float32)
    case.router[:] = case.router[0]
    found = case.run(way, normalised=True)
    assert found.chosen.tolist() == [[0, 1, 2, 3]] * 3
    assert torch.allclose(found.weights, torch.full((3, 4), 0.25, device=DEVICE))


@pytest.mark.parametrize("way", ["few", "many"])
def test_a_token_that_is_not_finite_has_distinct_experts_and_spoils_no_other(way: str) -> None:
    case = Case(3, 5, 3, 32, torch.float32)
    expected = case.run(way, normalised=True)
    case.x[1] = torch.nan
    found = case.run(way, normalised=True)
    assert sorted(set(found.chosen[1].tolist())) == [0, 1, 2]
    for row in (0, 2):
        assert torch.equal(found.chosen[row], expected.chosen[row])
        assert torch.equal(found.weights[row], expected.weights[row])


@pytest.mark.parametrize("way", ["few", "many"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_choices_of_tokens_that_are_not_padding_are_counted(tokens: int, way: str) -> None:
    """The kernels add the counts to the totals. With 9 tokens, `route_many` has several blocks of tokens, of
    which the last is incomplete."""
    case = Case(tokens, 13, 3, 32, torch.float32)
    case.live[:1] = 0
    count = ChoiceCount(torch.arange(13, device=DEVICE) * 10, case.live)
    expected = count.totals.clone()
    for normalised in (True, False):
        found = case.run(way, normalised=normalised, count=count)
        expected += found.chosen[case.live >= 0].flatten().bincount(minlength=13)
        assert torch.equal(count.totals, expected)
    plain = case.run(way, normalised=False)
    assert torch.equal(found.chosen, plain.chosen) and torch.equal(found.weights, plain.weights)


@pytest.mark.parametrize("way", ["few", "many"])
def test_normalised_tokens_are_quantised(way: str) -> None:
    case = Case(3, 5, 2, 48, torch.float32)
    found = case.run(way, normalised=True, values=torch.float32)
    expected = reference.rms_norm(case.x, case.gain, EPS)
    torch.testing.assert_close(found.normed * found.scales, expected)
    assert found.normed.abs().amax(1).tolist() == pytest.approx([448.0] * 3)
    plain = case.run(way, normalised=True)
    assert torch.equal(found.chosen, plain.chosen) and torch.equal(found.weights, plain.weights)


def test_arguments_that_do_not_match_are_reported() -> None:
    case = Case(2, 5, 2, 48, torch.float32)
    workspace = linear.allocate_workspace(DEVICE)
    options = {"normalised": True, "workspace": workspace, "pdl": False}
    with pytest.raises(ValueError, match="top_k is 6 of 5 experts"):
        routes.route(case.x, case.gain, EPS, case.router, 6, **options)
    with pytest.raises(ValueError, match="last dimensions must be equal"):
        routes.route(case.x[:, 1:], case.gain, EPS, case.router, 2, **options)
    with pytest.raises(ValueError, match="their dtypes must be equal"):
        routes.route(case.x, case.gain, EPS, case.router.half(), 2, **options)
    with pytest.raises(ValueError, match="route supports up to 512"):
        routes.route(
            random_tensor(513, 48, seed=1, dtype=torch.float32), case.gain, EPS, case.router, 2, **options
        )


def test_no_tokens_launch_nothing() -> None:
    case = Case(0, 5, 2, 48, torch.float32)
    for way in ("few", "many"):
        assert case.run(way, normalised=True).chosen.shape == (0, 2)


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────

SHAPES = [(128, 8, 2048), (8, 2, 4096), (60, 4, 2048), (512, 10, 2048), (64, 8, 2880)]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_router_is_accurate_in_16_bits(shape: tuple, dtype: torch.dtype) -> None:
    for way, many in (("few", (1, 2, 16, 33)), ("many", (1, 17, 64, 1025, 8192))):
        for tokens in many:
            case = Case(tokens, *shape, dtype)
            count = ChoiceCount(torch.zeros(shape[0], dtype=torch.int64, device=DEVICE), case.live)
            found = case.run(way, normalised=True, count=count, pdl=True)
            _check(case, found, normalised=True)
            counted = found.chosen[case.live >= 0].flatten()
            assert torch.equal(count.totals, counted.bincount(minlength=shape[0]))
            _check(case, case.run(way, normalised=False, pdl=True), normalised=False)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("way", ["few", "many"])
def test_normalised_tokens_are_quantised_to_e4m3(way: str) -> None:
    case = Case(13, *SHAPES[0], torch.bfloat16)
    found = case.run(way, normalised=True, values=E4M3, pdl=True)
    plain = case.run(way, normalised=True, pdl=True)
    values, scales = reference.quantise_fp8(plain.normed)
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.normed.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found.chosen, plain.chosen) and torch.equal(found.weights, plain.weights)


def _chain(case: Case, way: str) -> Callable[[bool], list[torch.Tensor]]:
    workspace = linear.allocate_workspace(DEVICE)

    def run(pdl: bool) -> list[torch.Tensor]:
        """Route four times. Each router reads the normalised result of the previous one."""
        results, x = [case.x], case.x
        for _ in range(4):
            router = (x, case.gain, EPS, case.router, case.top_k)
            options = {"normalised": True, "pdl": pdl}
            if way == "many":
                found = routes.route_many(*router, **options)
            else:
                found = routes.route(*router, workspace=workspace, **options)
            x = found.normed
            results += [found.normed, found.weights, found.chosen]
        return results

    return run


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("way", "tokens"), [("few", 1), ("few", 16), ("many", 64), ("many", 2000)])
def test_pdl_and_graphs_change_no_bit_of_a_router(way: str, tokens: int) -> None:
    check_bits(_chain(Case(tokens, *SHAPES[0], torch.bfloat16), way))
