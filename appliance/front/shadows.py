"""Shadow traffic: copies finished requests to a second model or version, discards the answers to the copies,
and reports how they compare with the originals. A copy begins after the original request has finished, so the
two never compete for resources. Copies have the lowest service class and are dropped if they cannot start
immediately.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from appliance.channel.front_messages import ShadowDone
from appliance.channel.identity import SHADOW_IDENTITY
from appliance.channel.served_models import Route
from appliance.front.errors import ApiError
from appliance.front.request_context import RequestContext

if TYPE_CHECKING:
    from appliance.front.app_state import AppState
    from appliance.front.generation import Generation
    from appliance.front.generation_task import RequestCopy

log = logging.getLogger(__name__)

MAX_COPIES = 8
"""Maximum number of concurrent copies per front. Each copy keeps its request body in memory."""


class NoConnection:
    """Stands in for the client connection of a copied request, which has no client. Never disconnects."""

    disconnected = False
    on_disconnect: Callable[[], None] | None = None

    def release(self) -> None:
        """Do nothing, because there is no connection to release."""

    def cut_off(self) -> None:
        """Do nothing, because there is no connection to close."""


class ShadowTraffic:
    """The shadow traffic of one front: selects requests to copy and runs the copies."""

    def __init__(self, state: AppState) -> None:
        self.running = 0
        self._state = state

    @staticmethod
    def selects(route: Route | None) -> str:
        """Return the model or version that gets a copy of a request, or an empty string if the request is not
        selected for copying."""
        shadow = None if route is None else route.shadow
        return shadow.unit if shadow is not None and random.random() < shadow.share else ""

    def begin(self, original: Generation) -> None:
        """Start a copy of a finished request, unless too many copies are running."""
        copy, original.task.copy = original.task.copy, None
        if copy is None:
            return
        if self.running >= MAX_COPIES:
            self._report(original, copy.unit, "dropped")
            return
        self.running += 1
        self._state.background.run(self._run(original, copy))

    async def _run(self, original: Generation, copy: RequestCopy) -> None:
        try:
            await self._copy(original, copy)
        except ApiError as error:
            # The other model cannot answer the request, for example because its context length is too short.
            outcome = "dropped" if error.status == 503 else "failed"
            self._report(original, copy.unit, outcome)
        except Exception:
            log.exception("request %s could not be copied to %s", original.context.request_id, copy.unit)
            self._report(original, copy.unit, "failed")
        finally:
            self.running -= 1

    async def _copy(self, original: Generation, copy: RequestCopy) -> None:
        state, first = self._state, original.context
        model = state.catalog.loaded(copy.unit)
        if model is None:
            self._report(original, copy.unit, "dropped")
            return
        connection: Any = NoConnection()
        context = RequestContext(
            request_id=f"shadow-{secrets.token_hex(12)}",
            identity=SHADOW_IDENTITY,
            peer=first.peer,
            endpoint=first.endpoint,
            connection=connection,
            body=first.body,
            model=first.model,
        )
        context.prepared = state.catalog.prepare(model)
        try:
            task = await copy.prepare(model, context)
            task.shadow_of = first.identity.tenant
            generation = original.another(context, task)
            generation.start()
        finally:
            context.prepared()
        await generation.ended.wait()
        failure = generation.failure
        generation.settle(200 if failure is None else failure.status)
        if failure is not None:
            self._report(original, copy.unit, "dropped" if failure.code == "shadow_dropped" else "failed")
            return
        measures = original.measure(), generation.measure()
        if None in measures:
            self._report(original, copy.unit, "failed")
            return
        state.to_core(
            ShadowDone(
                name=first.model,
                unit=copy.unit,
                outcome="compared",
                original=measures[0],
                copy=measures[1],
                equal_tokens=_equal_tokens(original, generation),
            )
        )

    def _report(self, original: Generation, unit: str, outcome: Any) -> None:
        self._state.to_core(ShadowDone(name=original.context.model, unit=unit, outcome=outcome))


def _equal_tokens(original: Generation, copy: Generation) -> int | None:
    """Return the number of tokens before the two answers first differ, summed over all samples. Return None
    if sampling is not greedy, or if the prompts' tokens differ because of a different tokenizer or chat
    template."""
    prompts = [[prompt.token_ids for prompt in one.task.prompts] for one in (original, copy)]
    greedy = original.task.sampling.temperature == 0 and copy.task.sampling.temperature == 0
    if not greedy or prompts[0] != prompts[1]:
        return None
    return sum(
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*tokens, strict=False))))
        for one, other in zip(original.samples, copy.samples, strict=True)
        for tokens in [(one.token_ids[: one.delivered], other.token_ids[: other.delivered])]
    )
