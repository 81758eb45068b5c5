"""Builds sampling parameters from a request's body."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from itertools import repeat

from appliance.front.app_state import AppState
from appliance.front.encoding import do_work
from appliance.front.errors import invalid
from appliance.front.models import LoadedModel
from appliance.front.request_context import RequestContext
from appliance.front.schemas import GenerationRequest
from appliance.text.encoder import LoneSurrogateError
from engine.messages import MAX_BAD_WORD_TOKENS, SamplingParams

_MAX_INLINE_IDS = 32_768
"""Maximum number of ids in a bitmap that is built on the event loop. Building it takes 2 ms. Longer lists
are converted in a thread."""


async def sampling_params(
    state: AppState,
    context: RequestContext,
    body: GenerationRequest,
    model: LoadedModel,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return the sampling parameters for answers of at most `max_tokens` tokens.

    `logprobs` and `prompt_logprobs` are the numbers of alternatives to request from the engine; the answer
    may show fewer. Raises `ApiError` if a parameter is invalid.
    """
    defaults = model.served.sampling
    temperature = _first(body.temperature, defaults.temperature, 1.0)
    top_p = _first(body.top_p, defaults.top_p, 1.0)
    if top_p == 0.0:
        # With these settings, only the most likely token can be chosen.
        temperature, top_p = 0.0, 1.0
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(
            "min_tokens",
            f"is {min_tokens}, but at most {max_tokens} tokens may be generated; lower min_tokens",
        )
    check_token_ids(model, list(body.logit_bias or ()), "logit_bias")
    stop_ids = check_token_ids(model, body.stop_token_ids or [], "stop_token_ids")
    if not body.ignore_eos:
        known = [token_id for token_id in model.tokenizer.eos_ids if token_id < model.vocab_size]
        stop_ids = list(dict.fromkeys([*known, *stop_ids]))
    bad_words = await bad_word_tokens(state, context, model, body.bad_words or ())
    if body.allowed_token_ids is not None:
        check_token_ids(model, body.allowed_token_ids, "allowed_token_ids")
        banned = {word[0] for word in bad_words if len(word) == 1} | set(stop_ids if min_tokens else ())
        if banned.issuperset(body.allowed_token_ids):
            raise invalid(
                "allowed_token_ids",
                "contains no token with which the answer can begin, because bad_words and min_tokens "
                "exclude all of them; allow more tokens",
            )
    allowed: list[int] = body.allowed_token_ids or []
    inline = len(allowed) <= _MAX_INLINE_IDS
    allowed_tokens = bit_map(allowed) if inline else await asyncio.to_thread(bit_map, allowed)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=int(max(0, _first(body.top_k, defaults.top_k, 0))),
        top_p=top_p,
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        presence_penalty=_first(body.presence_penalty, defaults.presence_penalty, 0.0),
        frequency_penalty=_first(body.frequency_penalty, defaults.frequency_penalty, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=body.logit_bias or None,
        allowed_tokens=allowed_tokens,
        bad_words=bad_words,
        # Choose a random seed here if the request has none, so that another replica can continue the text
        # after a resubmission.
        seed=secrets.randbits(63) if body.seed is None else body.seed & ((1 << 63) - 1),
        min_tokens=min_tokens,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=not stop_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _first(requested: float | None, default: float | None, otherwise: float) -> float:
    """Return a sampling parameter: the requested value if set, else the model's default, else `otherwise`."""
    if requested is not None:
        return requested
    return otherwise if default is None else default


def check_token_ids(model: LoadedModel, token_ids: list[int], param: str) -> list[int]:
    """Return the token ids. Raises a 400 if an id is not in the model's vocabulary."""
    most = model.vocab_size - 1
    if token_ids and (min(token_ids) < 0 or max(token_ids) > most):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id <= most)
        shown = str(wrong) if abs(wrong) < 1 << 64 else "a very large number"
        raise invalid(param, f"token id {shown} is not valid; the model's token ids are 0 to {most}")
    return token_ids


def bit_map(token_ids: list[int]) -> bytes:
    """Return a bitmap of the (non-negative) token ids, in the format of `SamplingParams.allowed_tokens`."""
    if not token_ids:
        return b""
    # A loop in Python would take 30 ms for the largest vocabularies, but int() with base 2 takes linear time.
    digits = bytearray(b"0") * (max(token_ids) + 1)
    deque(map(digits.__setitem__, token_ids, repeat(ord("1"))), maxlen=0)
    digits.reverse()
    return int(digits, 2).to_bytes(-(-len(digits) // 8), "little")


async def bad_word_tokens(
    state: AppState, context: RequestContext, model: LoadedModel, words: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return two token sequences per word: one for the word at the beginning of a text, and one for the word
    after a space. Raises `ApiError` if a word has too many tokens."""
    if not words:
        return ()
    texts = {variant: index for index, word in enumerate(words) for variant in (word, " " + word.lstrip(" "))}
    try:
        steps = model.tokenizer.encode_steps(list(texts), add_special_tokens=False)
        runs = await do_work(state, context, steps, sum(map(len, texts)))
    except LoneSurrogateError as error:
        raise invalid("bad_words", str(error)) from None
    for index, run in zip(texts.values(), runs, strict=True):
        if len(run) > MAX_BAD_WORD_TOKENS:
            raise invalid(
                "bad_words",
                f"word {index} has {len(run)} tokens including a leading space; words can have at most "
                f"{MAX_BAD_WORD_TOKENS} tokens",
            )
    return tuple(dict.fromkeys(tuple(run) for run in runs if run))
