"""The operator's rules for the queue: `[queue]` of the settings."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Factor = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1000)]
_Part = Annotated[float, msgspec.Meta(ge=0, le=0.5)]


class QueueRules(msgspec.Struct, frozen=True, kw_only=True):
    """How requests wait. `docs/traffic.md` explains each in its place."""

    limit: _Count = 2048
    """The most requests that wait; more are refused with 503 and `Retry-After`."""
    tokens: _Count = 8 << 20
    """The most prompt tokens that wait."""
    timeout_s: _Seconds = 120.0
    """A request that has waited this long is refused with 503; one that would is refused at once."""
    targets_ms: tuple[_Factor, _Factor, _Factor] = (100.0, 1000.0, 10_000.0)
    """How long a request of P0, P1 and P2 should wait at most. P3 has no target."""
    output_weight: _Weight = 2.0
    """What an output token counts in fair shares; a prompt token counts 1."""
    ageing: _Factor = 5.0
    """A request that has waited so many times its class's target is lifted: its class gets turns ahead of
    better ones."""
    lifted_share: _Part = 0.1
    """Part of the service that classes with lifted requests get before better ones, each."""
    background_share: _Part = 0.02
    """The same for P3, whenever something of it waits."""
    kept_rows: _Part = 0.03
    """Part of a replica's rows that is left to tenants with little running, while several tenants ask."""
    overload: _Factor = 10.0
    """It is an overload when requests would wait so many times their class's target."""
    overload_s: _Seconds = 5.0
    """So long it must last before the next thing is done against it, or be over before that is undone."""

    def target_s(self, request_class: int) -> float:
        """Of a class; infinite for P3."""
        if request_class < len(self.targets_ms):
            return self.targets_ms[request_class] / 1e3
        return float("inf")

    def late_s(self, request_class: int) -> float:
        """Waiting time from which on a request counts as late: of P3, what it is of P2."""
        return self.ageing * self.targets_ms[min(request_class, len(self.targets_ms) - 1)] / 1e3
