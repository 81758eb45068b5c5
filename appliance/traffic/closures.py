"""What is closed to new requests: the whole service, or a model. While it is, they are refused, or held."""

from __future__ import annotations

from typing import NamedTuple


class Closure(NamedTuple):
    """Why new requests are not taken, and what becomes of them."""

    why: str
    """For the client, in words."""
    hold: bool = False
    """They wait until it is open again, instead of being refused."""


class Closures:
    """The closures by model; None is the whole service, whose closure counts for every model."""

    def __init__(self) -> None:
        self._by_model: dict[str | None, Closure] = {}

    def close(self, model: str | None, closure: Closure) -> None:
        """Close `model`; another closure of it is replaced."""
        self._by_model[model] = closure

    def open(self, model: str | None) -> None:
        """End the closure of `model`; nothing happens if there is none."""
        self._by_model.pop(model, None)

    def of(self, model: str) -> Closure | None:
        """What holds for a request to `model`; None if it is taken."""
        return self._by_model.get(None) or self._by_model.get(model)
