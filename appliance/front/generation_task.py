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
    """One prompt of a request. `cached_tokens` and `logprobs` are set when its first output arrives."""

    index: int
    token_ids: list[int]
    max_tokens: int
    """Maximum number of tokens to generate per sample."""
    echo_text: str = ""
    """The prompt's text. If `echo` is set, the answer begins with this text."""
    cached_tokens: int | None = None
    logprobs: list[TokenLogprob | None] | None = None
    """Log probabilities of the prompt tokens, if requested. The first entry is None."""


@dataclass(slots=True)
class RequestCopy:
    """The model or version to which a request is copied, and a function that prepares the copy."""

    unit: str
    prepare: Callable[[LoadedModel, RequestContext], Awaitable[GenerationTask]]
    """Prepares the copy. Raises `ApiError` if the model or version cannot answer the request."""


@dataclass(slots=True)
class GenerationTask:
    """A validated generation request."""

    model: LoadedModel
    chat: bool
    prompts: list[Prompt]
    n: int
    """Number of answers per prompt."""
    sampling: SamplingParams
    """Sampling parameters for all prompts, except `max_tokens`, which can differ between prompts."""
    best_of: int = 0
    """Number of samples to generate per prompt, or 0 for `n`. If greater than `n`, the answer contains the
    best `n` samples."""
    stops: StopSet | None = None
    include_stop: bool = False
    """Whether to include the stop string or stop token that ended an answer."""
    skip_special_tokens: bool = True
    continues_text: bool = False
    """Whether the answer continues the prompt's text. If so, the answer's leading space is kept."""
    logprobs: int | None = None
    """Number of alternatives to show per answer token, or None to show no log probabilities."""
    prompt_logprobs: int | None = None
    """Number of alternatives to show per prompt token in `prompt_logprobs`, or None to omit that field."""
    return_token_ids: bool = False
    echo: bool = False
    discard_output: bool = False
    """Whether the answer contains only the prompt (`max_tokens` is 0)."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Whether to include token counts in every chunk of a stream."""
    asked_class: str = ""
    keep_alive_s: float | None = None
    """How long the model stays loaded after the request, in seconds (`Admit.keep_alive_s`)."""
    may_lower: bool = False
    """Whether the core may lower the token limit of the answer (`Admit.may_lower`)."""
    fall_back: Callable[[], Awaitable[GenerationTask]] | None = None
    """Prepares the request for the fallback model if `model` cannot answer it. Raises `ApiError` if the
    fallback model cannot answer it either."""
    copy: RequestCopy | None = None
    """How to copy the finished request to a second model or version, or None if the request was not selected
    for shadow traffic."""
    shadow_of: str = ""
    """If this request is a copy, the original request's tenant (`Admit.shadow_of`)."""
    asked: list[Text] = field(default_factory=list)
    """The prompts as sent by the client, if the log policy keeps them."""

    @property
    def samples(self) -> int:
        """Number of samples to generate per prompt."""
        return self.best_of or self.n

    @property
    def needs_body(self) -> bool:
        """Whether the request's body must stay in memory, because its texts are kept or the request may be
        prepared again."""
        return bool(self.asked) or self.fall_back is not None or self.copy is not None

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
