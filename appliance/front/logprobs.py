"""Log probabilities in OpenAI's two formats: chat's `content` list, completions' parallel lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from appliance.front.job import Job, Prompt
from appliance.front.sample import LogprobEntry
from appliance.text.tokenizer import Tokenizer
from engine.messages import TokenLogprob

_LEAST = -9999.0
"""What OpenAI shows for a token that is impossible: JSON has no infinity."""


def _finite(value: float) -> float:
    return value if value > _LEAST else _LEAST  # NaN compares false


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[LogprobEntry], alternatives: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.logprob.token_id, entry.logprob.logprob),
                "top_logprobs": [
                    _chat_token(tokenizer, token_id, value)
                    for token_id, value in entry.logprob.top[:alternatives]
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, value: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(value),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, filled token by token."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, logprob: TokenLogprob | None, offset: int) -> None:
        """A token; `logprob` is None for the first of a prompt."""
        text = self._tokenizer.token_text(token_id)
        self._tokens.append(text)
        self._offsets.append(offset)
        if logprob is None:
            self._values.append(None)
            self._top.append(None)
            return
        self._values.append(_finite(logprob.logprob))
        top: dict[str, float] = {}
        for other, value in logprob.top[: self._alternatives]:
            # Different tokens can have the same text: the likelier one stands.
            top.setdefault(self._tokenizer.token_text(other), _finite(value))
        # OpenAI shows the chosen token too, so there may be one more than asked for.
        top.setdefault(text, _finite(logprob.logprob))
        self._top.append(top)

    def add_prompt(self, prompt: Prompt) -> None:
        """The prompt's tokens, for `echo`."""
        text = self._tokenizer.stream()
        for position, token_id in enumerate(prompt.token_ids):
            known = prompt.logprobs[position] if prompt.logprobs and position < len(prompt.logprobs) else None
            self.add(token_id, known, text.characters_decoded)
            text.push((token_id,))

    def add_entries(self, entries: Sequence[LogprobEntry]) -> None:
        """Generated tokens."""
        for entry in entries:
            self.add(entry.logprob.token_id, entry.logprob, entry.offset)

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._top if self._alternatives else None,
            "text_offset": self._offsets,
        }


def prompt_logprobs(tokenizer: Tokenizer, prompt: Prompt, alternatives: int) -> msgspec.Raw:
    """The field `prompt_logprobs` as vLLM has it: for each token of the prompt but the first an object from
    token ids to log probability, rank and text."""
    # Piece by piece, since encoding a long list at once would stop every thread.
    pieces = [
        msgspec.json.encode(None if known is None else _with_ranks(tokenizer, known, alternatives))
        for known in prompt.logprobs or ()
    ]
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def _with_ranks(tokenizer: Tokenizer, known: TokenLogprob, alternatives: int) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(known.top, 1)}
    shown = dict([*known.top[:alternatives], (known.token_id, known.logprob)])
    return {
        str(token_id): {
            "logprob": _finite(value),
            # Not known of a token that is not among the best.
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, value in shown.items()
    }


def sample_logprobs(
    job: Job, entries: Sequence[LogprobEntry] | None, echoed: Prompt | None = None
) -> dict[str, Any] | None:
    """`choices[].logprobs` for a piece of an answer; `echoed` is the prompt that the piece begins with."""
    if job.logprobs is None or entries is None:
        return None
    tokenizer = job.model.tokenizer
    if job.chat:
        return chat_logprobs(tokenizer, entries, job.logprobs)
    completion = CompletionLogprobs(tokenizer, job.logprobs)
    if echoed is not None:
        completion.add_prompt(echoed)
    completion.add_entries(entries)
    return completion.document()
