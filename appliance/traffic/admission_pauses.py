"""Admission pauses for the whole service or individual models. During a pause, new requests are refused or
held."""

from __future__ import annotations

from typing import NamedTuple

from appliance.traffic.request import Request


class AdmissionPause(NamedTuple):
    """Why admission is paused, and whether new requests are held or refused."""

    reason: str
    """The message sent to clients whose requests are refused."""
    hold: bool = False
    """Whether to hold new requests until the pause ends instead of refusing them."""


class AdmissionPauses:
    """The current admission pauses, by model, and the held requests. A pause under the key None affects every
    model."""

    def __init__(self) -> None:
        self._by_model: dict[str | None, AdmissionPause] = {}
        self._held: dict[str, Request] = {}
        """The held requests, in order of arrival."""

    def begin(self, model: str | None, pause: AdmissionPause) -> None:
        """Pause admission for `model`, replacing any current pause."""
        self._by_model[model] = pause

    def end(self, model: str | None) -> None:
        """End the pause for `model`, if there is one."""
        self._by_model.pop(model, None)

    def of(self, model: str) -> AdmissionPause | None:
        """Return the pause that affects requests for `model`, or None if such requests are admitted."""
        return self._by_model.get(None) or self._by_model.get(model)

    # ── held requests ──

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._held

    def hold(self, request: Request) -> None:
        """Hold a request until it can be queued."""
        self._held[request.request_id] = request

    def let_go(self, request: Request) -> bool:
        """Stop holding a request. Return False if it was not held."""
        return self._held.pop(request.request_id, None) is not None

    def held(self, model: str | None = None) -> list[Request]:
        """Return the held requests for `model` (None for all models) in order of arrival."""
        return [request for request in self._held.values() if model in (None, request.unit)]

    def released(self) -> list[tuple[Request, AdmissionPause | None]]:
        """Return the requests that no longer need to be held, each with the pause that now refuses it, or
        None if it is admitted."""
        found = [(request, self.of(request.unit)) for request in self._held.values()]
        return [(request, pause) for request, pause in found if pause is None or not pause.hold]

    @property
    def held_since(self) -> float | None:
        """Time at which the oldest held request began to wait, or None if no request is held."""
        first = next(iter(self._held.values()), None)
        return None if first is None else first.queued_at
