"""Searches for the fastest plans for the two GEMMs of a mixture-of-experts layer.

A layer is timed as a whole: norm, router, experts and residual. The search first varies one GEMM's plan while
the other keeps its rule-based one, then times combinations of both GEMMs' best plans. Small and large token
counts use different kernels (`kernels.triton.experts_plans`); for some token counts, the search tries both
kinds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels import ExpertActivation, Experts, Fp8Weight, Weight, reference
from kernels.triton import experts
from kernels.triton.experts_plans import ExpertsPlan, ExpertsShape, LayerPlans, choose, problem
from kernels.triton.linear_rows import allocate_workspace
from kernels.triton.linear_table import ExpertsEntry
from kernels.tune.graphs import Graphs

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Token counts measured by the tuner. Other counts use the next larger entry."""

MAX_ERROR = 1e-2
"""Maximum accepted relative error ‖out − ref‖ / ‖ref‖ of a layer's result. FP8 plans reach 4e-3."""

_LAYERS = 8
"""Number of layers in a captured graph. Each has different tokens, so that different experts are read."""

_COPIES = 2
"""Number of sets of expert weights, which the layers use in turn. Each layer also chooses different experts,
so no weight is in the L2 cache when it is read."""

_REPLAYS = 5
"""Number of timed replays of a graph. The shortest time is used."""

_FINALISTS = 3
"""Number of plans per GEMM that are timed together with the other GEMM's best plans."""

_NOISE = 0.005
"""Minimum relative gain required to replace the rule-based plans."""

_GEMV_UP_TO, _DOT_UP_TO, _GROUPED_FROM = 4, 64, 16
"""Maximum token counts for which `gemv` and `dot` are tried, and the count above which `grouped` is tried."""

_MAX_SUMS = 160
"""Maximum number of registers per thread for a tile's sums. More would leave too few for everything else."""

EPS = 1e-6

Report = Callable[[str], None]
Timed = list[tuple[LayerPlans, float]]
"""Pairs of plans with the layer's time in microseconds, fastest first."""


class ExpertsChain:
    """A sequence of layers with random experts and tokens. On the "meta" device, its launches can be recorded
    but not timed.

    dtype: the model's dtype.
    pdl: whether the GPU supports programmatic dependent launch.
    """

    def __init__(
        self, shape: ExpertsShape, tokens: int, dtype: torch.dtype, device: torch.device, *, pdl: bool
    ) -> None:
        self.shape, self.tokens, self.device = shape, tokens, device
        self._dtype, self._pdl = dtype, pdl
        self._layers = [self._layer() for _ in range(_COPIES)]
        self._gain = torch.ones(shape.hidden, dtype=dtype, device=device)
        self._workspace = allocate_workspace(device)
        self._inputs = [self._random(tokens, shape.hidden) for _ in range(_LAYERS)]
        self._graphs = Graphs() if device.type == "cuda" else None

    def run(self, plans: LayerPlans) -> None:
        """Launch all layers."""
        for index, x in enumerate(self._inputs):
            self._compute(x, self._layers[index % _COPIES], plans)

    def microseconds(self, plans: LayerPlans) -> float:
        """Return the time for one layer in microseconds. Exceptions from launches propagate."""
        assert self._graphs is not None
        graph = self._graphs.capture(lambda: self.run(plans))
        return min(self._graphs.microseconds([graph], [0] * _REPLAYS)) / _LAYERS

    def error(self, plans: LayerPlans) -> float:
        """Return the relative error of a layer's result. The reference implementation uses the experts chosen
        by the layer, because its own choice might differ if some logits are almost equal."""
        x, layer = self._inputs[0], self._layers[0]
        activation, found = self._compute(x, layer, plans)
        rows = reference.rms_norm(x, self._gain, EPS).repeat_interleave(layer.top_k, dim=0)
        products = reference.experts_linear(rows, activation.chosen.flatten(), layer.gate_up)
        computed = replace(activation, values=reference.silu_mul(products))
        expected = reference.experts_sum(computed, layer).float()
        return float((found.float() - expected).norm() / expected.norm())

    def _compute(
        self, x: torch.Tensor, layer: Experts, plans: LayerPlans
    ) -> tuple[ExpertActivation, torch.Tensor]:
        options: dict[str, Any] = {"workspace": self._workspace, "pdl": self._pdl}
        activation = experts.activate(x, self._gain, EPS, layer, plans=plans, **options)
        return activation, experts.weighted_sum(activation, layer, **options)

    def _layer(self) -> Experts:
        shape = self.shape
        return Experts(
            router=self._random(shape.experts, shape.hidden, scale=shape.hidden**-0.5),
            gate_up=self._weight(shape.held, 2 * shape.intermediate, shape.hidden),
            down=self._weight(shape.held, shape.hidden, shape.intermediate),
            top_k=shape.top_k,
            normalised=True,
        )

    def _weight(self, count: int, rows: int, columns: int) -> Weight:
        if self.shape.dtype == self._dtype:
            return self._random(count, rows, columns, scale=columns**-0.5)
        # e4m3 weights are converted one expert at a time, because the converted weights take more memory.
        values = torch.empty((count, rows, columns), dtype=self.shape.dtype, device=self.device)
        for expert in values if self.device.type != "meta" else ():
            expert.copy_(self._random(rows, columns, scale=100.0).clamp_(-448, 448))
        scales = torch.full((count, rows), columns**-0.5 / 100, dtype=torch.float32, device=self.device)
        return Fp8Weight(values, scales)

    def _random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty(shape, dtype=self._dtype, device=self.device)
        return made if self.device.type == "meta" else made.normal_().mul_(scale)


def search(chain: ExpertsChain, shared_bytes: int, report: Report) -> ExpertsEntry:
    """Return a layer's fastest plans. Report the three fastest pairs of plans and the rule-based pair."""
    tried = families(chain.shape, chain.tokens, shared_bytes)
    timed = [timing for family in tried for timing in _best(chain, family)]
    timed.sort(key=lambda one: one[1])
    timed = [(plans, us) for plans, us in timed if chain.error(plans) < MAX_ERROR]
    rule = rules(chain.shape, chain.tokens, shared_bytes)
    # Time the finalists and the rule-based plans again, because the GPU clock may have drifted.
    again = _time(chain, [rule, *(plans for plans, _ in timed[:_FINALISTS])], rounds=3)
    rule_us = dict(again)[rule]
    best, us = again[0]
    if us > rule_us * (1 - _NOISE):
        best, us = rule, rule_us
    report(f"{chain.shape} {chain.tokens}: rules {rule_us:.1f} us, best {us:.1f} us")
    for plans, measured in again:
        report(f"    {measured:7.1f}  {_text(plans.up)}; {_text(plans.down)}")
    return ExpertsEntry(best, us, rule_us)


def _text(plan: ExpertsPlan) -> str:
    tile = f"{plan.form} {plan.rows}, {plan.block_n}x{plan.block_k}"
    return f"{tile} w{plan.warps} s{plan.stages} p{plan.programs}"


def rules(shape: ExpertsShape, tokens: int, shared_bytes: int) -> LayerPlans:
    """Return the rule-based plans."""
    sizes = (shape.top_k, shape.experts, shape.hidden, shape.intermediate)
    return choose(tokens, *sizes, shape.dtype, shared_bytes)


class Family:
    """Candidate plans for both GEMMs, which can be combined freely, and the plans that the search starts
    from."""

    def __init__(self, ups: Sequence[ExpertsPlan], downs: Sequence[ExpertsPlan], start: LayerPlans) -> None:
        self.ups, self.downs, self.start = ups, downs, start

    def changes(self) -> list[LayerPlans]:
        """Return the starting plans and, for each candidate, a copy in which that candidate replaces one of
        them."""
        ups = [replace(self.start, up=up) for up in self.ups]
        downs = [replace(self.start, down=down) for down in self.downs]
        return list(dict.fromkeys([self.start, *ups, *downs]))


def families(shape: ExpertsShape, tokens: int, shared_bytes: int) -> list[Family]:
    """Return the candidate plans for this number of tokens: those for few tokens, those for many, or both."""
    found = []
    up, down = shape.hidden, shape.intermediate
    if tokens <= _DOT_UP_TO:
        ups, downs = _few(shape, tokens, up, shared_bytes), _few(shape, tokens, down, shared_bytes)
        start = rules(shape, min(tokens, 32), shared_bytes)
        if tokens > 32:
            start = LayerPlans(replace(start.up, rows=_DOT_UP_TO), replace(start.down, rows=_DOT_UP_TO))
        found.append(Family(ups, downs, start))
    if tokens > _GROUPED_FROM:
        ups, downs = _many(shape, tokens, up, shared_bytes), _many(shape, tokens, down, shared_bytes)
        found.append(Family(ups, downs, rules(shape, max(tokens, 33), shared_bytes)))
    return found


def _few(shape: ExpertsShape, tokens: int, k: int, shared_bytes: int) -> list[ExpertsPlan]:
    plans = []
    size, up = shape.dtype.itemsize, k == shape.hidden
    whole = 1 << (k - 1).bit_length()
    if tokens <= _GEMV_UP_TO:
        for block_n, block_k, warps in itertools.product((4, 8, 16), (128, 256, 512, 1024, 2048), (4, 8)):
            choices = 1 if up else 1 << (shape.top_k - 1).bit_length()
            thread_bytes = block_n * block_k * choices * size // (32 * warps)
            if block_k <= whole and 64 <= thread_bytes <= 256:
                plans.append(ExpertsPlan("gemv", 1, block_n, block_k, warps))
        streams = itertools.product((16, 32), (64, 128, 256), (4, 8) if up else (shape.top_k,), (1, 2, 4))
        for block_n, block_k, warps, ahead in streams:
            if ahead == 1 or (up and ahead * warps * block_k <= k):
                plans.append(ExpertsPlan("stream", 1, block_n, block_k, warps, ahead))
    rows = {max(8, 1 << (tokens - 1).bit_length()), max(16, 1 << (tokens - 1).bit_length())}
    tiles = itertools.product(sorted(rows), ((64, 4), (128, 8)), (128, 256, 512), (3, 4, 5, 6))
    for row, (block_n, warps), width, stages in tiles:
        if stages * width >= 768:
            plans.append(ExpertsPlan("dot", row, block_n, width // size, warps, stages))
    return [plan for plan in plans if problem(plan, tokens, shape, k, shared_bytes) is None]


def _many(shape: ExpertsShape, tokens: int, k: int, shared_bytes: int) -> list[ExpertsPlan]:
    size = shape.dtype.itemsize
    mean = tokens * shape.top_k / shape.experts
    likely = 1 << max(3, math.ceil(math.log2(max(mean, 1))))
    rows = [row for row in (likely, 2 * likely) if row <= 128] or [128]
    tiles = itertools.product(rows, ((64, 4), (128, 4), (128, 8), (256, 8)), (128, 256, 512), (3, 4, 5))
    plans = []
    for row, (block_n, warps), width, stages in tiles:
        for programs in (1, 2, 3, 4):
            plan = ExpertsPlan("grouped", row, block_n, width // size, warps, stages, programs)
            used = plan.programs * plan.stages * (block_n + row) * width
            sums = row * block_n // (32 * warps)
            # Skip plans that use less than half of the shared memory: they keep too few bytes in flight.
            if sums <= min(_MAX_SUMS, plan.max_registers - 40) and 2 * used >= shared_bytes:
                plans.append(plan)
    return [plan for plan in plans if problem(plan, tokens, shape, k, shared_bytes) is None]


def _best(chain: ExpertsChain, tried: Family) -> Timed:
    """Return the times of pairs of plans. Starting from the family's pair, first replace each of the two
    plans with every candidate, then combine both GEMMs' best candidates."""
    timed = _time(chain, tried.changes())
    ups = _first(plans.up for plans, _ in timed if plans.down == tried.start.down)
    downs = _first(plans.down for plans, _ in timed if plans.up == tried.start.up)
    return _time(chain, [LayerPlans(up, down) for up in ups for down in downs])


def _first(plans: Iterable[ExpertsPlan]) -> list[ExpertsPlan]:
    return list(dict.fromkeys(plans))[:_FINALISTS]


def _time(chain: ExpertsChain, tried: Sequence[LayerPlans], rounds: int = 1) -> Timed:
    """Return each pair of plans with its minimum time. Pairs that fail to launch are omitted."""
    timed: dict[LayerPlans, float] = {}
    for plans in [plans for _ in range(rounds) for plans in tried]:
        try:
            timed[plans] = min(chain.microseconds(plans), timed.get(plans, math.inf))
        except Exception:
            continue
    return sorted(timed.items(), key=lambda one: one[1])
