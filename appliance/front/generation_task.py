"""A validated generation request: its tokenized prompts, the number of samples, and the sampling
parameters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from appliance.front.keeping import Text
from appliance.front.models import LoadedModel
from appliance.front.request_context import RequestContext
from appliance.text.stop import StopSet
from engine.messages import SamplingParams, TokenLogprob


@dataclass(slots=True)
class Prompt:
    """One prompt of a request. The log probabilities and cache data of the prompt arrive with its first
    outputs."""

    index: int
    token_ids: list[int]
    max_tokens: int
    """Maximum number of tokens to generate for each sample."""
    echo_text: str = ""
    """Text at the beginning of the answer if `echo` is set: the prompt."""
    cached_tokens: int | None = None
    logprobs: list[TokenLogprob | None] | None = None
    """Log probabilities of the prompt's tokens, if requested. The first token's entry is None."""


@dataclass(slots=True)
class RequestCopy:
    """The model or version to which a request is copied, and the function that prepares the copy."""

    unit: str
    prepare: Callable[[LoadedModel, RequestContext], Awaitable[GenerationTask]]
    """Prepares the request for that model or version. Raises `ApiError` if it cannot answer the request."""


@dataclass(slots=True)
class GenerationTask:
    """A validated generation request."""

    model: LoadedModel
    chat: bool
    prompts: list[Prompt]
    n: int
    """Number of answers for each prompt."""
    sampling: SamplingParams
    """Sampling parameters for all prompts, except `max_tokens`, which can differ between prompts."""
    best_of: int = 0
    """Number of samples to generate for each prompt; 0 stands for `n`. If the number is greater than `n`, the
    answer contains the best `n` samples."""
    stops: StopSet | None = None
    include_stop: bool = False
    """Whether an answer includes the stop string or stop token that ended it."""
    skip_special_tokens: bool = True
    continues_text: bool = False
    """Whether the answer continues the text of the prompt. In this case, a leading space in the answer is
    kept."""
    logprobs: int | None = None
    """Number of alternatives to show for each token of the answer, or None to show no log probabilities."""
    prompt_logprobs: int | None = None
    """Number of alternatives to show for each prompt token in the field `prompt_logprobs`, or None to omit
    the field."""
    return_token_ids: bool = False
    echo: bool = False
    discard_output: bool = False
    """Whether the answer contains only the prompt, because `max_tokens` is 0."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Whether every chunk of a stream includes token counts."""
    asked_class: str = ""
    keep_alive_s: float | None = None
    """The value for `Admit.keep_alive_s`."""
    may_lower: bool = False
    """The value for `Admit.may_lower`."""
    fall_back: Callable[[], Awaitable[GenerationTask]] | None = None
    """Prepares the request for the fallback model if `model` cannot answer it. Raises `ApiError`."""
    copy: RequestCopy | None = None
    """How to send a copy of the request to another model or version after the request has finished. None
    unless the request was selected for shadow traffic."""
    shadow_of: str = ""
    """The value for `Admit.shadow_of`."""
    asked: list[Text] = field(default_factory=list)
    """The prompts as the client sent them, if the log policy keeps them."""

    @property
    def samples(self) -> int:
        """Number of samples to generate for each prompt."""
        return self.best_of or self.n

    @property
    def prompt_tokens(self) -> int:
        """Total number of prompt tokens."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the answer shows the prompt's log probabilities."""
        return self.echo and self.logprobs is not None

    def sampling_for(self, prompt: Prompt) -> SamplingParams:
        """Return the sampling parameters for `prompt`."""
        return msgspec.structs.replace(self.sampling, max_tokens=prompt.max_tokens)
