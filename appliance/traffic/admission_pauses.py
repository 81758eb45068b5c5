"""Admission pauses for the whole service or for single models. During a pause, new requests are refused or
held."""

from __future__ import annotations

from typing import NamedTuple

from appliance.traffic.request import Request


class AdmissionPause(NamedTuple):
    """The reason for a pause of admission, and whether new requests are held or refused during the pause."""

    reason: str
    """The message for clients whose requests are refused."""
    hold: bool = False
    """Whether new requests are held until the pause ends, instead of being refused."""


class AdmissionPauses:
    """The current pauses by model, and the held requests. A pause with the key None applies to every
    model."""

    def __init__(self) -> None:
        self._by_model: dict[str | None, AdmissionPause] = {}
        self._held: dict[str, Request] = {}
        """The held requests, in order of arrival."""

    def begin(self, model: str | None, pause: AdmissionPause) -> None:
        """Pause admission to `model`, replacing any earlier pause of `model`."""
        self._by_model[model] = pause

    def end(self, model: str | None) -> None:
        """End the pause of `model`, if there is one."""
        self._by_model.pop(model, None)

    def of(self, model: str) -> AdmissionPause | None:
        """Return the pause that applies to requests for `model`, or None if they are admitted."""
        return self._by_model.get(None) or self._by_model.get(model)

    # ── held requests ──

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._held

    def hold(self, request: Request) -> None:
        """Hold a request until it may be queued."""
        self._held[request.request_id] = request

    def let_go(self, request: Request) -> bool:
        """Stop holding a request. Returns False if it was not held."""
        return self._held.pop(request.request_id, None) is not None

    def held(self, model: str | None = None) -> list[Request]:
        """Return the held requests for `model`, or for all models if it is None, in order of arrival."""
        return [request for request in self._held.values() if model in (None, request.unit)]

    def released(self) -> list[tuple[Request, AdmissionPause | None]]:
        """Return the held requests that no longer need to be held. Each request comes with the pause that now
        refuses the request, or with None if the request is now admitted."""
        found = [(request, self.of(request.unit)) for request in self._held.values()]
        return [(request, pause) for request, pause in found if pause is None or not pause.hold]

    @property
    def held_since(self) -> float | None:
        """Time when the oldest held request began to wait, or None if no request is held."""
        first = next(iter(self._held.values()), None)
        return None if first is None else first.queued_at
