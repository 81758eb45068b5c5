"""Runs the text work of requests: long work off the event loop, shared fairly between tenants."""

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
"""Up to here encoding in place (0.3 µs a character) costs less than the way to a thread and back (0.1 ms)."""
_RETRY_AFTER_S = 2.0


def text_bytes(texts: Iterable[str]) -> int:
    """Return the bytes of memory that the texts take: 1 to 4 for each character."""
    return sum(map(sys.getsizeof, texts))


@contextmanager
def text_memory(state: AppState, context: RequestContext, size: int) -> Iterator[None]:
    """Count `size` bytes of text as under work for the caller's tenant. Raises a 503 if it has too many."""
    try:
        with state.text_memory.reserved(context.identity.tenant, size):
            yield
    except TooMuchWorkError as error:
        raise too_much_work(error) from None


async def do_work(
    state: AppState,
    context: RequestContext,
    steps: Generator[None, None, Result],
    characters: int,
    inline: int = _INLINE_CHARACTERS,
) -> Result:
    """What the work on so many characters returns or raises; a 503 where it takes too long."""
    try:
        if characters <= inline:
            return run_steps(steps)
        return await state.work.run(context.identity.tenant, steps, is_long=characters > PIECE_CHARACTERS)
    except TooMuchWorkError as error:
        raise too_much_work(error) from None
    except (TooManyTokensError, UncuttableTextError) as error:
        context.work_tokens = max(context.work_tokens, error.encoded_tokens)
        raise


def too_much_work(error: TooMuchWorkError) -> ApiError:
    """The 503 for a tenant that has too much under work."""
    return ApiError(503, str(error), code="too_many_prompts", retry_after_s=_RETRY_AFTER_S)
