"""Runs text processing for requests and divides the processing time fairly between tenants. Short texts are
processed on the event loop, and long texts in threads."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from appliance.front.app_state import AppState
from appliance.front.errors import ApiError
from appliance.front.request_context import RequestContext
from appliance.text.cuts import PIECE_CHARACTERS
from appliance.text.encoder import TooManyTokensError, UncuttableTextError
from appliance.text.fair_queue import TooMuchWorkError, run_steps

Result = TypeVar("Result")

_INLINE_CHARACTERS = 512
"""Maximum length, in characters, of texts encoded on the event loop. Encoding takes 0.3 µs per character, so
for short texts it is cheaper than handing them to a thread (0.1 ms)."""
_RETRY_AFTER_S = 2.0


def text_bytes(texts: Iterable[str]) -> int:
    """Return the texts' size in memory: 1 to 4 bytes per character."""
    return sum(map(sys.getsizeof, texts))


@contextmanager
def text_memory(state: AppState, context: RequestContext, size: int) -> Iterator[None]:
    """Count `size` bytes of text against the tenant's memory limit while the `with` block runs. Raises a 503
    if the limit would be exceeded."""
    try:
        with state.text_memory.reserved(context.identity.tenant, size):
            yield
    except TooMuchWorkError as error:
        raise too_much_work(state, error) from None


async def do_work(
    state: AppState,
    context: RequestContext,
    steps: Generator[None, None, Result],
    characters: int,
    inline: int = _INLINE_CHARACTERS,
) -> Result:
    """Run `steps`, a computation that yields between steps, and return its result. `characters` is the length
    of the text that it processes. Raises a 503 if the computation exceeds the time limit."""
    try:
        if characters <= inline:
            return run_steps(steps)
        return await state.work.run(context.identity.tenant, steps, is_long=characters > PIECE_CHARACTERS)
    except TooMuchWorkError as error:
        raise too_much_work(state, error) from None
    except (TooManyTokensError, UncuttableTextError) as error:
        context.work_tokens = max(context.work_tokens, error.encoded_tokens)
        raise


def too_much_work(state: AppState, error: TooMuchWorkError) -> ApiError:
    """Count a refused request and return its 503 error, which says that the tenant already has too much text
    being processed."""
    state.refused_prompts += 1
    return ApiError(503, str(error), code="too_many_prompts", retry_after_s=_RETRY_AFTER_S)
