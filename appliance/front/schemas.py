"""Declares what clients send, as pydantic models: validation, the OpenAPI document and the tables of
docs/api.md come from these declarations.

Fields that are not named here are tolerated and have no effect: OpenAI's clients send `metadata`, `store` and
the like. Fields that would change the answer and are not implemented are refused by name
(`appliance.front.refused_fields`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from appliance.front.fields import (
    FAIL_FAST,
    INTEGRAL,
    AllowedTokenIds,
    BadWords,
    Content,
    LogitBias,
    PositiveOrMinusOne,
    Prompts,
    ResponseFormat,
    Stops,
    TokenIds,
    ToolChoice,
    User,
)
from appliance.front.refused_fields import (
    REFUSED,
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGES,
    refusing,
)

MOST_MESSAGES = 4096
MOST_SAMPLES = 128
MOST_ALTERNATIVES = 20
MOST_STOP_TOKENS = 64
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that names none, as in OpenAI's API."""


class _Request(BaseModel):
    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        # By default the parser keeps 16,384 short strings of former bodies: memory that grows, and texts of
        # clients that stay.
        cache_strings="none",
    )


if TYPE_CHECKING:

    class _RefusesFields(_Request): ...

    class _RefusesInChats(_Request): ...

    class _RefusesInCompletions(_Request): ...

    class _RefusesInMessages(_Request): ...

else:
    _RefusesFields = refusing("RefusesFields", _Request, REFUSED)
    _RefusesInChats = refusing("RefusesInChats", _Request, REFUSED_IN_CHATS)
    _RefusesInCompletions = refusing("RefusesInCompletions", _Request, REFUSED_IN_COMPLETIONS)
    _RefusesInMessages = refusing("RefusesInMessages", _Request, REFUSED_IN_MESSAGES)


class StreamOptions(_Request):
    """What a stream tells besides the answer."""

    include_usage: bool | None = Field(None, description="A last chunk with token counts.")
    continuous_usage_stats: bool | None = Field(
        None, description="With `include_usage`: every chunk has the token counts so far."
    )


class GenerationRequest(_RefusesFields):
    """What chats and completions share."""

    model: str = Field(min_length=1, description="Name of a served model: see /v1/models.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, ge=0, le=1, description="Default 1.")
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), INTEGRAL] | None = Field(
        None, description="0 and -1 are off, the default."
    )
    min_p: float | None = Field(None, ge=0, le=1, description="Default 0.")
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES), INTEGRAL] | None = Field(
        None, description="Answers for each prompt; default 1."
    )
    stream: bool | None = Field(None, description="The answer comes as server-sent events; default false.")
    stream_options: StreamOptions | None = Field(None, description="Only used with `stream`.")
    stop: Stops = Field((), description="Strings that end an answer; they are no part of it.")
    include_stop_str_in_output: bool | None = Field(
        None, description="The stop string, or stop token, that ended an answer is its end; default false."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Default 0.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Default 0.")
    repetition_penalty: float | None = Field(None, gt=0, le=100, description="1 is off, the default.")
    logit_bias: LogitBias = Field({}, description="Added to the logits of these token ids.")
    allowed_token_ids: AllowedTokenIds = Field(
        None,
        description="Only these tokens can be generated. Where the model's end token is not among them, the "
        "answer ends at its length.",
    )
    bad_words: BadWords = Field(
        (),
        description="Texts that are not generated: a word's last token cannot follow its first ones. That is "
        "for the tokens that the tokenizer makes of the word, with and without a space before it; other "
        "tokens with the same text remain possible.",
    )
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1), INTEGRAL] | None = Field(
        None, description="The same seed gives the same answers; default: a random one."
    )
    user: User | None = Field(None, description="The client's name for its end user; for the request log.")
    ignore_eos: bool | None = Field(None, description="Go on after the model's end tokens; default false.")
    min_tokens: Annotated[int, Field(ge=0), INTEGRAL] | None = Field(
        None, description="No end token before this many tokens; default 0."
    )
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0), INTEGRAL]], FAIL_FAST] | None = Field(
        None, max_length=MOST_STOP_TOKENS, description="Further tokens that end an answer."
    )
    skip_special_tokens: bool | None = Field(
        None, description="The text leaves out special tokens, the default."
    )
    truncate_prompt_tokens: PositiveOrMinusOne | None = Field(
        None,
        description="Keeps only so many tokens of each prompt, the last ones; -1: as many as leave room for "
        "`max_tokens`. A beginning-of-text token that the tokenizer puts before a text stays.",
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), INTEGRAL] | None = Field(
        None,
        description="The answer has the log probability of each prompt token, and of so many alternatives. "
        "Not with `stream`.",
    )
    return_token_ids: bool | None = Field(
        None, description="The answer has the token ids of prompt and text; default false."
    )
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = Field(
        None, description="Asks for a class of service, as the header `x-appliance-class` does."
    )


class ChatMessage(_RefusesInMessages):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="`developer` is a system message."
    )
    content: Content = Field(None, validate_default=True)
    name: str | None = Field(None, description="Of who speaks, for templates that use it.")


class ChatRequest(GenerationRequest, _RefusesInChats):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FAIL_FAST] = Field(
        min_length=1, max_length=MOST_MESSAGES, description="The conversation."
    )
    max_tokens: PositiveOrMinusOne | None = Field(
        None, description="Most tokens of an answer. -1 is no limit; default: what the model's length leaves."
    )
    max_completion_tokens: PositiveOrMinusOne | None = Field(None, description="Wins over `max_tokens`.")
    logprobs: bool | None = Field(
        None, description="Log probabilities of the answer's tokens; default false."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), INTEGRAL] | None = Field(
        None, description="Alternatives for each token. Needs `logprobs`."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="The prompt ends with the beginning of an assistant's message; default true, unless "
        "`continue_final_message` is.",
    )
    continue_final_message: bool | None = Field(
        None,
        description="The prompt ends inside the last message, which the answer continues; default false. Not "
        "with `add_generation_prompt`.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=32, description="Further variables of the model's chat template."
    )
    response_format: ResponseFormat = None
    tool_choice: ToolChoice = None
    function_call: ToolChoice = None
    modalities: Annotated[list[Literal["text"]], FAIL_FAST] | None = Field(None, description="Only text.")


class CompletionRequest(GenerationRequest, _RefusesInCompletions):
    """Body of /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=-1), INTEGRAL] | None = Field(
        None,
        description="Most tokens of an answer. -1 is no limit, 0 is possible with `echo` only; default: "
        f"{DEFAULT_COMPLETION_TOKENS}, or the tenant's own default.",
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), INTEGRAL] | None = Field(
        None, description="Log probabilities of the answer's tokens, and of so many alternatives."
    )
    echo: bool | None = Field(None, description="The answer begins with the prompt; default false.")
    best_of: Annotated[int, Field(ge=1, le=MOST_SAMPLES), INTEGRAL] | None = Field(
        None,
        description="Generates so many answers for each prompt and returns the `n` with the highest "
        "cumulative log probability; all of them count as output. Not with `stream`; default `n`.",
    )
    response_format: ResponseFormat = None


class DeploymentChatRequest(ChatRequest):
    """Body of Azure's route for chats, whose path names the model."""

    model: str = Field("", description="Not used: the path names the model.")


class DeploymentCompletionRequest(CompletionRequest):
    """Body of Azure's route for completions, whose path names the model."""

    model: str = Field("", description="Not used: the path names the model.")


class TokenizeRequest(_Request):
    """Body of /tokenize: either `prompt` or `messages`."""

    model: str = Field(min_length=1)
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FAIL_FAST] | None = Field(
        None, min_length=1, max_length=MOST_MESSAGES
    )
    add_special_tokens: bool | None = Field(
        None, description="Default: true for a prompt, false for messages."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Default true, unless `continue_final_message` is."
    )
    continue_final_message: bool | None = Field(None, description="Default false.")
    return_token_strs: bool | None = None


class DetokenizeRequest(_Request):
    """Body of /detokenize."""

    model: str = Field(min_length=1)
    tokens: TokenIds
