"""Defines the demo model's byte-level BPE tokenizer and chat template."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 5120

BEGIN = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (BEGIN, END_OF_TEXT, PAD, SYSTEM, USER, ASSISTANT, END_OF_TURN)

# A turn consists of its role token, the trimmed content and <|end|>, with no whitespace in between, so that
# its tokens are the same wherever it occurs.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role must be system, user or assistant, not ' ~ message['role']) }}"
    "{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ (message['content'] | trim) ~ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Text is split as in Llama 3, into contractions, words with one leading space or punctuation character,
# groups of up to three digits, runs of punctuation, line ends and runs of spaces. The last space of a run
# belongs to the next word.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with `VOCABULARY` entries. `SPECIAL_TOKENS` come first, and every
    single byte has an entry."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, SPECIAL_TOKENS.index(BEGIN))]
    )
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"the text yields {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}: use more text"
        )
    return tokenizer


def special_token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of one of `SPECIAL_TOKENS`. Raises ValueError if the tokenizer lacks it."""
    index: int | None = tokenizer.token_to_id(token)
    if index is None:
        raise ValueError(f"the tokenizer has no token {token}: create the tokenizer with the corpus command")
    return index


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json in the format expected by Hugging Face's loaders."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END_OF_TURN,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        },
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
