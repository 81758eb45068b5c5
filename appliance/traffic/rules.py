"""Queue settings: the `[queue]` table."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Factor = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1000)]
_Part = Annotated[float, msgspec.Meta(ge=0, le=0.5)]


class QueueRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules for waiting requests. `docs/traffic.md` explains them."""

    limit: _Count = 2048
    """Maximum number of waiting requests. Further requests are refused with 503 and `Retry-After`."""
    tokens: _Count = 8 << 20
    """Maximum total number of prompt tokens in all waiting requests."""
    timeout_s: _Seconds = 120.0
    """A request that has waited for this many seconds is refused with 503. A new request whose expected
    waiting time is longer is refused immediately."""
    targets_ms: tuple[_Factor, _Factor, _Factor] = (100.0, 1000.0, 10_000.0)
    """Target waiting times, in milliseconds, of the service classes P0, P1 and P2. P3 has no target."""
    output_weight: _Weight = 2.0
    """Weight of an output token in fair sharing. A prompt token has weight 1."""
    ageing: _Factor = 5.0
    """A request is late once it has waited for this multiple of its class's target waiting time. A class with
    late requests gets a guaranteed share of the service (`lifted_share`)."""
    lifted_share: _Part = 0.1
    """Minimum share of the service guaranteed to each class with late requests, before higher-priority
    classes are served."""
    background_share: _Part = 0.02
    """Minimum share of the service guaranteed to P3 while P3 requests are waiting, before higher-priority
    classes are served."""
    reserved_slots: _Part = 0.03
    """Fraction of a replica's sequence slots reserved for P0 requests and for P1 requests of tenants with few
    running sequences. Slots are reserved only while more than one tenant is sending requests."""
    overload: _Factor = 10.0
    """Overload begins when a class's expected waiting time exceeds this multiple of its target."""
    overload_s: _Seconds = 5.0
    """Interval, in seconds, at which load shedding advances one step during an overload and goes back one
    step afterwards."""

    def target_s(self, request_class: int) -> float:
        """Return a class's target waiting time in seconds; infinite for P3."""
        if request_class < len(self.targets_ms):
            return self.targets_ms[request_class] / 1e3
        return float("inf")

    def late_s(self, request_class: int) -> float:
        """Return the waiting time in seconds after which a request of a class counts as late. The value
        for P3 is the same as for P2."""
        return self.ageing * self.targets_ms[min(request_class, len(self.targets_ms) - 1)] / 1e3
