"""Tests of `appliance bench` from its command line to its output."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from tests.bench.fake_server import FakeServer
from tests.cli.conftest import Run, on_a_terminal
from tests.cli.test_help import loaded_by

SMALL = ("--concurrency", "2", "--requests", "4", "--prompt-tokens", "8", "--output-tokens", "4")


def test_a_run_prints_a_table_and_writes_its_measurements(cli: Run, fake: FakeServer, tmp_path: Path) -> None:
    fake.behaviour.ttft_s = lambda number: 0.02
    outcome = cli(
        "bench", "--base-url", fake.url, *SMALL, "--seed", "7", "--json", tmp_path / "new" / "out.json"
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert "fake at http://127.0.0.1:" in outcome.out and "seed 7" in outcome.out
    assert "4 of 4 requests" in outcome.out and "client" in outcome.out
    assert re.search(r"^ms +p50 +p90 +p99 +max$", outcome.out, re.MULTILINE)
    assert re.search(r"^TTFT +\d", outcome.out, re.MULTILINE)
    assert all(len(line) <= 80 for line in outcome.out.splitlines()[1:])
    assert "\x1b" not in outcome.out
    made = json.loads((tmp_path / "new" / "out.json").read_text())
    (result,) = made["results"]
    (run,) = result["runs"]
    assert made["model"] == "fake" and made["seed"] == "7"
    assert run["output_tokens"] == 16 and run["ttft_ms"]["p50"] >= 20
    assert (result["metric"], result["unit"]) == ("output_tok_s", "tok/s")
    assert (run["requests"], run["rate"]) == (4, None)
    assert len(run["per_request"]) == 4 and run["per_request"][0]["tokens"] == 4
    # The command sends one request as a probe, two as a warm-up, and four requests that are measured.
    assert len(fake.bodies) == 7


def test_named_workloads_are_compared_in_one_table(cli: Run, fake: FakeServer) -> None:
    outcome = cli("bench", "b1_decode", "ttft8k", "--base-url", fake.url, "--runs", "2", "--no-warm-up")
    assert outcome.code == 0
    assert [len(body["prompt"]) for body in fake.bodies[1:]] == [512, 512, 8192, 8192]
    assert [body["max_tokens"] for body in fake.bodies[1:]] == [256, 256, 1, 1]
    assert len({tuple(body["prompt"][:8]) for body in fake.bodies}) == 5
    assert outcome.out.count("median of 2 runs") == 2
    table = outcome.out[outcome.out.index("workload") :].splitlines()
    assert [line.split()[0] for line in table] == ["workload", "b1_decode", "ttft8k"]


def test_with_json_on_standard_output_nothing_else_is_written_to_it(cli: Run, fake: FakeServer) -> None:
    outcome = cli("bench", "--base-url", fake.url, *SMALL, "--json", "-")
    assert json.loads(outcome.out)["results"][0]["runs"][0]["succeeded"] == 4
    assert "4 of 4 requests" in outcome.err


def test_arrivals_at_a_rate_report_goodput(cli: Run, fake: FakeServer, tmp_path: Path) -> None:
    # Every other request exceeds the limit, which is far longer than a busy machine delays the others.
    fake.behaviour.ttft_s = lambda number: 10.0 if number % 2 else 0.0
    flags = ("--rate", "20", "--duration", "1", "--ttft-p99-ms", "9900", "--seed", "1", "--no-warm-up")
    outcome = cli("bench", "--base-url", fake.url, *flags, "--output-tokens", "2", "--json", tmp_path / "j")
    assert outcome.code == 0 and "goodput" in outcome.out and "20 requests/s (Poisson)" in outcome.out
    (result,) = json.loads((tmp_path / "j").read_text())["results"]
    (run,) = result["runs"]
    assert (run["requests"], run["rate"]) == (20, 20)
    assert 0.3 < run["goodput"] / run["requests_s"] < 0.7


@pytest.mark.parametrize(
    ("words", "warm_up"),
    [
        ("--rate 20 --duration 0.2", 4),
        ("--find-rate --rate 5 --duration 0.2 --ttft-p99-ms 0.001", 8),
        ("--requests 4", 4),
    ],
)
def test_every_mode_warms_up_unless_the_no_warm_up_option_is_given(
    cli: Run,
    fake: FakeServer,
    tmp_path: Path,
    words: str,
    warm_up: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No trial is stopped early. A trial that is stopped, as on a busy machine, would not be repeated.
    monkeypatch.setattr("appliance.bench.session.TRIAL_SHARE", 1000.0)

    def asked(*more: str) -> int:
        before = len(fake.bodies)
        flags = (*words.split(), *more, "--output-tokens", "1", "--json", tmp_path / "j")
        cli("bench", "--base-url", fake.url, *flags)
        made = json.loads((tmp_path / "j").read_text())
        counted = made["results"][0]["runs"] if made["results"] else made["search"]["trials"]
        return len(fake.bodies) - before - sum(run["requests"] for run in counted)

    assert asked() - asked("--no-warm-up") == warm_up


def test_the_highest_sustainable_rate_is_found(cli: Run, fake: FakeServer, tmp_path: Path) -> None:
    # The server handles at most 80 requests per second: four at a time, 50 ms each. One-token answers have no
    # ITL, so they cannot exceed an ITL limit.
    fake.behaviour.at_once = 4
    fake.behaviour.ttft_s = lambda number: 0.05
    words = "--find-rate --rate 60 --duration 0.6 --itl-p99-ms 200 --output-tokens 1 --seed 1"
    outcome = cli("bench", "--base-url", fake.url, *words.split(), "--json", tmp_path / "j")
    search = json.loads((tmp_path / "j").read_text())["search"]
    assert outcome.code == 0 and "highest sustained rate" in outcome.out
    rate, arrived = search["best"]["rate"], search["best"]["requests"]
    # The rate that the command finds depends on how busy the machine is. The tests with simulated servers
    # check stricter bounds.
    assert rate <= 80 * (1 + 2 / arrived**0.5 + 0.1) and fake.capacity <= 80
    assert rate > 0 and search["best"]["goodput"] > 0
    for trial in search["trials"]:
        growing = trial["backlog"]["after"] > trial["backlog"]["allowed"]
        assert growing == any("backlog" in reason for reason in trial["reasons"])
    # If the search tried a rate several times, the last trial counts.
    reasons = {trial["rate"]: trial["reasons"] for trial in search["trials"]}
    failed = [tried for tried in reasons if reasons[tried]]
    assert rate == max(tried for tried in reasons if not reasons[tried])
    if not failed:  # a busy machine made the client send late, which ended the search
        assert "client" in search["note"]
        return
    assert rate < min(failed) <= max(1.05 * rate, rate + 1 / 0.6) + 1e-9
    assert "no: " in outcome.out


def not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("--ttft-p99-ms", "TTFT p99 > 10 ms"), ("--itl-p99-ms", "E2E p99 > 2 s, half a trial")],
)
def test_a_hopeless_trial_is_stopped_and_a_search_without_a_sustained_rate_fails(
    cli: Run, fake: FakeServer, tmp_path: Path, limit: str, reason: str
) -> None:
    fake.behaviour.ttft_s = lambda number: 200.0 if number else 0.0
    # With this seed, the only request arrives in the first quarter of the trial, the quarter in which
    # response times are measured. The trial is stopped after 6 s, so that a busy machine sends the request
    # before.
    words = "--find-rate --rate 0.25 --duration 4 --output-tokens 1 --no-warm-up --seed 8"
    outcome = cli("bench", "--base-url", fake.url, *words.split(), limit, "10", "--json", tmp_path / "j")
    assert outcome.code == 1 and "did not sustain any tested rate, down to 0.25 requests/s" in outcome.out
    assert f"no: {reason}" in outcome.out
    made = json.loads((tmp_path / "j").read_text(), parse_constant=not_json)
    (trial,) = made["search"]["trials"]
    assert trial["backlog"]["response_s"] is None
    assert (trial["requests"], trial["unfinished"], trial["succeeded"]) == (1, 1, 0)
    assert trial["reasons"] == [reason]


def test_answers_that_end_early_count_the_tokens_received(cli: Run, fake: FakeServer) -> None:
    fake.behaviour.most_tokens = 3
    outcome = cli("bench", "--base-url", fake.url, *SMALL)
    assert outcome.code == 0
    said = " ".join(outcome.out.split())
    assert "4 of 4 answers have fewer than the 4 requested tokens" in said
    assert "ignores ignore_eos" in said and "the 12 tokens that were received" in said


def test_chunks_of_several_tokens_are_mentioned_in_the_output(cli: Run, fake: FakeServer) -> None:
    fake.behaviour.tokens_per_chunk = 2
    assert "a chunk contains 2.00 tokens" in cli("bench", "--base-url", fake.url, *SMALL).out


def test_failed_requests_are_shown_with_an_example_and_exit_1(cli: Run, fake: FakeServer) -> None:
    fake.behaviour.status = lambda number: 503 if number > 3 else 200
    outcome = cli("bench", "--base-url", fake.url, *SMALL)
    assert outcome.code == 1
    assert "failed: 3 × http 503: no, 503" in outcome.out


def test_prompts_stay_below_the_vocabulary_size_of_the_server_or_the_option(
    cli: Run, fake: FakeServer
) -> None:
    def said(*words: str) -> str:
        return " ".join(cli("bench", "--base-url", fake.url, *SMALL, "--no-warm-up", *words).out.split())

    assert "ids below 1,000 (a guess" in said()
    fake.behaviour.tokenizes = True
    assert "ids below 4,712 (from the server's tokenizer)" in said()
    fake.behaviour.models = [{"id": "fake", "meta": {"n_vocab": 300}}]
    assert "ids below 300 (from the server's list" in said()
    before = len(fake.bodies)
    assert "ids below 5 (--vocab-size)" in said("--vocab-size", "5")
    assert all(max(body["prompt"]) < 5 for body in fake.bodies[before:])


def test_a_key_is_sent_and_a_missing_key_is_reported(
    cli: Run, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.behaviour.api_key = "secret"
    refused = cli("bench", "--base-url", fake.url, *SMALL)
    assert refused.code == 1 and "401" in refused.err and "--api-key" in refused.err
    assert "unknown key" in refused.err
    assert cli("bench", "--base-url", fake.url, *SMALL, "--api-key", "secret").code == 0
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert cli("bench", "--base-url", fake.url, *SMALL).code == 0


def test_problems_are_reported_before_the_run(cli: Run, fake: FakeServer, run_dir: Path) -> None:
    (run_dir / "file").write_text("")
    for words, expected in (
        (("--base-url", "http://127.0.0.1:1"), "cannot connect to http://127.0.0.1:1/v1"),
        (("--base-url", "localhost:8080"), "is not a valid API address"),
        (("--base-url", fake.url + "/nowhere"), "lists no models"),
        (("--base-url", fake.url, "--model", "other"), "'other' is not served; available models: fake"),
        (("--base-url", fake.url, "--output-tokens", "9999"), "allows only 10000"),
        (("--base-url", fake.url, "--json", run_dir / "file" / "below"), "cannot be written"),
        (("--socket", run_dir / "none.sock"), "does not exist"),
        (("--socket", run_dir / "file"), "cannot connect to"),
        (("--run-dir", run_dir), "no service is running at"),
    ):
        outcome = cli("bench", *words)
        assert outcome.code == 1, words
        assert expected in outcome.err and outcome.err.count("\n") == 1, outcome.err
    fake.behaviour.status = lambda number: 400
    outcome = cli("bench", "--base-url", fake.url)
    assert outcome.code == 1 and "failed: http 400: no, 400" in outcome.err


def test_a_run_that_fails_leaves_the_json_file_unchanged(cli: Run, tmp_path: Path) -> None:
    new, kept, link = tmp_path / "new.json", tmp_path / "kept.json", tmp_path / "link.json"
    kept.write_text("{}")
    link.symlink_to(tmp_path / "none.json")
    for file in (new, kept, link):
        assert cli("bench", "--base-url", "http://127.0.0.1:1", "--json", file).code == 1
    assert set(tmp_path.glob("*.json")) == {kept, link}
    assert kept.read_text() == "{}" and link.is_symlink()


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("http1", "--concurrency", "2"),
        ("http1", "http256", "--rate", "1"),
        ("--rate", "1", "--requests", "2"),
        ("--find-rate",),
        ("--find-rate", "--itl-p99-ms", "5", "--runs", "2"),
        ("--duration", "5"),
        ("http1", "--duration", "5"),
        ("--base-url", "http://a", "--socket", "b"),
        ("--base-url", "http://a", "--run-dir", "b"),
        ("--socket", "a", "--run-dir", "b"),
        ("--concurrency", "0"),
    ],
    ids=" ".join,
)
def test_contradictory_options_are_a_command_line_error(cli: Run, words: tuple[str, ...]) -> None:
    outcome = cli("bench", *words)
    assert outcome.code == 2 and outcome.out == "" and "Error" in outcome.err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *itertools.product(
            ("--rate", "--duration", "--ttft-p99-ms", "--itl-p99-ms"),
            ("inf", "-inf", "nan", "0", "-1"),
        ),
        *itertools.product(
            ("--concurrency", "--requests", "--runs", "--workers", "--vocab-size"),
            ("0", "-1", "1" + 18 * "0"),
        ),
        *itertools.product(("--prompt-tokens", "--output-tokens"), ("0", "-1", "1" + 18 * "0")),
    ],
    ids=" ".join,
)
def test_a_number_out_of_range_is_refused_with_the_range(cli: Run, flag: str, value: str) -> None:
    outcome = cli("bench", "--base-url", "http://127.0.0.1:1", flag, value)
    said = " ".join(outcome.err.split())
    assert outcome.code == 2 and outcome.out == ""
    expected = rf"'{flag}': '{re.escape(value)}' is not valid: use a (whole )?number from [\d.,]+ to [\d.,]+$"
    assert re.search(expected, said), said


def test_more_requests_than_fit_into_memory_are_refused(cli: Run) -> None:
    outcome = cli("bench", "--base-url", "http://127.0.0.1:1", "--rate", "90000", "--duration", "500")
    assert outcome.code == 2 and "more than 2,000,000 requests" in " ".join(outcome.err.split())


def test_a_terminal_shows_progress_and_colour_unless_no_color_is_set(fake: FakeServer) -> None:
    fake.behaviour.ttft_s = lambda number: 0.3
    words = ("bench", "--base-url", fake.url, *SMALL, "--no-warm-up")
    shown = on_a_terminal(*words)
    assert re.search(r"\rcustom 1/1 \[[#.]{16}\] \d/4", shown) and "running" in shown
    assert "\x1b[1m" in shown
    plain = on_a_terminal(*words, NO_COLOR="1")
    assert not re.search(r"\x1b\[\d*m", plain)


def test_help_lists_the_workloads_without_loading_the_benchmark(cli: Run) -> None:
    outcome = cli("bench", "--help")
    assert outcome.code == 0
    for word in ("http256", "n1024_sampled", "--find-rate", "--run-dir", "--socket"):
        assert word in outcome.out
    assert loaded_by("bench", "--help").isdisjoint({"torch", "uvloop", "httpx"})
