"""The answer of /tokenize, built in slices: it may have half a million tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from appliance.front.models import LoadedModel

_SLICE = 16_384


async def tokenized(model: LoadedModel, tokens: list[int], with_texts: bool) -> Response:
    """The tokens, and each one's text if that was asked for."""
    ids = await _json_list(tokens, list)
    token_text = model.tokenizer.token_text
    texts = await _json_list(tokens, lambda part: list(map(token_text, part))) if with_texts else b"null"
    body = b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (
        len(tokens),
        model.served.max_model_len,
        ids,
        texts,
    )
    return Response(body, media_type="application/json")


async def _json_list(tokens: Sequence[int], convert: Callable[[Sequence[int]], list[Any]]) -> bytes:
    """A JSON list, to which other work on the event loop is let in between."""
    slices = []
    for begin in range(0, len(tokens), _SLICE):
        if begin:
            await asyncio.sleep(0)
        slices.append(msgspec.json.encode(convert(tokens[begin : begin + _SLICE]))[1:-1])
    return b"[%b]" % b",".join(slices)
