"""Tests of styled lines, values with units, charts and filters."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from appliance.quantities import future_time, past_time
from console import units
from console.filters import FilterError, FilterField, matcher, sort_rows
from console.glyphs import GLYPH_SETS, GlyphSet, bar, bar_legend, chart, meter
from console.lines import cells, clip, fit, heading, line, plain, span, spread, width_of, wrap


def test_a_span_contains_no_escape_sequence_of_a_client() -> None:
    shown = span("\x1b[31mred\x1b]52;c;x\x07 \u202e evil\n").text
    assert shown.isprintable()
    assert "red" in shown


@pytest.mark.parametrize("text", ["short", "a long text that is cut", "数据中心的模型", "äöü", ""])
@pytest.mark.parametrize("width", [1, 2, 7, 12])
def test_a_fitted_text_has_exactly_its_width(text: str, width: int) -> None:
    assert cells(fit(text, width)) == width
    assert cells(fit(text, width, right=True)) == width
    assert width_of(clip(line(text, text), width)) == width


def test_headings_and_spread_lines_have_the_width_of_their_panel() -> None:
    for width in (5, 12, 30, 80):
        assert width_of(heading("Tokens per second", width, "59s of history")) == width
        assert width_of(spread(line("left"), line("right"), width)) == width


def test_wrapping_keeps_all_words() -> None:
    text = "state changed from active to suspended: review the impact"
    assert " ".join(plain(row) for row in wrap(text, 20)) == text
    assert all(width_of(row) <= 20 for row in wrap(text, 20))


@pytest.mark.parametrize("word", ["/srv/models/" + "x" * 50, "日本語" * 9, "日本" + "x" * 30])
def test_wrapping_divides_words_that_are_longer_than_a_line(word: str) -> None:
    for width in (1, 2, 3, 8, 20):
        rows = wrap(f"in {word} now", width)
        assert "".join(plain(row) for row in rows).replace(" ", "") == f"in{word}now"
        # A wide character does not fit in one column.
        assert all(width_of(row) <= max(2, width) for row in rows)


def test_a_time_beyond_the_calendar_is_shown_as_a_number() -> None:
    assert units.date(1e300) == units.clock(1e300) == "1e+300"


def test_a_time_before_1970_is_refused() -> None:
    for text in ("999999999999999w", "-30000d"):
        with pytest.raises(ValueError, match="is too long: use at most 20777d"):
            past_time(text, _NOON)
    with pytest.raises(ValueError, match="'1969-12-31' is out of range: use a date from 1971 to 2999"):
        past_time("1969-12-31", _NOON)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("soon", "'soon' is not valid: use a time span such as 90d, or a date such as 2026-11-20"),
        ("14:03", "'14:03' is not valid"),
        ("-20m", "'-20m' is not valid"),
        ("2026-11-20", "'2026-11-20' is in the past: use a future date, or a time span from now such as 90d"),
        ("99999d", "'99999d' is too long: use at most 36525d"),
        ("3000-01-01", "'3000-01-01' is out of range: use a date from 1971 to 2999"),
        ("9" * 50, "'9999999999999999999999999999999999999999…' is not valid"),
    ],
)
def test_a_message_about_a_future_time_names_the_value_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        future_time(text, _NOON)


def test_a_future_time_is_a_time_span_or_a_date() -> None:
    assert future_time("90d", _NOON) == _NOON + 90 * 86_400
    assert future_time(" 2026-11-21 ", _NOON) == datetime(2026, 11, 21).timestamp()
    assert future_time("2026-11-20T12:01+00:00", 0.0) == datetime(2026, 11, 20, 12, 1, tzinfo=UTC).timestamp()


def test_unknown_values_are_two_dashes_and_never_zero() -> None:
    for form in (units.count, units.short, units.rate, units.percent, units.ms, units.seconds, units.size):
        assert form(None) == "--"
        assert form(0) != "--"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.short(999), "999"),
        (units.short(12_345), "12.3k"),
        (units.short(123_456), "123k"),
        (units.short(999_960), "1.0M"),
        (units.rate(0.04), "<0.1"),
        (units.ms(87.66), "87.7ms"),
        (units.ms(450.2), "450ms"),
        (units.ms(6205), "6.21s"),
        (units.seconds(59.9), "59s"),
        (units.seconds(3700), "1h01m"),
        (units.size(141 << 30), "141G"),
        (units.percent(0.256), "26%"),
        (units.ms(0.04), "<0.1ms"),
        (units.ms(0.06), "0.1ms"),
        (units.ms(0.0), "0.0ms"),
        (units.seconds(0.04), "<0.1s"),
        (units.seconds(0.0), "0.0s"),
        (units.us(0.4), "<1µs"),
        (units.us(0.0), "0µs"),
        (units.percent(0.0), "0%"),
        (units.percent(0.004), "<1%"),
        (units.percent(0.005), "<1%"),
        (units.percent(0.006), "1%"),
        (units.percent(0.994), "99%"),
        (units.percent(0.996), "99%"),
        (units.percent(0.999999), "99%"),
        (units.percent(1.0), "100%"),
        (units.percent(1.004), "100%"),
        (units.percent(0.0004, 1), "<0.1%"),
        (units.percent(0.9996, 1), "99.9%"),
    ],
)
def test_values_have_at_most_three_digits_and_a_unit(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_bar_shows_every_part_that_is_not_empty() -> None:
    parts = bar([(0.001, "used"), (0.5, "cached")], 20, "block")
    assert [one.role for one in parts] == ["used", "cached", "track"]
    assert sum(len(one.text) for one in parts) == 20
    assert "·" in plain(meter(None, 10, "block"))


@pytest.mark.parametrize("glyphs", GLYPH_SETS)
def test_the_parts_of_a_bar_differ_by_character_and_not_only_by_colour(glyphs: GlyphSet) -> None:
    parts = bar([(0.25, "cached"), (0.25, "used"), (0.25, "warn")], 20, glyphs)
    assert [len(one.text) for one in parts] == [5, 5, 5, 5]
    letters = [set(one.text) for one in parts]
    assert len(set().union(*letters)) == 4 and all(len(one) == 1 for one in letters)
    legend = bar_legend(("weights", "KV cache", "other"), glyphs)
    first, second, third = (one.text[0] for one in parts[:3])
    assert legend == f"{first} weights, {second} KV cache, {third} other"


def test_a_chart_marks_unknown_values_and_leaves_the_time_before_the_first_empty() -> None:
    rows = chart([None, None, 4.0, 8.0], 4, 1, "block", "output")
    assert rows[0][0].text == "┄┄▄█"
    assert chart([8.0], 4, 1, "block", "output")[0][0].text == "   █"
    assert chart([8.0], 4, 1, "ascii", "output")[0][0].text.isascii()


FIELDS = (
    FilterField(("tenant", "name"), lambda row: row[0], lambda row: row[0]),
    FilterField(("age", "age_s"), lambda row: row[1], lambda row: f"{row[1]:.1f}s"),
    FilterField(("tok/s", "tokens_per_s"), lambda row: 300, lambda row: "300"),
)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("acme", True),
        ("tenant:ACM", True),
        ("!tenant:acme", False),
        ("name:acm", True),
        ("age:12.5s", True),
        ("!age:12.5s", False),
        ("tenant=acm", False),
        ("tenant=ACME", True),
        ("!tenant=acm", True),
        ("!tenant=acme", False),
        ('tenant="acme"', True),
        ("tenant=", False),
        ("age_s=12.5", True),
        ("age=12.5s", True),
        ("age=12", False),
        ("age_s>10", True),
        ("AGE>10", True),
        ("tok/s>300", False),
        ("age_s>=2k", False),
        (">10", True),
        ("acme age_s<10", False),
        ("", True),
    ],
)
def test_a_row_must_match_all_terms_of_a_filter(text: str, matches: bool) -> None:
    assert matcher(text, FIELDS, "age_s")(("acme", 12.5)) is matches


_NOON = datetime(2026, 11, 20, 12).timestamp()
MEASURES = (
    FilterField(("ttft",), lambda row: 0.35, lambda row: "350ms", "s"),
    FilterField(("age",), lambda row: 150.0, lambda row: "2m30s", "s"),
    FilterField(("weights",), lambda row: 3 * 2**29, lambda row: "1.5G", "bytes"),
    FilterField(("share",), lambda row: 0.25, lambda row: "25%", "%"),
    FilterField(("power",), lambda row: 310.0, lambda row: "310W", "W"),
    FilterField(("temp",), lambda row: 71.0, lambda row: "71°C", "°C"),
    FilterField(("out",), lambda row: 2500, lambda row: "2,500", ""),
    FilterField(("change",), lambda row: -0.5, lambda row: "-0.5", ""),
    FilterField(("until",), lambda row: _NOON, lambda row: "2026-11-20 12:00:00", "time"),
    FilterField(("tenant",), lambda row: "ms", lambda row: "ms", ""),
    FilterField(("reason",), lambda row: "Two words", lambda row: "Two words", ""),
    FilterField(("unknown",), lambda row: None, lambda row: "  --", "s"),
)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        *[("ttft>349ms", True), ("ttft>350ms", False), ("ttft>0.3", True), ("ttft<1s", True)],
        *[("age>2m", True), ("age>2m29s", True), ("age>2m31s", False), ("age>1h", False), ("age>2min", True)],
        *[("weights>1GiB", True), ("weights>1.4G", True), ("weights>1.6G", False), ("weights<2T", True)],
        *[("share>24%", True), ("share>26%", False), ("share>0.2", True)],
        *[("power>300W", True), ("temp>70°C", True), ("temp<70C", False), ("out>2.4k", True)],
        *[("out>2,499", True), ("out>2,500", False), ("out>=2,500.0", True), ("out<1,234,567", True)],
        *[("ttft>349 ms", True), ("ttft>350 ms", False), ("ttft>0.3 ms ms", True), ("age>2 m", True)],
        *[("weights>1.6 GiB", False), ("out>2.4 k", True), ("out>2 ms", True), ("out>2 nothing", False)],
        *[("change<-0.4", True), ("change<-0.6", False), ("change>-1", True)],
        *[("until>2026-11-20", True), ("until>2026-11-21", False), ("until>2026-11-20T11:59", True)],
        *[("until>2026-11-20 11:59:59", True), ("until>2026-11-20 12:00:00", False)],
        *[("until>11:59", True), ("until>12:01", False), ("until>-20m", False), ("until<-20m", True)],
        *[("until>11-20 11:59:59", True), ("until>11-20 12:00", False), ("until>12-31", True)],
        *[(f"until={_NOON:.0f}", True), (f"until<{_NOON:.0f}", False)],
        *[("until=2026-11-20 12:00:00", True), ("until=11-20 12:00:01", False), ("until=12:00", True)],
        *[("ttft=350ms", True), ("ttft=35", False), ("ttft=0.35", True), ("ttft=350 ms", True)],
        *[
            ("share=25%", True),
            ("share=2", False),
            ("out=2,500", True),
            ("out=2500", True),
            ("out=250", False),
        ],
        *[('reason="two words"', True), ('reason="two words" out>1', True), ('!reason="two words"', False)],
        *[("reason=two", False), ("reason:two", True), ('reason="two" words', False), ("unknown=--", True)],
    ],
)
def test_a_filter_takes_the_units_that_a_column_shows(text: str, matches: bool) -> None:
    assert matcher(text, MEASURES, "", _NOON + 3600)(None) is matches


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft>1GiB", r"'1GiB' is not a value of ttft: use ms, s, m, h, d, .*, as in ttft>20ms, or no unit"),
        ("weights>5s", r"'5s' is not a value of weights: use K, M, G, T, B, KiB, .*, as in weights>20K, "),
        ("out>1k5k", r"'1k5k' is not a value of out"),
        ("out>1.2.3", r"'1.2.3' is not a value of out"),
        ("out>50%", r"'50%' is not a value of out"),
        *(
            (f"out>{one}", f"'{one}' is not a value of out")
            for one in ("12,34", "1,2345", "1-2", "x", "", "-")
        ),
        ("age>1-2", r"'1-2' is not a value of age"),
        ("out>2026-11-20", r"'2026-11-20' is not a value of out"),
        (
            "tenant>acme",
            r"'acme' is not a value of tenant: .*; to compare text, use tenant=TEXT or tenant:TEXT",
        ),
        (
            "until>soon",
            r"'soon' is not a time: .* as in until>14:03; to compare text, use until=TEXT or until:T",
        ),
        ("until>2026-13-01", r"'2026-13-01' is not a time"),
        ("size>3,5", r"unknown column 'size'"),
    ],
)
def test_an_error_about_a_wrong_unit_names_the_units_of_the_column(text: str, message: str) -> None:
    with pytest.raises(FilterError, match=message):
        matcher(text, MEASURES, "")


@pytest.mark.parametrize("text", ["<think>", "->", "=", ">x"])
def test_a_comparison_sign_without_field_and_number_is_plain_text(text: str) -> None:
    matches = matcher(text, FIELDS, "age_s")
    assert matches((f"a {text} b", 1.0)) and not matches(("acme", 1.0))


def test_an_unknown_value_matches_no_comparison() -> None:
    assert not matcher("age_s<10", FIELDS, "age_s")(("acme", None))


def test_a_filter_with_an_unknown_column_names_the_columns() -> None:
    with pytest.raises(FilterError, match=r"unknown column 'size': use one of tenant, age, tok/s"):
        matcher("size>3", FIELDS, "age_s")


def test_rows_with_unknown_values_come_last_in_both_directions() -> None:
    rows = [("a", 1.0), ("b", None), ("c", 3.0)]
    assert [row[0] for row in sort_rows(rows, FIELDS[1].value, reverse=False)] == ["a", "c", "b"]
    assert [row[0] for row in sort_rows(rows, FIELDS[1].value, reverse=True)] == ["c", "a", "b"]
