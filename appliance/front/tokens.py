"""Builds the /tokenize response in steps, because it may contain half a million tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from appliance.front.models import LoadedModel
from appliance.front.turns import in_turns

_SLICE_TOKENS = 16_384


async def tokenized(model: LoadedModel, tokens: list[int], with_texts: bool) -> Response:
    """Return the /tokenize response: the token ids and, if requested, each token's text."""
    ids = await in_turns(_json_list(tokens, list))
    texts = b"null"
    if with_texts:
        token_text = model.tokenizer.token_text
        texts = await in_turns(_json_list(tokens, lambda part: list(map(token_text, part))))
    body = b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (
        len(tokens),
        model.served.max_model_len,
        ids,
        texts,
    )
    return Response(body, media_type="application/json")


def _json_list(
    tokens: Sequence[int], convert: Callable[[Sequence[int]], list[Any]]
) -> Generator[None, None, bytes]:
    slices = []
    for begin in range(0, len(tokens), _SLICE_TOKENS):
        slices.append(msgspec.json.encode(convert(tokens[begin : begin + _SLICE_TOKENS]))[1:-1])
        yield
    return b"[%b]" % b",".join(slices)
