"""Implements `appliance chat`: a conversation in a terminal, or a single question from a script."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Generator
from typing import Any

from appliance.cli.chat_stream import AnswerError, ChatClient, End, Piece
from appliance.cli.failure import Failure
from appliance.cli.output import is_terminal, paint, printable
from appliance.cli.service import find_run_dir

_HELP = """\
  Ctrl-C   cancel the answer
  Ctrl-D   exit
  /reset   start a new conversation
  /help    show this list"""
_INTERRUPTED = 130
# Answers may contain line breaks and tabs. All other control characters are removed, because they could
# change the terminal's state.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Conversation:
    """A conversation's messages, and the parameters of the next request."""

    def __init__(self, client: ChatClient, system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options
        self._opening = [] if system is None else [{"role": "system", "content": _sendable(system)}]
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Remove all messages from the conversation except the system message."""
        self.messages = list(self._opening)

    def ask(self, question: str) -> Generator[Piece | End, None, None]:
        """Send a question and yield the answer as it arrives. If the answer is cut off, the conversation
        keeps the part that arrived; if no text arrived, the question is dropped. Raises AnswerError if the
        answer fails.
        """
        self.messages.append({"role": "user", "content": _sendable(question)})
        said: list[str] = []
        try:
            # Always close the stream, which tells the service to stop generating.
            with contextlib.closing(
                self._client.answer({**self._options, "messages": self.messages})
            ) as answer:
                for part in answer:
                    if isinstance(part, Piece):
                        said.append(part.text)
                    yield part
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self.messages.pop()


def chat(
    run_dir: str | None,
    *,
    prompt: str | None,
    model: str | None,
    system: str | None,
    temperature: float,
    max_tokens: int | None,
) -> int:
    """Hold a conversation until the user exits, or answer `prompt` (or standard input) once. Return the exit
    code."""
    if prompt is None and not is_terminal(sys.stdin):
        prompt = sys.stdin.read() if sys.stdin is not None else ""
    if prompt is not None and not prompt.strip():
        raise Failure("the prompt is empty; pass a prompt, or start a conversation with: appliance chat")
    with ChatClient(find_run_dir(run_dir)) as client:
        options: dict[str, Any] = {"model": _choose(client.models(), model), "temperature": temperature}
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        conversation = Conversation(client, system, options)
        if prompt is None:
            return _converse(conversation, options["model"])
        return _answer_once(conversation, prompt)


def _choose(models: list[str], wanted: str | None) -> str:
    if not models:
        raise Failure(
            "no model is loaded: choose one from 'appliance models list' and load it with 'appliance models "
            "load NAME --wait', or download one with 'appliance models pull ORG/NAME'"
        )
    if wanted is None:
        return models[0]
    if wanted not in models:
        raise Failure(f"unknown model {wanted!r}; available models: {', '.join(models)}")
    return wanted


def _answer_once(conversation: Conversation, prompt: str) -> int:
    try:
        _show(conversation.ask(prompt))
    except AnswerError as error:
        sys.stdout.flush()
        raise Failure(str(error)) from error
    except KeyboardInterrupt:
        _end_line()
        return _INTERRUPTED
    return 0


def _converse(conversation: Conversation, model: str) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and its keys)
    print(paint(f"Chatting with {printable(model)}. /help lists the commands, Ctrl-D exits.", "dim"))
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if not line or _is_command(conversation, line):
            continue
        try:
            _show(conversation.ask(line))
        except AnswerError as error:
            _end_line()
            print(paint(f"no answer: {printable(str(error))}", "red"))
        except KeyboardInterrupt:
            _end_line()
            print(paint("cancelled", "dim"))


def _is_command(conversation: Conversation, line: str) -> bool:
    if not re.fullmatch(r"/[a-z]+", line):
        return False
    if line == "/reset":
        conversation.reset()
        print(paint("Started a new conversation.", "dim"))
    elif line == "/help":
        print(paint(_HELP, "dim"))
    else:
        print(paint(f"{line} is not a command. Available commands: /reset, /help.", "dim"))
    return True


def _show(answer: Generator[Piece | End, None, None]) -> None:
    """Print the answer as it arrives and, on a terminal, its statistics."""
    terminal = is_terminal(sys.stdout)
    last = "\n"
    with contextlib.closing(answer):
        for part in answer:
            if isinstance(part, Piece):
                text = _CONTROL_CHARACTERS.sub("", part.text) if terminal else part.text
                last = text[-1:] or last
                print(text, end="", flush=True)
                continue
            if last != "\n":
                print(flush=True)
            if terminal and is_terminal(sys.stderr):
                print(paint(_summary(part), "dim", sys.stderr), file=sys.stderr, flush=True)


def _summary(end: End) -> str:
    facts = []
    if end.completion_tokens is not None:
        facts.append(f"{end.completion_tokens:,} tokens")
    if end.tokens_per_s is not None:
        facts.append(f"{end.tokens_per_s:.1f} tok/s")
    if end.ttft_s is not None:
        facts.append(f"TTFT {end.ttft_s * 1000:.0f} ms")
    if end.finish_reason != "stop":
        facts.append(f"ended by {printable(end.finish_reason)}")
    return " · ".join(facts)


def _end_line() -> None:
    # After an interruption, the cursor may be anywhere in the line: the answer was cut off and the terminal
    # has echoed ^C.
    print(flush=True)


def _sendable(text: str) -> str:
    """Return `text` without the characters that UTF-8 cannot encode. Such characters stand for invalid bytes
    in terminal input or arguments."""
    return text.encode("utf-8", "replace").decode()
