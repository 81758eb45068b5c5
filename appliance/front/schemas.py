"""The request bodies. Validation, the OpenAPI document and the tables in docs/api.md are derived from these
declarations.

Fields that are not declared here are accepted and ignored, because OpenAI's clients send `metadata`, `store`
and similar fields. Fields that would change the answer but are not implemented are refused by name
(`appliance.front.refused_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from appliance.front.fields import (
    AllowedTokenIdsField,
    BadWordsField,
    ContentField,
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
"""Maximum length of `user`. The value is held in memory while the request runs and is written to the request
log."""
DEFAULT_COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion, as in OpenAI's API."""

Fraction = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 31)]
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
    """Selects what a stream carries besides the answer."""

    include_usage: Annotated[bool | None, _about("Send a last chunk with token counts.")] = None
    continuous_usage_stats: Annotated[
        bool | None, _about("With `include_usage`: every chunk has the token counts so far.")
    ] = None


class GenerationRequest(RequestStruct, kw_only=True):
    """The fields that chats and completions share."""

    refused: ClassVar[Mapping[str, RefusedName]] = _refusing(*REFUSED)

    model: Annotated[ModelName, _about("Name of a served model: see /v1/models.")]
    temperature: Annotated[Temperature | None, _about("0 is greedy; default 1.")] = None
    top_p: Annotated[Fraction | None, _about("Default 1.")] = None
    top_k: Annotated[TopK | None, _about("0 and -1 turn it off, the default.")] = None
    min_p: Annotated[Fraction | None, _about("Default 0.")] = None
    n: Annotated[Samples | None, _about("Answers for each prompt; default 1.")] = None
    stream: Annotated[bool | None, _about("Send the answer as server-sent events; default false.")] = None
    stream_options: Annotated[StreamOptions | None, _about("Only used with `stream`.")] = None
    stop: Annotated[
        StopsField | None, _about("Strings that end an answer. The answer does not contain them.")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None,
        _about("The answer contains the stop string, or stop token, that ended it; default false."),
    ] = None
    presence_penalty: Annotated[Penalty | None, _about("Default 0.")] = None
    frequency_penalty: Annotated[Penalty | None, _about("Default 0.")] = None
    repetition_penalty: Annotated[RepetitionPenalty | None, _about("1 turns it off, the default.")] = None
    logit_bias: Annotated[LogitBiasField | None, _about("Added to the logits of these token ids.")] = None
    allowed_token_ids: Annotated[
        AllowedTokenIdsField | None,
        _about(
            "Only these tokens can be generated. If the model's end token is not among them, the answer ends "
            "at its maximum length."
        ),
    ] = None
    bad_words: Annotated[
        BadWordsField | None,
        _about(
            "Texts that are not generated: the last token of a word cannot follow its other tokens. This "
            "applies to the tokens that the tokenizer makes of the word, with and without a space before it; "
            "other tokens with the same text remain possible."
        ),
    ] = None
    seed: Annotated[Seed | None, _about("The same seed gives the same answers; default: random.")] = None
    user: Annotated[User | None, _about("The client's name for its end user, for the request log.")] = None
    ignore_eos: Annotated[bool | None, _about("Continue after the model's end tokens; default false.")] = None
    min_tokens: Annotated[Count | None, _about("No end token before this many tokens; default 0.")] = None
    stop_token_ids: Annotated[StopTokenIds | None, _about("Further tokens that end an answer.")] = None
    skip_special_tokens: Annotated[
        bool | None, _about("Leave special tokens out of the text; default true.")
    ] = None
    truncate_prompt_tokens: Annotated[
        PositiveOrMinusOne | None,
        _about(
            "Keep only the last tokens of each prompt, at most this many; -1: as many as leave space for "
            "`max_tokens`. A beginning-of-text token that the tokenizer puts before a text is kept."
        ),
    ] = None
    prompt_logprobs: Annotated[
        Alternatives | None,
        _about(
            "Return the log probability of each prompt token, and of this many alternatives. Not with "
            "`stream`."
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None, _about("Return the token ids of prompt and answer; default false.")
    ] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority", "scale"] | None,
        _about("Requests a service class, as the header `x-appliance-class` does."),
    ] = None


class ChatMessage(RequestStruct, kw_only=True):
    """One message of a conversation."""

    refused: ClassVar[Mapping[str, RefusedName]] = _refusing(*REFUSED_IN_MESSAGES)

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        _about("`developer` means the same as `system`."),
    ]
    content: Annotated[
        ContentField | None,
        _about(
            "Text, or text parts, which are joined by line breaks. In an assistant's message null, or no "
            "content at all, is an empty text."
        ),
    ] = None
    name: Annotated[str | None, _about("Name of the speaker, for templates that use it.")] = None

    def __post_init__(self) -> None:
        if self.content is None and self.role != "assistant":
            raise FieldError("is required", MISSING, ("content",))

    @property
    def text(self) -> str:
        """The message's content, or an empty string if it has none."""
        return self.content or ""


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of /v1/chat/completions."""

    refused: ClassVar[Mapping[str, RefusedName]] = _refusing(*REFUSED, *REFUSED_IN_CHATS)

    messages: Annotated[Messages, _about("The conversation.")]
    max_tokens: Annotated[
        PositiveOrMinusOne | None,
        _about("Maximum tokens of an answer. -1 is no limit; default: as the model's length permits."),
    ] = None
    max_completion_tokens: Annotated[
        PositiveOrMinusOne | None, _about("Takes precedence over `max_tokens`.")
    ] = None
    logprobs: Annotated[
        bool | None, _about("Return log probabilities of the answer's tokens; default false.")
    ] = None
    top_logprobs: Annotated[Alternatives | None, _about("Alternatives for each token. Needs `logprobs`.")] = (
        None
    )
    add_generation_prompt: Annotated[
        bool | None,
        _about(
            "End the prompt with the beginning of an assistant's message; default true, except with "
            "`continue_final_message`."
        ),
    ] = None
    continue_final_message: Annotated[
        bool | None,
        _about(
            "End the prompt inside the last message, which the answer continues; default false. Not with "
            "`add_generation_prompt`."
        ),
    ] = None
    chat_template_kwargs: Annotated[
        TemplateVariablesField | None, _about("Further variables of the model's chat template.")
    ] = None
    response_format: Annotated[TextFormatField | None, _about("Only text.")] = None
    tool_choice: Annotated[NoToolChoiceField | None, _about("Tools are not available.")] = None
    function_call: Annotated[NoToolChoiceField | None, _about("Tools are not available.")] = None
    modalities: Annotated[list[Literal["text"]] | None, _about("Only text.")] = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of /v1/completions."""

    refused: ClassVar[Mapping[str, RefusedName]] = _refusing(*REFUSED, *REFUSED_IN_COMPLETIONS)

    prompt: Annotated[
        PromptsField, _about("Text, token ids, or a list of either: each prompt gets `n` answers.")
    ]
    max_tokens: Annotated[
        CountOrMinusOne | None,
        _about(
            "Maximum number of tokens of an answer. -1 is no limit, 0 is possible with `echo` only; default: "
            f"{DEFAULT_COMPLETION_TOKENS}, or the tenant's own default."
        ),
    ] = None
    logprobs: Annotated[
        Alternatives | None,
        _about("Return log probabilities of the answer's tokens, and of this many alternatives."),
    ] = None
    echo: Annotated[bool | None, _about("Begin the answer with the prompt; default false.")] = None
    best_of: Annotated[
        Samples | None,
        _about(
            "Generate this many answers for each prompt and return the `n` with the highest cumulative log "
            "probability; all of them count as output. Not with `stream`; default `n`."
        ),
    ] = None
    response_format: Annotated[TextFormatField | None, _about("Only text.")] = None


class DeploymentChatRequest(ChatRequest, kw_only=True):
    """Body of Azure's route for chats. The path names the model."""

    model: Annotated[str, _about("Not used: the path names the model.")] = ""


class DeploymentCompletionRequest(CompletionRequest, kw_only=True):
    """Body of Azure's route for completions. The path names the model."""

    model: Annotated[str, _about("Not used: the path names the model.")] = ""


class TokenizeRequest(RequestStruct, kw_only=True):
    """Body of /tokenize: either `prompt` or `messages`."""

    model: ModelName
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[bool | None, _about("Default: true for a prompt, false for messages.")] = (
        None
    )
    add_generation_prompt: Annotated[
        bool | None, _about("Default true, except with `continue_final_message`.")
    ] = None
    continue_final_message: Annotated[bool | None, _about("Default false.")] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestStruct, kw_only=True):
    """Body of /detokenize."""

    model: ModelName
    tokens: TokenIdsField
