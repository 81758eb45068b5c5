"""Decides which models are loaded when they do not all fit into memory. The decision is a pure function of
the models' state and the time.

Models waiting for memory are loaded in the order in which their oldest requests began to wait. To make room
for the first waiting model, other models are evicted: first idle models, starting with the least recently
used, then sleeping models, then models with requests. An evicted model is put to sleep or unloaded; a model
that is already asleep is unloaded. A model stays in memory for at least `min_residence_s` after it began to
load or wake, unless the first waiting model has already waited for `min_residence_s` plus `DRAIN_S`. In any
case, a model stays for at least `MIN_SERVICE_S` after becoming ready. A model with requests stays until the
first waiting model has waited for `min_residence_s`. During an eviction, running requests have `DRAIN_S` to
finish; any that have not finished by then continue when their model is reloaded.

If two models compete for memory that can hold only one, they are swapped at most once every
`min_residence_s`. A request waits for at most `min_residence_s` (or the load time plus `MIN_SERVICE_S`, if
that is longer), plus one swap and 2 × `DRAIN_S`. The second drain is for a request that arrives while its own
model is being drained. With N competing models, a request may have to wait for N - 2 more swaps, but not for
another `min_residence_s`: each of the other models is then evicted `MIN_SERVICE_S` after becoming ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

DRAIN_S = 5.0
"""How long running requests have to finish before their model is unloaded. Requests that take longer continue
when the model is reloaded."""
MIN_SERVICE_S = 1.0
"""Minimum time for which a model answers requests after becoming ready, even if loading it took longer than
`min_residence_s`."""


class Bundle(NamedTuple):
    """Models that are loaded and unloaded together; usually only one. Times are in seconds on the monotonic
    clock."""

    units: tuple[str, ...]
    """Names of the models in the bundle."""
    loaded: bool = False
    """Whether all of the bundle's models are ready."""
    in_memory: bool = False
    """Whether any of the bundle's models occupies memory."""
    asleep: bool = False
    """Whether every model of the bundle that is in memory is asleep. A sleeping model still occupies some GPU
    memory."""
    busy: bool = False
    """Whether requests for the bundle's models are running or waiting."""
    waiting_since: float | None = None
    """When the oldest waiting request began to wait, or when the bundle was unloaded, whichever is later.
    None if no request is waiting. If the time of unloading were ignored, a model with a long queue would be
    reloaded immediately after its eviction."""
    load_began_at: float = 0.0
    ready_at: float = 0.0
    used_at: float = 0.0
    """When the latest request for the bundle's models arrived or ended."""
    memory_bytes: int = 0
    """Memory occupied by the bundle's loaded models, in bytes."""
    kept: str = ""
    """Why the bundle always stays loaded, such as "'chat' is pinned"; empty if it may be unloaded."""

    def evictable_at(self, waiting_since: float, min_residence_s: float) -> float:
        """Return the earliest time at which this bundle may be unloaded to make room for one whose oldest
        request has been waiting since `waiting_since`."""
        if self.asleep:
            return 0.0
        residence_ends_at = self.load_began_at + min_residence_s
        # Without this limit, the last of three competing models would wait until the other two have each been
        # in memory for `min_residence_s`.
        residence_ends_at = min(residence_ends_at, waiting_since + min_residence_s + DRAIN_S)
        earliest = max(residence_ends_at, self.ready_at + MIN_SERVICE_S)
        return max(earliest, waiting_since + min_residence_s) if self.busy else earliest


class LoadUnits(NamedTuple):
    """The next step is to load these models."""

    units: tuple[str, ...]


class Evict(NamedTuple):
    """The next step is to unload these models, or put them to sleep, to make room for other models."""

    units: tuple[str, ...]


class Refuse(NamedTuple):
    """The next step is to refuse requests for these models, which cannot be loaded."""

    units: tuple[str, ...]
    reason: str
    excluded: bool = False
    """Whether the models are refused because a group forbids loading them alongside a model that stays
    loaded."""


class Wait(NamedTuple):
    """The next step is to wait until this time or until the models' state changes."""

    until: float


class Residency(NamedTuple):
    """Whether a model is in memory and awake, and how often it has been automatically loaded and evicted
    since startup."""

    in_memory: bool
    loads: int
    """How often the model was loaded or woken on demand."""
    evictions: Mapping[EvictionReason, int]
    """How often the model was automatically unloaded or put to sleep, by reason. Unloading a model that is
    already asleep is not counted."""


EvictionReason = Literal["memory", "group", "idle"]
REASONS: tuple[EvictionReason, ...] = get_args(EvictionReason)
"""Reasons for evicting a model: another model needs the memory, a group forbids loading both models, or the
evicted model's time to live has expired."""


Step = LoadUnits | Evict | Refuse | Wait


def first_waiting(bundles: Iterable[Bundle]) -> Bundle | None:
    """Return the bundle to load next: the unloaded bundle with the oldest waiting request."""
    waiting = [one for one in bundles if one.waiting_since is not None and not one.loaded]
    return min(waiting, key=lambda one: (one.waiting_since, one.units), default=None)


def next_step(
    now: float,
    wanted: Bundle,
    bundles: Sequence[Bundle],
    *,
    missing_bytes: int,
    min_residence_s: float,
    excludes: Callable[[Bundle], bool],
) -> Step:
    """Return the next step towards loading the `wanted` bundle, which has waiting requests. No load or unload
    may be in progress."""
    others = [one for one in bundles if one.in_memory and one is not wanted]
    victims = [one for one in others if excludes(one) and not one.asleep]
    if kept := next((one.kept for one in victims if one.kept), ""):
        reason = f"it must not be loaded together with a model that stays loaded: {kept}"
        return Refuse(wanted.units, reason, excluded=True)
    since = now if wanted.waiting_since is None else wanted.waiting_since

    def order(one: Bundle) -> tuple[bool, bool, bool, float]:
        busy = one.busy and not one.asleep
        return busy, one.asleep, one.evictable_at(since, min_residence_s) > now, one.used_at

    candidates = sorted((one for one in others if one not in victims and not one.kept), key=order)
    freed = sum(one.memory_bytes for one in victims)
    chosen: list[Bundle] = []
    while freed < missing_bytes and candidates:
        chosen.append(candidates.pop(0))
        freed += chosen[-1].memory_bytes
    if freed < missing_bytes:
        kept = "; ".join(dict.fromkeys(one.kept for one in others if one.kept))
        return Refuse(
            wanted.units,
            "there is not enough memory, even if all models that may be unloaded are unloaded"
            + (f" ({kept})" if kept else ""),
        )
    for one in reversed(list(chosen)):
        # A model chosen earlier need not be evicted if a later one frees enough memory on its own.
        if freed - one.memory_bytes >= missing_bytes:
            chosen.remove(one)
            freed -= one.memory_bytes
    victims += chosen
    if not victims:
        return LoadUnits(wanted.units)
    until = max(one.evictable_at(since, min_residence_s) for one in victims)
    if until > now:
        return Wait(until)
    return Evict(tuple(unit for one in victims for unit in one.units))


def expired(now: float, bundle: Bundle, leaves_at: float) -> bool:
    """True if the bundle is loaded and idle, may be unloaded, and has exceeded its time to live, which ended
    at `leaves_at`."""
    return now >= leaves_at and bundle.loaded and not bundle.busy and not bundle.kept
