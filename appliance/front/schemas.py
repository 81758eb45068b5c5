"""Structs for request bodies. Validation, the OpenAPI document and the tables in docs/api.md are derived from
them.

Undeclared fields are accepted and ignored, because OpenAI's clients send `metadata`, `store` and similar
fields. Unimplemented fields that would change the answer are refused with an error that names the field
(`appliance.front.refused_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from appliance.channel.sampling import Fraction, Penalty, RepetitionPenalty, Temperature, TopK
from appliance.front.fields import (
    AllowedTokenIdsField,
    BadWordsField,
    ContentField,
    KeepAliveField,
    LogitBiasField,
    NoToolChoiceField,
    PositiveOrMinusOne,
    PromptsField,
    StopsField,
    TemplateVariablesField,
    TextFormatField,
    TokenIdsField,
)
from appliance.front.refused_fields import (
    REFUSED,
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGES,
    RefusedField,
)
from appliance.front.validation import MISSING, FieldError, RefusedName, RequestStruct

MAX_MESSAGES = 4096
MAX_SAMPLES = 128
MAX_ALTERNATIVES = 20
MAX_STOP_TOKENS = 64
MAX_USER_CHARS = 512
"""Maximum length of `user`. The value stays in memory while the request is running and is written to the
request log."""
DEFAULT_COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion, as in OpenAI's API."""

Samples = Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0)]
CountOrMinusOne = Annotated[int, Meta(ge=-1)]
User = Annotated[str, Meta(max_length=MAX_USER_CHARS)]
ModelName = Annotated[str, Meta(min_length=1)]
Messages = Annotated["list[ChatMessage]", Meta(min_length=1, max_length=MAX_MESSAGES)]
StopTokenIds = Annotated[list[Count], Meta(max_length=MAX_STOP_TOKENS)]


def _about(description: str) -> Meta:
    return Meta(description=description)


def _refusing(*fields: RefusedField) -> Mapping[str, RefusedName]:
    return {field.name: field for field in fields}


class StreamOptions(RequestStruct, kw_only=True):
    """Options for additional content in a stream."""

    include_usage: Annotated[bool | None, _about("Send a final chunk with the token counts.")] = None
    continuous_usage_stats: Annotated[
        bool | None, _about("Include the current token counts in every chunk. Requires `include_usage`.")
    ] = None


class GenerationRequest(RequestStruct, kw_only=True):
    """Fields common to chat completion and completion requests."""

    refused: ClassVar[Mapping[str, RefusedName]] = _refusing(*REFUSED)

    model: Annotated[ModelName, _about("Name of a served model, as listed by /v1/models.")]
    temperature: Annotated[
        Temperature | None,
        _about("Sampling temperature. 0 selects greedy decoding. Default: the model's value, otherwise 1."),
    ] = None
    top_p: Annotated[
        Fraction | None,
        _about(
            "Sample only from the most likely tokens, up to this cumulative probability. Default: the "
            "model's value, otherwise 1."
        ),
    ] = None
    top_k: Annotated[
        TopK | None,
        _about(
            "Sample only from the most likely tokens, up to this number of tokens. With 0 or -1, sample "
            "from all tokens. Default: the model's value, otherwise all tokens."
        ),
    ] = None
    min_p: Annotated[
        Fraction | None,
        _about(
            "Sample only from tokens whose probability is at least this fraction of the most likely "
            "token's. Default: the model's value, otherwise 0."
        ),
    ] = None
    n: Annotated[Samples | None, _about("Number of answers per prompt. Default 1.")] = None
    stream: Annotated[bool | None, _about("Send the answer as server-sent events. Default false.")] = None
    stream_options: Annotated[
        StreamOptions | None, _about("Options for streaming. Used only with `stream`.")
    ] = None
    stop: Annotated[
        StopsField | None, _about("Strings that end an answer. By default, the answer does not contain them.")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None,
        _about("Include the stop string or stop token that ended the answer. Default false."),
    ] = None
    presence_penalty: Annotated[
        Penalty | None,
        _about(
            "Subtracted from the logit of each token that occurs in the answer. Default: the model's "
            "value, otherwise 0."
        ),
    ] = None
    frequency_penalty: Annotated[
        Penalty | None,
        _about(
            "Subtracted from a token's logit once per occurrence in the answer. Default: the model's "
            "value, otherwise 0."
        ),
    ] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None,
        _about(
            "Penalty for tokens that already occur in the prompt or the answer. Default: the model's "
            "value, otherwise 1 (no penalty)."
        ),
    ] = None
    logit_bias: Annotated[
        LogitBiasField | None, _about("Numbers to add to the logits of the given token ids.")
    ] = None
    allowed_token_ids: Annotated[
        AllowedTokenIdsField | None,
        _about(
            "Restricts generation to these tokens. If they do not include the model's end token, an "
            "answer usually ends at its maximum length."
        ),
    ] = None
    bad_words: Annotated[
        BadWordsField | None,
        _about(
            "Texts that must not be generated. Each text is tokenized with and without a leading space, "
            "and its last token cannot be generated directly after the preceding ones. The same text can "
            "still be generated from different tokens."
        ),
    ] = None
    seed: Annotated[
        Seed | None,
        _about("Seed for sampling. Requests with the same seed get the same answers. Default: random."),
    ] = None
    user: Annotated[
        User | None, _about("Identifier of the client's end user. Written to the request log.")
    ] = None
    ignore_eos: Annotated[
        bool | None, _about("Continue generating after the model's end tokens. Default false.")
    ] = None
    min_tokens: Annotated[
        Count | None, _about("Minimum number of tokens before an end token can be generated. Default 0.")
    ] = None
    stop_token_ids: Annotated[StopTokenIds | None, _about("Additional token ids that end an answer.")] = None
    skip_special_tokens: Annotated[
        bool | None, _about("Omit special tokens from the text. Default true.")
    ] = None
    truncate_prompt_tokens: Annotated[
        PositiveOrMinusOne | None,
        _about(
            "Keep at most this many tokens from the end of each prompt. With -1, keep as many as possible "
            "while leaving room for `max_tokens`. A beginning-of-text token added by the tokenizer is "
            "always kept."
        ),
    ] = None
    prompt_logprobs: Annotated[
        Alternatives | None,
        _about(
            "Return the log probability of each prompt token and of this many alternatives per token. "
            "Not possible with `stream`."
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None, _about("Return the token ids of the prompt and the answer. Default false.")
    ] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority", "scale"] | None,
        _about("Selects the service class, like the `x-appliance-class` header."),
    ] = None
    keep_alive: Annotated[
        KeepAliveField | None,
        _about(
            "How long the model stays loaded when it is idle: a number of seconds, or a duration "
            'such as "10m" or "1h30m". 0 unloads it after this request; a negative value keeps it loaded. '
            "Applies to the request's tenant until that tenant's next request for the model. Default: the "
            "model's `idle_unload_s` setting."
        ),
    ] = None


class ChatMessage(RequestStruct, kw_only=True):
    """One message of a conversation."""

    refused: ClassVar[Mapping[str, RefusedName]] = _refusing(*REFUSED_IN_MESSAGES)

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        _about("Author of the message. `developer` has the same meaning as `system`."),
    ]
    content: Annotated[
        ContentField | None,
        _about(
            "Text, or a list of text parts that are joined with line breaks. In an assistant's message, "
            "missing or null content is treated as empty text."
        ),
    ] = None
    name: Annotated[str | None, _about("The author's name, for chat templates that use it.")] = None

    def __post_init__(self) -> None:
        if self.content is None and self.role != "assistant":
            raise FieldError("is required", MISSING, ("content",))

    @property
    def text(self) -> str:
        """The content of the message, or an empty string if it has none."""
        return self.content or ""


class ChatRequest(GenerationRequest, kw_only=True):
    """Request body of /v1/chat/completions."""

    refused: ClassVar[Mapping[str, RefusedName]] = _refusing(*REFUSED, *REFUSED_IN_CHATS)

    messages: Annotated[Messages, _about("The messages of the conversation, oldest first.")]
    max_tokens: Annotated[
        PositiveOrMinusOne | None,
        _about(
            "Maximum number of tokens per answer. With -1, only the model's maximum length limits the "
            "answer. Default: the tenant's default, or -1."
        ),
    ] = None
    max_completion_tokens: Annotated[
        PositiveOrMinusOne | None,
        _about("Maximum number of tokens per answer. Takes precedence over `max_tokens`."),
    ] = None
    logprobs: Annotated[
        bool | None, _about("Return the log probabilities of the answer's tokens. Default false.")
    ] = None
    top_logprobs: Annotated[
        Alternatives | None,
        _about("Number of alternatives whose log probabilities are returned per token. Requires `logprobs`."),
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        _about(
            "End the prompt with the beginning of an assistant's message. Default true, or false with "
            "`continue_final_message`."
        ),
    ] = None
    continue_final_message: Annotated[
        bool | None,
        _about(
            "Continue the last message instead of starting a new one. Default false. Not possible with "
            "`add_generation_prompt`."
        ),
    ] = None
    chat_template_kwargs: Annotated[
        TemplateVariablesField | None, _about("Additional variables for the model's chat template.")
    ] = None
    response_format: Annotated[TextFormatField | None, _about("Only text is supported.")] = None
    tool_choice: Annotated[
        NoToolChoiceField | None,
        _about("Tools are not available, so only values that select no tool are accepted."),
    ] = None
    function_call: Annotated[
        NoToolChoiceField | None,
        _about("Tools are not available, so only values that select no tool are accepted."),
    ] = None
    modalities: Annotated[list[Literal["text"]] | None, _about("Only text is supported.")] = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Request body of /v1/completions."""

    refused: ClassVar[Mapping[str, RefusedName]] = _refusing(*REFUSED, *REFUSED_IN_COMPLETIONS)

    prompt: Annotated[
        PromptsField,
        _about("One or more prompts, each either text or a list of token ids. Each prompt gets `n` answers."),
    ]
    max_tokens: Annotated[
        CountOrMinusOne | None,
        _about(
            "Maximum number of tokens per answer. With -1, only the model's maximum length limits the "
            "answer. 0 is allowed only with `echo`. Default: the tenant's default, or "
            f"{DEFAULT_COMPLETION_TOKENS}."
        ),
    ] = None
    logprobs: Annotated[
        Alternatives | None,
        _about(
            "Return the log probabilities of the answer's tokens and of this many alternatives per token."
        ),
    ] = None
    echo: Annotated[bool | None, _about("Begin the answer with the prompt. Default false.")] = None
    best_of: Annotated[
        Samples | None,
        _about(
            "Generate this many answers per prompt and return the `n` answers with the highest "
            "cumulative log probability. All generated answers count as output. Not possible with "
            "`stream`. Default: `n`."
        ),
    ] = None
    response_format: Annotated[TextFormatField | None, _about("Only text is supported.")] = None


class DeploymentChatRequest(ChatRequest, kw_only=True):
    """Request body of Azure's chat completion route. The model name is part of the path."""

    model: Annotated[str, _about("Ignored, because the model name is part of the path.")] = ""


class DeploymentCompletionRequest(CompletionRequest, kw_only=True):
    """Request body of Azure's completion route. The model name is part of the path."""

    model: Annotated[str, _about("Ignored, because the model name is part of the path.")] = ""


class TokenizeRequest(RequestStruct, kw_only=True):
    """Request body of /tokenize: either `prompt` or `messages`."""

    model: ModelName
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[
        bool | None,
        _about(
            "Add special tokens such as the beginning-of-text token. Default: true for a prompt, false for "
            "messages."
        ),
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        _about(
            "End the prompt with the beginning of an assistant's message. Default: true, or false with "
            "`continue_final_message`."
        ),
    ] = None
    continue_final_message: Annotated[bool | None, _about("Default false.")] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestStruct, kw_only=True):
    """Request body of /detokenize."""

    model: ModelName
    tokens: TokenIdsField
