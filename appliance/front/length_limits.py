"""Token limits for prompts and answers: the model's context length, the tenant's context length, and the
request's own limits."""

from __future__ import annotations

from typing import NamedTuple

from appliance.channel.identity import Identity
from appliance.front.errors import ApiError, invalid
from appliance.front.models import LoadedModel
from appliance.front.schemas import GenerationRequest

MAX_TOKENS_SHOWN = 524_288
"""Maximum number of tokens in a /tokenize response."""
_NO_LIMIT = 1 << 20
"""Maximum number of tokens to generate if the model's context length is unknown. The engine still ends the
answer at the actual context length."""


class LengthLimit(NamedTuple):
    """The context length limit of a request: the maximum number of prompt and output tokens combined."""

    owner: str
    """The limit's owner in the possessive, for error messages: "this model's" or, for a tenant's limit, the
    tenant's name with "'s"."""
    tokens: int
    """The maximum number of tokens, or 0 if unknown. If the limit is unknown because the model cannot be
    loaded, the core refuses the request and states the cause. Otherwise, the engine enforces the limit when
    the request runs."""
    answer_tokens: int = 1
    """Minimum number of tokens that must be left for the answer."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """Maximum number of prompt tokens, or None if unknown."""
        return self.tokens - self.answer_tokens if self.tokens else None

    def exceeded(self, param: str, tokens: int | None) -> ApiError:
        """Return the 400 error for a prompt that is too long. `tokens` is its length, or None if unknown."""
        count = f"more than {self.max_prompt_tokens}" if tokens is None else str(tokens)
        return ApiError(
            400,
            f"{self.owner} maximum context length is {self.tokens} tokens for prompt and answer "
            f"together, but {param} has {count} tokens; shorten {param}",
            param=param,
            code="context_length_exceeded",
        )


class AnswerLimit(NamedTuple):
    """The maximum number of tokens in an answer."""

    requested: int | None
    """The request's own limit, or None if the request sets none."""
    default: int | None
    """The default limit for requests that set none. If None, only the context length limits the answer."""
    field: str
    """Name of the request field, for error messages."""


def length_limit(identity: Identity, model: LoadedModel, answer_tokens: int = 1) -> LengthLimit:
    """Return the model's context length or the tenant's limit, whichever is lower."""
    longest, allowed = model.served.max_model_len, identity.context_tokens
    if allowed is not None and (not longest or allowed < longest):
        return LengthLimit(f"tenant {identity.tenant!r}'s", allowed, answer_tokens)
    return LengthLimit("this model's", longest, answer_tokens)


def answer_limit(identity: Identity, requested: int | None, default: int | None, field: str) -> AnswerLimit:
    """Return the token limit of an answer. If the request sets -1, only the context length limits the
    answer."""
    if requested == -1:
        return AnswerLimit(None, None, field)
    return AnswerLimit(requested, identity.default_max_tokens or default, field)


def too_many_to_show(param: str) -> ApiError:
    """Return the 400 error for a text with more tokens than /tokenize can return."""
    return invalid(
        param, f"has more than {MAX_TOKENS_SHOWN} tokens; split the text and send several requests"
    )


def truncated(
    body: GenerationRequest,
    limit: LengthLimit,
    token_ids: list[int],
    answer: AnswerLimit,
    keeps_first: bool = False,
) -> list[int]:
    """Apply `truncate_prompt_tokens`: return only the last tokens of the prompt. If `keeps_first` is true,
    the prompt's first token is kept as well."""
    count: int | None = body.truncate_prompt_tokens
    if count == -1:
        reserved = 1 if answer.requested is None else answer.requested
        count = max(1, limit.tokens - reserved) if limit.tokens else None
    if count is None or len(token_ids) <= count:
        return token_ids
    if keeps_first:
        return [token_ids[0], *token_ids[len(token_ids) - count + 1 :]]
    return token_ids[len(token_ids) - count :]


def max_answer_tokens(limit: LengthLimit, token_ids: list[int], answer: AnswerLimit, param: str) -> int:
    """Return the maximum number of tokens to generate after a prompt. `param` is the name of the request
    field that contains the prompt. Raises a 400 if the prompt is empty or leaves too few tokens for the
    answer."""
    if not token_ids:
        raise invalid(param, "is empty; send at least one token")
    requested, default = answer.requested, answer.default
    if not limit.tokens:
        most = default or _NO_LIMIT if requested is None else max(requested, limit.answer_tokens)
        return min(most, _NO_LIMIT)
    left = limit.tokens - len(token_ids)
    if left < limit.answer_tokens:
        raise limit.exceeded(param, len(token_ids))
    if requested is not None and requested > left:
        raise ApiError(
            400,
            f"{limit.owner} maximum context length is {limit.tokens} tokens; {param} has {len(token_ids)} "
            f"tokens, which leaves {left} for the answer, but {answer.field} is {requested}",
            param=answer.field,
            code="context_length_exceeded",
        )
    return min(left, default or left) if requested is None else max(requested, limit.answer_tokens)
