"""Finds stop strings in text that arrives in pieces. Text is held back only while it could be the beginning
of a stop string."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096
"""Maximum total number of characters in a request's stop strings. Building the automaton takes about 0.5 kB
of memory and 1 µs per character."""


class StopStringsError(ValueError):
    """Raised if a request's stop strings cannot be used. The message names the string and the reason."""


class StopSet:
    """A request's stop strings as an Aho-Corasick automaton (CACM 18/6, 1975), shared by the request's
    samples. A state represents the longest suffix of the text read so far that is a prefix of a stop string;
    state 0 is the empty text. The time taken per character does not depend on how many strings there are or
    how long they are.
    """

    __slots__ = ("begins", "children", "depth", "fallback", "match", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings` must contain at least one string. Raises `StopStringsError` if a string is empty or the
        strings are too long."""
        characters = sum(map(len, strings))
        if characters > MAX_STOP_CHARACTERS:
            raise StopStringsError(
                f"has {characters} characters in total; at most {MAX_STOP_CHARACTERS} are allowed"
            )
        self.strings = tuple(strings)
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        """For each state, the length of the text that it represents."""
        self.match = [-1]
        """For each state, the index of the longest stop string that ends in that state, or -1."""
        self.fallback = [0]
        """For each state, its failure link: the state that represents the next shorter suffix of the text."""
        for index, string in enumerate(self.strings):
            if not string:
                raise StopStringsError(f"string {index} is empty; each string needs at least one character")
            self._insert(string, index)
        self._link()
        first = "".join(re.escape(character) for character in self.children[0])
        self.begins = re.compile(f"[{first}]").search

    def _insert(self, string: str, index: int) -> None:
        state = 0
        for character in string:
            child = self.children[state].get(character)
            if child is None:
                child = self.children[state][character] = len(self.depth)
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(-1)
                self.fallback.append(0)
            state = child
        if self.match[state] < 0:
            self.match[state] = index

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self.children[state].items():
                self.fallback[child] = self.step(self.fallback[state], character)
                if self.match[child] < 0:
                    self.match[child] = self.match[self.fallback[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """Return the automaton's next state after reading `character` in `state`."""
        while True:
            child = self.children[state].get(character)
            if child is not None:
                return child
            if not state:
                return 0
            state = self.fallback[state]


class StopMatcher:
    """Searches a stream of text for stop strings. The first stop string to be completed ends the text; if one
    character completes several, the longest counts. The result therefore does not depend on how the text is
    divided into pieces.
    """

    __slots__ = ("_held", "_include_stop", "_set", "_state", "stopped")

    def __init__(self, stops: StopSet, include_stop: bool = False) -> None:
        """If `include_stop` is true, the emitted text includes the stop string."""
        self._set = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text to emit, and the stop string that was found, if any. No text is emitted after a
        stop string. If `may_stop` is false, stop strings that end within `text` are ignored."""
        if self.stopped is not None:
            return "", self.stopped
        stops = self._set
        state = self._state
        begin = 0
        if not state:
            first = stops.begins(text)
            if first is None:
                return text, None
            begin = first.start()
        step, match = stops.step, stops.match
        for position in range(begin, len(text)):
            state = step(state, text[position])
            if may_stop and match[state] >= 0:
                self.stopped = found = stops.strings[match[state]]
                whole = self._held + text[: position + 1]
                self._held = ""
                return (whole if self._include_stop else whole[: len(whole) - len(found)]), found
        self._state = state
        if self._include_stop:
            return text, None
        whole = self._held + text
        emitted = len(whole) - stops.depth[state]
        self._held = whole[emitted:]
        return whole[:emitted], None

    def finish(self) -> str:
        """Return the text still held back because it could have been the beginning of a stop string."""
        held, self._held = self._held, ""
        return held
