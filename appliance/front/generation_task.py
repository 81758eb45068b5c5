"""What a request asks the engine for: prompts as tokens, samples, how to choose tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from appliance.front.keeping import Text
from appliance.front.models import LoadedModel
from appliance.text.stop import StopSet
from engine.messages import SamplingParams, TokenLogprob


@dataclass(slots=True)
class Prompt:
    """One prompt of a request, and what its first outputs told about it."""

    index: int
    token_ids: list[int]
    max_tokens: int
    """The most to generate after it, a sample."""
    echo_text: str = ""
    """What the answer begins with, when it is to."""
    cached_tokens: int | None = None
    logprobs: list[TokenLogprob | None] | None = None
    """Of its tokens, the first None; when asked for."""


@dataclass(slots=True)
class GenerationTask:
    """A validated request."""

    model: LoadedModel
    chat: bool
    prompts: list[Prompt]
    n: int
    """Answers for each prompt."""
    sampling: SamplingParams
    """For every prompt but for `max_tokens`."""
    best_of: int = 0
    """Samples of each prompt, of which the best `n` are answered; 0: `n`."""
    stops: StopSet | None = None
    include_stop: bool = False
    """The stop string or stop token that ended an answer is part of it."""
    skip_special_tokens: bool = True
    continues_text: bool = False
    """The answer goes on with the prompt's text: it does not begin a text of its own."""
    logprobs: int | None = None
    """How many alternatives the answer shows for each token; None: no log probabilities."""
    prompt_logprobs: int | None = None
    """The same of the prompts' tokens, where the answer has a field for them."""
    return_token_ids: bool = False
    echo: bool = False
    discard_output: bool = False
    """Only the prompt is wanted (`max_tokens` 0)."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """In every chunk of a stream."""
    asked_class: str = ""
    may_lower: bool = False
    """As `Admit.may_lower`."""
    asked: list[Text] = field(default_factory=list)
    """The prompts as they came, where they are to be kept."""

    @property
    def samples(self) -> int:
        """Samples of each prompt."""
        return self.best_of or self.n

    @property
    def prompt_tokens(self) -> int:
        """Over all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def echoes_logprobs(self) -> bool:
        """The answer shows the prompt's log probabilities."""
        return self.echo and self.logprobs is not None

    def sampling_for(self, prompt: Prompt) -> SamplingParams:
        """How tokens after `prompt` are chosen."""
        return msgspec.structs.replace(self.sampling, max_tokens=prompt.max_tokens)
