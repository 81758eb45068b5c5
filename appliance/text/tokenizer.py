"""A model's tokenizer, which encodes text in short steps and decodes token ids by table lookup."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

import tokenizers

from appliance.text.control_tokens import ControlTokens, Shield
from appliance.text.cuts import longest_token_bytes
from appliance.text.detokenizer import REPLACEMENT, Detokenizer, TableDetokenizer, WindowDetokenizer
from appliance.text.encoder import Encoder, Steps
from appliance.text.fair_queue import run_steps
from appliance.text.panics import raise_panic
from appliance.text.stop import StopMatcher, StopSet
from appliance.text.stream import TextStream
from appliance.text.token_table import TokenTable, build_token_table, id_to_token
from appliance.text.tokenizer_files import (
    MAX_JSON_BYTES,
    TokenizerFiles,
    TokenizerFilesError,
    read_regular_file,
    read_tokenizer_files,
)

_DECODE_SLICE_TOKENS = 16_384


class TokenIdError(ValueError):
    """Raised for a negative token id, which no vocabulary can contain."""


class Tokenizer:
    """A model's tokenizer, read from its folder by `Tokenizer.load`. Safe to use from any thread.

    - `vocabulary_size` is the highest token id plus one. The model's embedding may have more rows, because of
      padding.
    - `special_tokens` maps names such as `bos_token` to texts, in the form that chat templates expect.
    - `eos_ids` are the ids that end a sequence.
    - `adds_bos` is true if encoding with `add_special_tokens` adds `bos_id` at the beginning.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
        """For internal use by `Tokenizer.load`. `backend` must not be used elsewhere."""
        self._backend = backend
        self._encoder = Encoder(backend)
        self._tokens = id_to_token(backend)
        self.table: TokenTable | None = build_token_table(backend, self._tokens)
        self.vocabulary_size = len(self._tokens)
        self.special_tokens = dict(files.named)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_id = self._named_id("bos_token")
        eos_id = self._named_id("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *files.eos_ids]))
        self._control = ControlTokens(backend)
        self.longest_token_bytes = longest_token_bytes(backend, self.table)
        """Maximum number of bytes that one token can represent, or None if unknown."""
        self.adds_bos = self.bos_id is not None and self.bos_id in self.encode_blocking("", True)[:1]

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read `tokenizer.json` and the files next to it. This takes about 1 s for a vocabulary of 128 k
        tokens. Raises `TokenizerFilesError` if a file is missing or invalid; the message names the file and
        the remedy.

        `tokenizer.json` is used unchanged, including its post-processor. As in transformers, tokens declared
        in `tokenizer_config.json` are added, and are special if that file says so. A special token without an
        id in these files is left out: the model was not trained on it, and a new id would be outside the
        embedding.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise TokenizerFilesError(
                f"{path} does not exist",
                "copy it from the original model, or create it with "
                "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            )
        try:
            try:
                backend = tokenizers.Tokenizer.from_buffer(read_regular_file(path, MAX_JSON_BYTES))
            except Exception as error:  # The tokenizers library raises plain `Exception`.
                raise TokenizerFilesError(f"{path} is not a valid tokenizer file ({error})") from error
            backend.no_truncation()
            backend.no_padding()
            files = read_tokenizer_files(folder)
            _add_declared_tokens(backend, files, folder / "tokenizer_config.json")
            return cls(backend, files)
        except BaseException as error:
            raise_panic(error)
            raise

    def encode_steps(
        self, texts: Sequence[str], add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> Steps:
        """Encode the texts in steps, yielding after each step (`appliance.text.fair_queue`), and return each
        text's token ids.

        With `add_special_tokens`, the model's post-processor adds special tokens, such as the
        beginning-of-text token. Pass False for rendered chats, in which the template has already written that
        token. Raises `LoneSurrogateError` for a text with a lone surrogate, and `TooManyTokensError` as soon
        as a text has more than `max_tokens` tokens.
        """
        return self._encoder.steps(texts, add_special_tokens, max_tokens, self.longest_token_bytes)

    def encode_blocking(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode `text` in the calling thread and return its token ids. Raises `LoneSurrogateError` if the
        text contains a lone surrogate."""
        return run_steps(self.encode_steps([text], add_special_tokens))[0]

    def shield(self) -> Shield:
        """Return a new shield for one conversation. After rendering, `encode_rendered_steps` encodes the
        special tokens hidden by the shield as plain text."""
        return Shield(self._control)

    def encode_rendered_steps(
        self, text: str, shield: Shield, add_special_tokens: bool = False, max_tokens: int | None = None
    ) -> Steps:
        """Encode a conversation that was rendered with a shield hiding the special tokens in its messages.
        Only special tokens written by the template become control tokens
        (`appliance.text.control_tokens`)."""
        if not shield.used:
            return self.encode_steps([text], add_special_tokens, max_tokens)
        return self._control.encode_steps(
            text, shield, add_special_tokens, max_tokens, self.longest_token_bytes
        )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. A stream of these tokens emits the same text. Ids outside the
        vocabulary produce no text. Raises `TokenIdError` for negative ids.

        The result is the same as in transformers, with one exception: in a sequence of ByteFallback tokens
        that is not valid UTF-8, only the invalid bytes become U+FFFD, whereas transformers replaces the whole
        sequence.
        """
        return run_steps(self.decode_steps(token_ids, skip_special_tokens))

    def decode_steps(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, complete: bool = True
    ) -> Generator[None, None, str]:
        """Decode as `decode` does, but in steps, yielding after each step (`appliance.text.fair_queue`). If
        `complete` is false, an incomplete final character is left out, because a `detokenizer` with these ids
        as its context will emit it."""
        if token_ids and min(token_ids) < 0:
            raise TokenIdError(
                f"token id {min(token_ids)} is negative; ids are 0 to {self.vocabulary_size - 1}"
            )
        if self.table is None:
            known = [token_id for token_id in token_ids if token_id < self.vocabulary_size]
            # Use `decode_batch`, because `decode` holds the GIL.
            text = self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]
            return text if complete else text.rstrip(REPLACEMENT)
        detokenizer = TableDetokenizer(self.table, skip_special_tokens)
        texts = []
        for begin in range(0, len(token_ids), _DECODE_SLICE_TOKENS):
            texts.append(detokenizer.push(token_ids[begin : begin + _DECODE_SLICE_TOKENS]))
            yield
        return "".join([*texts, detokenizer.finish() if complete else ""])

    def detokenizer(self, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for one stream. If the text continues a prompt (as in completions), `context`
        contains the prompt's ids. Their text is not emitted. With a context, the first token's leading space
        is kept, and a character that begins in the prompt and ends in the stream is emitted.
        """
        visible = [i for i in context[-16:] if not (skip_special_tokens and i in self.special_ids)]
        if self.table is not None:
            return TableDetokenizer(self.table, skip_special_tokens, visible)
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(self._backend, hidden, skip_special_tokens, visible)

    def stream(
        self,
        stops: StopSet | None = None,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> TextStream:
        """Return a text stream for one sequence, combining a `detokenizer` with the request's stop strings,
        if any. Stop strings within the first `min_tokens` tokens do not end the stream."""
        matcher = StopMatcher(stops, include_stop) if stops is not None else None
        return TextStream(self.detokenizer(skip_special_tokens, context), matcher, min_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of any token, even a special one, or b"" for ids outside the vocabulary."""
        if not 0 <= token_id < self.vocabulary_size:
            return b""
        if self.table is not None:
            return self.table.raw[token_id]
        return (self._tokens[token_id] or "").encode()

    def token_text(self, token_id: int) -> str:
        """Return a token as OpenAI's logprobs show it: its text or, if the token contains only part of a
        character, its bytes, such as `bytes:\\xe2`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def _add_declared_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles, path: Path) -> None:
    """Add the tokens declared only in `tokenizer_config.json`, and mark the declared special tokens as
    special."""
    present = backend.get_added_tokens_decoder()
    for token_id, token in sorted(files.added.items()):
        known = present.get(token_id)
        if known is not None and known.content == token.content:
            continue
        backend.add_tokens([token])
        actual = backend.token_to_id(token.content)
        if actual != token_id:
            raise TokenizerFilesError(
                f"{path}: added_tokens_decoder gives {token.content!r} the id {token_id}, but "
                f"tokenizer.json gives it {actual}",
                "use both files from the same version of the model",
            )
    special = {token.content for token in present.values() if token.special}
    backend.add_special_tokens(
        [
            token
            for token in files.special
            if token.content not in special and backend.token_to_id(token.content) is not None
        ]
    )
