"""What clients send, as pydantic models. Fields that are not named here are tolerated and mean nothing
(OpenAI's clients send `metadata`, `store` and the like); what would change the answer is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from appliance.front.fields import (
    FAIL_FAST,
    INTEGRAL,
    Content,
    LogitBias,
    Prompts,
    ResponseFormat,
    Stops,
    TokenIds,
    ToolChoice,
    Unsupported,
)

MOST_MESSAGES = 4096
MOST_SAMPLES = 128
MOST_ALTERNATIVES = 20
MOST_STOP_TOKENS = 64


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Request):
    """`include_usage`: a last chunk with token counts."""

    include_usage: bool | None = None


class GenerationRequest(_Request):
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
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only used with `stream`.")
    stop: Stops = Field((), description="Strings that end an answer; they are no part of it.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100, description="1 is off, the default.")
    logit_bias: LogitBias = {}
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1), INTEGRAL] | None = Field(
        None, description="The same seed gives the same answers; default: a random one."
    )
    user: str | None = Field(None, description="Tolerated.")
    ignore_eos: bool | None = Field(None, description="Go on after the model's end tokens.")
    min_tokens: Annotated[int, Field(ge=0), INTEGRAL] | None = Field(
        None, description="No end token before this many tokens."
    )
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0), INTEGRAL]], FAIL_FAST] | None = Field(
        None, max_length=MOST_STOP_TOKENS, description="Further tokens that end an answer."
    )
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    structured_outputs: Unsupported = None


class ChatMessage(_Request):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="`developer` is a system message."
    )
    content: Content
    name: str | None = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FAIL_FAST] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: Annotated[int, Field(ge=1), INTEGRAL] | None = Field(
        None, description="Default: what the model's length leaves."
    )
    max_completion_tokens: Annotated[int, Field(ge=1), INTEGRAL] | None = Field(
        None, description="Wins over `max_tokens`."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), INTEGRAL] | None = Field(
        None, description="Needs `logprobs`."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=32, description="Further variables of the model's chat template."
    )
    response_format: ResponseFormat = None
    tool_choice: ToolChoice = None
    tools: Unsupported = None
    functions: Unsupported = None
    function_call: ToolChoice = None
    audio: Unsupported = None
    modalities: Annotated[list[Literal["text"]], FAIL_FAST] | None = None
    web_search_options: Unsupported = None


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0), INTEGRAL] | None = Field(
        None, description="Default: what the model's length leaves. 0 only with `echo`."
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), INTEGRAL] | None = Field(
        None, description="Alternatives for each token."
    )
    echo: bool | None = Field(None, description="The answer begins with the prompt.")
    suffix: Unsupported = None
    best_of: Annotated[int, INTEGRAL] | None = Field(None, description="Not supported, unless equal to `n`.")
    response_format: ResponseFormat = None


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
    add_generation_prompt: bool | None = Field(None, description="Default true.")
    return_token_strs: bool | None = None


class DetokenizeRequest(_Request):
    """Body of /detokenize."""

    model: str = Field(min_length=1)
    tokens: TokenIds
