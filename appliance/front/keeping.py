"""Prepares prompts and answers for storage, as log policies require: hashes them, redacts secrets, and sends
them to the core. The preparation takes 0.2 ms per thousand characters, so it is done after the answer has
been sent, on a separate thread that pauses often. The texts are sent in a memfd, so that the core's event
loop only has to pass on a descriptor.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from appliance.background import Background
from appliance.channel.front_messages import Keep
from appliance.channel.front_settings import KeepRules
from appliance.channel.identity import Identity
from appliance.host.memory_files import new_memory
from appliance.text.redaction import Redactor
from store.structs import KeptPart, KeptText

log = logging.getLogger(__name__)

MAX_WAITING_CHARS = 32 << 20
"""Maximum number of characters that may be waiting for the thread. Any additional texts are dropped and
counted."""
MAX_REQUEST_CHARS = 4 << 20
"""Maximum number of characters stored per request. If the texts are longer, only the length of the rest is
stored."""

_BEYOND_CHARS = 1024
"""The search for secrets continues this many characters past the end of the stored part, because a secret may
straddle that point."""
_PAUSE_S = 0.0001
"""Length, in seconds, of the thread's pauses, which let the event loop's thread acquire the interpreter lock.
A pause of 0 would be too short."""

Message = dict[str, str]
Text = str | list[Message] | list[int]
"""A prompt or answer to store: a text, a conversation, or a list of token ids."""


class Transcript(NamedTuple):
    """The prompts and answers of one request."""

    request_id: str
    identity: Identity
    created_at: float
    prompts: list[Text]
    answers: list[str]
    decode: Callable[[list[int]], str]
    """Converts token ids to text. May be called from any thread."""

    @property
    def chars(self) -> int:
        """Total number of characters and token ids in the prompts and answers."""
        return sum(map(len, self.answers)) + sum(map(_length, self.prompts))


class Keeper:
    """Prepares texts for storage, according to `rules` and the log policy of each caller's tenant. All
    methods must be called on the event loop thread."""

    def __init__(self, hand_over: Callable[[Keep, tuple[int, ...]], None]) -> None:
        """`hand_over` sends a message with file descriptors to the core, leaving the descriptors open."""
        self.rules = KeepRules()
        self.dropped = 0
        """Requests whose texts were not stored because too many characters were already waiting for the
        thread."""
        self._hand_over = hand_over
        self._waiting_chars = 0
        self._threads = ThreadPoolExecutor(1, "keep")
        self._background = Background()

    def keep(self, transcript: Transcript) -> None:
        """Queue a request's texts for the thread, which prepares them for storage according to the tenant's
        log policy."""
        if self._waiting_chars + transcript.chars > MAX_WAITING_CHARS:
            self.dropped += 1
            log.error(
                "request %s: prompts and answers not stored, because too much text is waiting to be stored",
                transcript.request_id,
            )
            return
        self._waiting_chars += transcript.chars
        self._background.run(self._run(transcript))

    async def flush(self) -> None:
        """Wait until all queued texts have been sent."""
        await self._background.ended()

    async def _run(self, transcript: Transcript) -> None:
        try:
            loop = asyncio.get_running_loop()
            descriptor = await loop.run_in_executor(self._threads, _in_memory, transcript, self.rules)
        except Exception:
            log.exception("request %s: prompts and answers could not be stored", transcript.request_id)
            return
        finally:
            self._waiting_chars -= transcript.chars
        try:
            keep = Keep(
                request_id=transcript.request_id,
                identity=transcript.identity,
                created_at=transcript.created_at,
            )
            self._hand_over(keep, (descriptor,))
        finally:
            os.close(descriptor)


def _in_memory(transcript: Transcript, rules: KeepRules) -> int:
    """Return a memfd that contains the texts in msgpack format."""
    return new_memory("kept", msgspec.msgpack.encode(list(_parts(transcript, rules))))


def _parts(transcript: Transcript, rules: KeepRules) -> Iterator[KeptText]:
    redactor = Redactor(rules.redact, rules.secret_prefixes)
    space = MAX_REQUEST_CHARS
    texts: list[tuple[KeptPart, int, Text]] = [
        *(("prompt", number, text) for number, text in enumerate(transcript.prompts)),
        *(("answer", number, text) for number, text in enumerate(transcript.answers)),
    ]
    for name, number, text in texts:
        part = _part(name, number, text, transcript, min(space, rules.max_text_chars), redactor)
        space -= len(part.text or "")
        yield part


def _part(
    name: KeptPart,
    number: int,
    text: Text,
    transcript: Transcript,
    most: int,
    redactor: Redactor,
) -> KeptText:
    if isinstance(text, list) and text and isinstance(text[0], int):
        text = transcript.decode(text)
    data = _plain(text).encode("utf-8", "surrogatepass")
    if transcript.identity.log_policy != "full":
        return KeptText(name, number, hashlib.sha256(data).hexdigest(), len(data))
    # Redact message texts before encoding them as JSON, because JSON escapes would change a secret's
    # characters.
    clean = _Clean(redactor, most)
    shown = clean.text(text) if isinstance(text, str) else _plain(clean.conversation(text))  # type: ignore[arg-type]
    kept = shown[:most].encode("utf-8", "backslashreplace")
    # Hash the redacted text, not the original, so that a short secret cannot be found by hashing guesses.
    return KeptText(
        name,
        number,
        hashlib.sha256(kept).hexdigest(),
        len(data),
        text=kept.decode(),
        truncated=clean.cut or len(shown) > most,
        redactions=clean.secrets,
    )


def _plain(text: Text) -> str:
    """Return the text in the form in which it is stored. Conversations are stored as JSON without spaces."""
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, separators=(",", ":"))


class _Clean:
    """Redacts a text or conversation, keeping slightly more of its beginning than will be stored."""

    def __init__(self, redactor: Redactor, space: int) -> None:
        self.secrets = 0
        self.cut = False
        """Whether the text or conversation was too long, so that only its beginning was kept."""
        self._redactor = redactor
        self._space = space

    def text(self, text: str) -> str:
        """Return the redacted beginning of the text."""
        most = max(0, self._space) + _BEYOND_CHARS
        self.cut = self.cut or len(text) > most
        pieces: list[str] = []
        for piece in self._redactor.pieces(text[:most]):
            pieces.append(piece.text)
            self.secrets += piece.secrets
            time.sleep(_PAUSE_S)
        shown = "".join(pieces)
        self._space -= len(shown)
        return shown

    def conversation(self, messages: list[Message]) -> list[Message]:
        """Return the redacted messages, up to the maximum number of characters to keep."""
        shown: list[Message] = []
        for message in messages:
            if self._space < 0:
                self.cut = True
                break
            shown.append({name: self.text(value) for name, value in message.items()})
        return shown


def _length(text: Text) -> int:
    if isinstance(text, str) or not text or isinstance(text[0], int):
        return len(text)
    return sum(len(message["content"]) for message in text)
