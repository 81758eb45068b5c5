"""Validates submissions before they are queued."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from engine.levels import CLASSES, TIERS, URGENCIES, kept_free
from engine.messages import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    TOKEN_BYTES,
    SamplingParams,
    Submit,
    view_tokens,
)
from engine.scheduling.sequence import blocks_for, length_limit

MAX_SAMPLES = 1024
"""Maximum value of `Submit.n`."""
_MAX_COUNT = 1 << 31
"""Maximum value of counts such as top_k. With this bound, the sum of two counts cannot overflow the 64-bit
numbers in messages and device tables."""
_MAX_FACTOR = 1e30
"""Maximum absolute value of a penalty or logit bias. With this bound, its product with a logit is finite in
float32."""


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Limits that apply to every sequence of a replica."""

    max_model_len: int
    vocab_size: int
    blocks: int
    slots: int


def refusal(submit: Submit, limits: SequenceLimits) -> str | None:
    """Return why a submission cannot be computed, as a message that names the field, its value and the limit.
    Returns None if the submission is valid."""
    sampling = submit.sampling
    prompt = submit.prompt_tokens
    if not 1 <= submit.n <= MAX_SAMPLES:
        return f"n is {submit.n}; it must be from 1 to {MAX_SAMPLES}"
    if not 0 <= submit.first_sample <= _MAX_COUNT:
        return f"first_sample is {submit.first_sample}; it must be from 0 to {_MAX_COUNT}"
    if not 0 <= submit.priority < CLASSES:
        return f"priority is {submit.priority}; it must be from 0 to {CLASSES - 1}"
    if not 0 <= submit.urgency < URGENCIES:
        return f"urgency is {submit.urgency}; it must be from 0 to {URGENCIES - 1}"
    # A sequence of any level must be able to start when nothing else is running.
    if (
        submit.reserved_slots < 0
        or max(kept_free(tier, submit.reserved_slots) for tier in TIERS) >= limits.slots
    ):
        return f"reserved_slots is {submit.reserved_slots}; it must be from 0 to {max(0, limits.slots - 2)}"
    if submit.output_token_ids and submit.n != 1:
        return f"n is {submit.n}; it must be 1 when output_token_ids are given"
    if len(submit.prompt) % TOKEN_BYTES:
        return f"prompt has {len(submit.prompt)} bytes; its size must be a multiple of {TOKEN_BYTES} bytes"
    if not prompt:
        return "prompt is empty; at least one token is needed"
    if sampling.max_tokens < 0:
        return f"max_tokens is {sampling.max_tokens}; it must not be negative"
    longest_prompt = limits.max_model_len - (1 if sampling.max_tokens else 0)
    if prompt > longest_prompt:
        return (
            f"the prompt has {prompt} tokens, but with max_tokens = {sampling.max_tokens}, "
            f"the model's maximum length of {limits.max_model_len} allows at most {longest_prompt}"
        )
    # Use numpy for the comparison, because a prompt may have 131,072 tokens and numpy is 100 times as fast as
    # Python. The ids are read as unsigned integers, so negative ids exceed the vocabulary size.
    prompt_is_valid = int(np.frombuffer(submit.prompt, np.uint32).max()) < limits.vocab_size
    token_fields: dict[str, Collection[int]] = {
        "prompt": () if prompt_is_valid else view_tokens(submit.prompt),
        "output_token_ids": submit.output_token_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": sampling.logit_bias or (),
        "bad_words": [token for word in sampling.bad_words for token in word],
    }
    for name, ids in token_fields.items():
        if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < limits.vocab_size)
            return f"{name} contains {wrong}; the vocabulary has ids 0 to {limits.vocab_size - 1}"
    needed = blocks_for(max(length_limit(submit, limits.max_model_len) - 1, prompt))
    if needed > limits.blocks:
        return (
            f"a sequence of {prompt} prompt tokens and up to {sampling.max_tokens} generated tokens needs "
            f"{needed} KV blocks, but the pool has {limits.blocks}: "
            "shorten the prompt, lower max_tokens, or raise kv_blocks"
        )
    return _sampling_refusal(sampling, limits.vocab_size)


def _sampling_refusal(sampling: SamplingParams, vocab_size: int) -> str | None:
    for name, value, low, high in (
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -_MAX_FACTOR, _MAX_FACTOR),
        ("frequency_penalty", sampling.frequency_penalty, -_MAX_FACTOR, _MAX_FACTOR),
        ("repetition_penalty", sampling.repetition_penalty, 1 / _MAX_FACTOR, _MAX_FACTOR),
    ):
        if not (math.isfinite(value) and low <= value <= high):
            return f"{name} is {value}; it must be a finite number from {low:g} to {high:g}"
    if sampling.top_p == 0.0:
        return "top_p is 0.0; it must be above 0"
    for token, bias in (sampling.logit_bias or {}).items():
        if not (bias == -math.inf or abs(bias) <= _MAX_FACTOR):
            bound = f"{-_MAX_FACTOR:g} to {_MAX_FACTOR:g}"
            return f"logit_bias of token {token} is {bias}; it must be -inf or in the range {bound}"
    if sampling.allowed_tokens and not _allows_any(sampling.allowed_tokens, vocab_size):
        return f"allowed_tokens allows no token of the vocabulary, which has ids 0 to {vocab_size - 1}"
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        return f"bad_words has {len(sampling.bad_words)} entries; it must have at most {MAX_BAD_WORDS}"
    for word in sampling.bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            return f"bad_words has an entry of {len(word)} tokens; it must have 1 to {MAX_BAD_WORD_TOKENS}"
    logprobs = (("logprobs", sampling.logprobs or 0), ("prompt_logprobs", sampling.prompt_logprobs or 0))
    for name, count in (("top_k", sampling.top_k), ("min_tokens", sampling.min_tokens), *logprobs):
        if not 0 <= count <= _MAX_COUNT:
            return f"{name} is {count}; it must be from 0 to {_MAX_COUNT}"
    for name, count in logprobs:
        if count > vocab_size:
            return f"{name} is {count}, but the vocabulary has {vocab_size} tokens"
    return None


def _allows_any(allowed_tokens: bytes, vocab_size: int) -> bool:
    """Return whether the bitmap allows any token id below `vocab_size`."""
    whole, rest = divmod(vocab_size, 8)
    if any(allowed_tokens[:whole]):
        return True
    return bool(rest and len(allowed_tokens) > whole and allowed_tokens[whole] & ((1 << rest) - 1))
