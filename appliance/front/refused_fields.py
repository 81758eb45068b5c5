"""Request fields that would change an answer but are not implemented by this server. The names come from the
documentation of OpenAI, vLLM, SGLang, llama.cpp's server, text-generation-inference and
text-generation-webui. A request with such a field is refused with an error that names the field, unless its
value does not change the answer. Fields not listed here are ignored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from appliance.front.validation import UNSUPPORTED, FieldError, shown


class RefusedField(NamedTuple):
    """A refused request field. The error message suggests a remedy."""

    name: str
    remedy: str
    neutral: tuple[Any, ...] = ()
    """Values that do not change the answer and are therefore accepted. Null, false and empty values are
    always accepted."""
    is_content: bool = False
    """Whether the field's value is conversation text, which must not be quoted in error messages because they
    are logged."""

    @property
    def json_schema(self) -> dict[str, Any]:
        """JSON schema of the accepted values."""
        return {
            "enum": [None, False, *self.neutral],
            "description": f"Other values are refused: {self.remedy}.",
        }

    def check(self, value: Any) -> None:
        """Raise FieldError if the value would change the answer."""
        if value is None or value is False or (isinstance(value, (list, dict, str)) and not value):
            return
        # True == 1 in Python, so compare the types as well.
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.neutral):
            return
        named = "this value" if self.is_content and not isinstance(value, (dict, list)) else shown(value)
        raise FieldError(f"{named} is not supported by this server; {self.remedy}", UNSUPPORTED)


def _each(remedy: str, *names: str, **neutral: tuple[Any, ...]) -> tuple[RefusedField, ...]:
    """Return refused fields that share a remedy. `neutral` maps fields to values that do not change the
    answer; `names` lists fields without such values."""
    return (
        *(RefusedField(name, remedy) for name in names),
        *(RefusedField(name, remedy, values) for name, values in neutral.items()),
    )


_FORMAT = "structured output is not available; describe the format in the prompt and check the answer"
_TOOLS = "tools are not available, so omit this field"
_SAMPLING = "use temperature, top_k, top_p and min_p"
_PENALTIES = "use repetition_penalty, frequency_penalty and presence_penalty"
_LENGTH = "use max_tokens"
_TEMPLATE = (
    "the model's chat template is always used; set its variables with chat_template_kwargs, or render the "
)
_TEMPLATE += "conversation in the client and send it to /v1/completions"
_THINKING = "set the variables of the model's chat template with chat_template_kwargs"
_SEARCH = "generate several answers with n, or use best_of in /v1/completions"
_ADAPTERS = "ask the operator to serve the merged model under a separate name, and set model to that name"
_PROCESSORS = "use logit_bias, allowed_token_ids or bad_words"

REFUSED = (
    *_each(
        _FORMAT,
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_whitespace_pattern",
        "structured_outputs",
        "structural_tag",
        "json_schema",
        "regex",
        "ebnf",
        "grammar",
        "grammar_string",
        "grammar_triggers",
    ),
    *_each(
        _SAMPLING,
        "samplers",
        "sampler_order",
        "sampler_priority",
        "temperature_last",
        "dynamic_temperature",
        typical_p=(1,),
        typical=(1,),
        tfs=(1,),
        tfs_z=(1,),
        top_a=(0,),
        top_n_sigma=(0, -1),
        nsigma=(0,),
        epsilon_cutoff=(0,),
        eta_cutoff=(0,),
        smoothing_factor=(0,),
        smoothing_curve=(1,),
        dynatemp_range=(0,),
        dynatemp_exponent=(1,),
        dynatemp_low=(1,),
        dynatemp_high=(1,),
        mirostat=(0,),
        mirostat_mode=(0,),
        mirostat_tau=(0, 5),
        mirostat_eta=(0, 0.1),
        xtc_probability=(0,),
        xtc_threshold=(0, 0.1),
        min_keep=(0,),
        adaptive_target=(-1,),
        adaptive_decay=(0.9,),
    ),
    RefusedField("do_sample", "use temperature 0 for greedy decoding", (True,)),
    *_each(
        _PENALTIES,
        "penalize_nl",
        repeat_penalty=(1,),
        encoder_repetition_penalty=(1,),
        no_repeat_ngram_size=(0,),
        repeat_last_n=(0, -1, 64),
        penalty_last_n=(0, -1, 64),
        repetition_penalty_range=(0, -1, 1024),
        dry_multiplier=(0,),
        dry_base=(0, 1.75),
        dry_allowed_length=(2,),
        dry_penalty_last_n=(0, -1),
        dry_sequence_breakers=(["\n", ":", '"', "*"], '["\\n", ":", "\\"", "*"]'),
    ),
    *_each("use min_tokens", min_new_tokens=(0,), min_length=(0,)),
    *_each(_LENGTH, max_new_tokens=(-1,), n_predict=(-1,), num_predict=(-1,), max_length=(-1,)),
    *_each(_LENGTH, t_max_predict_ms=(0, -1), n_indent=(0,)),
    *_each("use truncate_prompt_tokens", truncate=(0, -1), truncation_length=(0,), truncation_side=("left",)),
    *_each("use n", num_return_sequences=(1,), n_cmpl=(1,)),
    *_each(
        _SEARCH,
        "use_beam_search",
        "early_stopping",
        num_beams=(1,),
        beam_width=(1,),
        length_penalty=(1,),
        penalty_alpha=(0,),
    ),
    *_each("describe it in the prompt", "negative_prompt", guidance_scale=(0, 1), cfg_scale=(0, 1)),
    *_each("use ignore_eos", "ban_eos_token"),
    *_each(
        _PROCESSORS, "logits_processors", "logits_processor", "custom_logit_processor", "custom_token_bans"
    ),
    *_each("use stop", "stop_regex", "stopping_strings", "custom_stopping_strings", "stop_sequences"),
    *_each("use include_stop_str_in_output", "no_stop_trim"),
    *_each("use return_token_ids", "return_tokens_as_token_ids", "return_tokens"),
    *_each("use logprobs", "post_sampling_probs", "return_hidden_states", n_probs=(0,), top_n_tokens=(0,)),
    *_each("send token ids as the prompt of /v1/completions", "input_ids", "prompt_embeds", "input_embeds"),
    *_each(_ADAPTERS, "lora", "lora_path", "lora_name", "lora_request", "adapter_id", "adapter"),
    *_each("omit this field", "watermark", "vllm_xargs", "mm_processor_kwargs"),
    *_each(
        _THINKING,
        "enable_thinking",
        "thinking",
        "thinking_budget",
        "thinking_token_budget",
        "reasoning",
        "reasoning_effort",
        "reasoning_budget",
        verbosity=("medium",),
    ),
)
"""Fields refused on both generation routes."""

REFUSED_IN_CHATS = (
    *_each(_TOOLS, "tools", "functions", "tool_prompt", "web_search_options", "guideline"),
    *_each("answers are text only, so omit this field", "audio"),
    *_each(_TEMPLATE, "chat_template", "documents", "add_special_tokens"),
    *_each("use /v1/completions, or n", best_of=(1,)),
    *_each("the answer never repeats the conversation, so omit this field", "echo"),
)

REFUSED_IN_COMPLETIONS = (
    RefusedField(
        "suffix",
        "filling in text between a prefix and a suffix is not available, so omit this field",
        is_content=True,
    ),
    *_each("use echo", "return_full_text"),
    RefusedField(
        "add_special_tokens",
        "send token ids as the prompt; /tokenize returns them with or without special tokens",
        (True,),
    ),
)

REFUSED_IN_MESSAGES = _each(_TOOLS, "tool_calls", "function_call") + _each(
    "prompts and answers are text only, so omit this field", "audio"
)
