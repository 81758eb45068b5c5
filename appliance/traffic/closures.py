"""What is closed to new requests: the whole service, or a model. While it is, they are refused, or held."""

from __future__ import annotations

from typing import NamedTuple

from appliance.traffic.request import Request


class Closure(NamedTuple):
    """Why new requests are not taken, and what becomes of them."""

    why: str
    """For the client, in words."""
    hold: bool = False
    """They wait until it is open again, instead of being refused."""


class Closures:
    """The closures by model (None is the whole service, whose closure counts for every model), and the
    requests that are held until they end."""

    def __init__(self) -> None:
        self._by_model: dict[str | None, Closure] = {}
        self._held: dict[str, Request] = {}
        """In the order in which they came."""

    def close(self, model: str | None, closure: Closure) -> None:
        """Close `model`; another closure of it is replaced."""
        self._by_model[model] = closure

    def open(self, model: str | None) -> None:
        """End the closure of `model`; nothing happens if there is none."""
        self._by_model.pop(model, None)

    def of(self, model: str) -> Closure | None:
        """What holds for a request to `model`; None if it is taken."""
        return self._by_model.get(None) or self._by_model.get(model)

    # ── what is held ──

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._held

    def hold(self, request: Request) -> None:
        """It waits until it may be queued."""
        self._held[request.request_id] = request

    def let_go(self, request: Request) -> bool:
        """It is held no more; False if it was not."""
        return self._held.pop(request.request_id, None) is not None

    def held(self, model: str | None = None) -> list[Request]:
        """What is held (for `model`, None: for any), in the order in which it came."""
        return [request for request in self._held.values() if model in (None, request.first.model)]

    def released(self) -> list[tuple[Request, Closure | None]]:
        """What is held and nothing holds any more, with what refuses it now."""
        found = [(request, self.of(request.first.model)) for request in self._held.values()]
        return [(request, closure) for request, closure in found if closure is None or not closure.hold]

    @property
    def held_since(self) -> float | None:
        """When the request came that is held for longest."""
        first = next(iter(self._held.values()), None)
        return None if first is None else first.queued_at
