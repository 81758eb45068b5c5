"""Log probabilities in OpenAI's two formats: the `content` list of chat completions and the parallel lists of
completions."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from appliance.front.generation_task import GenerationTask, Prompt
from appliance.front.sample import LogprobEntry
from appliance.text.tokenizer import Tokenizer
from engine.messages import TokenLogprob

_MIN_LOGPROB = -9999.0
"""The log probability that OpenAI reports for impossible tokens, since JSON cannot represent infinity."""
_LOGPROBS_AT_ONCE = 2048

_encode = msgspec.json.Encoder().encode


def _finite(value: float) -> float:
    return value if value > _MIN_LOGPROB else _MIN_LOGPROB  # NaN also fails this comparison.


def _chat_content(
    tokenizer: Tokenizer, entries: Sequence[LogprobEntry], alternatives: int
) -> list[dict[str, Any]]:
    """Return `choices[].logprobs.content` of a chat completion."""
    return [
        {
            **_chat_token(tokenizer, entry.logprob.token_id, entry.logprob.logprob),
            "top_logprobs": [
                _chat_token(tokenizer, token_id, value)
                for token_id, value in entry.logprob.top[:alternatives]
            ],
        }
        for entry in entries
    ]


def _chat_token(tokenizer: Tokenizer, token_id: int, value: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(value),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class _Columns:
    """Builds `choices[].logprobs` of a completion: parallel lists with one entry per token."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, logprob: TokenLogprob | None, offset: int) -> None:
        """Add a token's entry to each list. `logprob` is None for the first token of a prompt."""
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
            # Different tokens can have the same text. The most likely one comes first, and only that one is
            # shown.
            top.setdefault(self._tokenizer.token_text(other), _finite(value))
        # OpenAI's list also contains the chosen token, so there may be one more alternative than requested.
        top.setdefault(text, _finite(logprob.logprob))
        self._top.append(top)

    def add_entries(self, entries: Sequence[LogprobEntry]) -> None:
        """Add the entries of generated tokens to the lists."""
        for entry in entries:
            self.add(entry.logprob.token_id, entry.logprob, entry.offset)

    def lists(self) -> list[list[Any]]:
        """Return the parallel lists. If no alternatives were requested, the list of alternatives is empty."""
        return [self._tokens, self._values, self._top if self._alternatives else [], self._offsets]


class PromptLogprobs:
    """Writes a prompt's log probabilities, one part at a time, for answers that begin with the prompt
    (`echo`)."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self._prompt = prompt
        self._text = tokenizer.stream()
        self._position = 0

    @property
    def is_complete(self) -> bool:
        """Whether log probabilities have been written for the whole prompt."""
        return self._position == len(self._prompt.token_ids)

    def move(self, columns: _Columns, count: int) -> None:
        """Add the log probabilities of the prompt's next `count` tokens to `columns`."""
        known = self._prompt.logprobs or []
        for token_id in self._prompt.token_ids[self._position : self._position + count]:
            logprob = known[self._position] if self._position < len(known) else None
            columns.add(token_id, logprob, self._text.characters_decoded)
            self._text.push((token_id,))
            self._position += 1


def tokens_at_once(task: GenerationTask) -> int:
    """Return the number of tokens whose log probabilities are written in one step. The number is small enough
    for a step to take only a few milliseconds."""
    return max(1, _LOGPROBS_AT_ONCE // (1 + (task.logprobs or 0)))


def prompt_logprobs_steps(
    tokenizer: Tokenizer, prompt: Prompt, alternatives: int
) -> Generator[None, None, bytes]:
    """Build `prompt_logprobs` in steps, so that other work can run in between. The format is vLLM's: for
    every prompt token except the first, an object maps token ids to log probability, rank and text.
    """
    known = prompt.logprobs or []
    count = max(1, _LOGPROBS_AT_ONCE // (1 + alternatives))
    slices = []
    for begin in range(0, len(known), count):
        slices.append(
            _encode(
                [
                    None if each is None else _with_ranks(tokenizer, each, alternatives)
                    for each in known[begin : begin + count]
                ]
            )
        )
        yield
    return _joined(slices)


def _with_ranks(tokenizer: Tokenizer, known: TokenLogprob, alternatives: int) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(known.top, 1)}
    shown = dict([*known.top[:alternatives], (known.token_id, known.logprob)])
    return {
        str(token_id): {
            "logprob": _finite(value),
            # The engine reports ranks only for the most likely tokens at each position.
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, value in shown.items()
    }


def logprobs_event(
    task: GenerationTask, entries: Sequence[LogprobEntry] | None, echoed: PromptLogprobs | None
) -> bytes:
    """Return `choices[].logprobs` as JSON for a stream chunk. The JSON contains the next tokens of the echoed
    prompt, if any remain, followed by `entries`."""
    if task.logprobs is None or entries is None:
        return b"null"
    tokenizer = task.model.tokenizer
    if task.chat:
        return _chat_json([_encode(_chat_content(tokenizer, entries, task.logprobs))])
    columns = _Columns(tokenizer, task.logprobs)
    if echoed is not None:
        echoed.move(columns, tokens_at_once(task))
    columns.add_entries(entries)
    return _columns_json(task, [list(map(_encode, columns.lists()))])


def logprobs_steps(
    task: GenerationTask, entries: Sequence[LogprobEntry] | None, echoed: Prompt | None
) -> Generator[None, None, bytes]:
    """Build a complete answer's `choices[].logprobs` as JSON in steps, so that other work can run in
    between."""
    if task.logprobs is None or entries is None:
        return b"null"
    tokenizer, count = task.model.tokenizer, tokens_at_once(task)
    slices = [entries[begin : begin + count] for begin in range(0, len(entries), count)]
    if task.chat:
        contents = []
        for part in slices:
            contents.append(_encode(_chat_content(tokenizer, part, task.logprobs)))
            yield
        return _chat_json(contents)
    encoded: list[list[bytes]] = []
    prompt = None if echoed is None else PromptLogprobs(tokenizer, echoed)
    while prompt is not None and not prompt.is_complete:
        columns = _Columns(tokenizer, task.logprobs)
        prompt.move(columns, count)
        encoded.append(list(map(_encode, columns.lists())))
        yield
    for part in slices:
        columns = _Columns(tokenizer, task.logprobs)
        columns.add_entries(part)
        encoded.append(list(map(_encode, columns.lists())))
        yield
    return _columns_json(task, encoded)


def _chat_json(contents: Sequence[bytes]) -> bytes:
    return b'{"content":%b,"refusal":null}' % _joined(contents)


def _columns_json(task: GenerationTask, encoded: Sequence[Sequence[bytes]]) -> bytes:
    tokens, values, top, offsets = map(_joined, zip(*encoded, strict=True)) if encoded else [b"[]"] * 4
    return b'{"tokens":%b,"token_logprobs":%b,"top_logprobs":%b,"text_offset":%b}' % (
        tokens,
        values,
        top if task.logprobs else b"null",
        offsets,
    )


def _joined(lists: Sequence[bytes]) -> bytes:
    """Concatenate several JSON lists into one."""
    return b"[%b]" % b",".join(each[1:-1] for each in lists if len(each) > 2)
