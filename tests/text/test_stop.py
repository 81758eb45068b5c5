"""Tests that a stream finds stop strings exactly as a search of the whole text would, for random texts, stop
strings and cuts."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.text.stop import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, StopMatcher, StopSet, StopStringsError

FEW = st.text(alphabet="ab\n]^-", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n]^-", min_size=1, max_size=5), min_size=1, max_size=MAX_STOP_STRINGS)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Search all prefixes of the text, shortest first, and return the first match. If several stop strings
    end at the same position, return the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@given(text=FEW, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=20), include=st.booleans())
def test_the_result_is_that_of_a_search_of_the_whole_text(text, stops, cuts, include):
    matcher = StopMatcher(StopSet(stops), include)
    emitted = ""
    for piece in pieces_of(text, cuts):
        emitted += matcher.push(piece)[0]
    emitted += matcher.finish()
    assert (emitted, matcher.stopped) == naive(text, stops, include)


@given(text=FEW, stops=STOPS)
def test_only_the_longest_suffix_that_begins_a_stop_string_is_held_back(text, stops):
    matcher = StopMatcher(StopSet(stops))
    emitted = ""
    for position, character in enumerate(text):
        new, stopped = matcher.push(character)
        if stopped is not None:
            return
        emitted += new
        seen = text[: position + 1]
        held = max(n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops))
        assert emitted == seen[: len(seen) - held]


def test_nothing_is_emitted_after_a_match():
    matcher = StopMatcher(StopSet(["END"]))
    assert matcher.push("a E") == ("a ", None)
    assert matcher.push("ND b") == ("", "END")
    assert matcher.push("END c") == ("", "END")
    assert matcher.finish() == ""


def test_a_shared_set_keeps_no_state_of_its_matchers():
    stops = StopSet(["xy"])
    first, second = StopMatcher(stops), StopMatcher(stops)
    assert first.push("x") == ("", None)
    assert second.push("y") == ("y", None)
    assert first.push("y") == ("", "xy")


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["a", ""], "string 1 is empty"),
        (["a" * MAX_STOP_CHARACTERS, "b"], "has 4097 characters in total"),
    ],
)
def test_unusable_stop_strings_are_refused_by_name(stops, message):
    with pytest.raises(StopStringsError, match=message):
        StopSet(stops)


def test_long_self_similar_stop_strings_take_linear_time():
    matcher = StopMatcher(StopSet(["a" * (256 - n) + "b" for n in range(1, MAX_STOP_STRINGS + 1)]))
    started = time.perf_counter()
    emitted = sum(len(matcher.push("aaaa")[0]) for _ in range(20_000))
    assert emitted == 80_000 - 255
    assert time.perf_counter() - started < 60
