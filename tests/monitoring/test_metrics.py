"""Tests of the metrics: their text (parsed by prometheus-client), their agreement with the rows of the
request log, and their documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from appliance.monitoring.metrics.counting import CountedRows
from appliance.monitoring.metrics.exposition import Histograms, Numbers, Summaries, render
from appliance.monitoring.metrics.families import Families
from appliance.monitoring.metrics.families.requests import outcome
from appliance.monitoring.metrics.tenants import OTHERS, ShownTenants
from store.requests import RequestRow
from tests.core.simulated_service import Rows
from tests.examples import examples

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def samples(text: bytes) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text.decode()):
        yield from family.samples


def values(text: bytes, name: str) -> dict[tuple[str, ...], float]:
    """Return the series of one metric, by label values."""
    return {tuple(one.labels.values()): one.value for one in samples(text) if one.name == name}


def row(number: int = 0, **fields: object) -> RequestRow:
    told = {"tenant": "acme", "model": "m", "version": "v1", "status": 200, **fields}
    return RequestRow(request_id=f"r{number}", created_at=0.0, endpoint="/v1", **told)  # type: ignore[arg-type]


def counted(*tenants: str, most: int = 200) -> CountedRows:
    return CountedRows(Rows(), ShownTenants(most, lambda: tenants))


# ── the text ──


@examples(40)
@given(st.lists(st.tuples(st.text(), st.floats()), unique_by=lambda pair: pair[0]))
def test_an_independent_parser_reads_back_every_label_and_number(
    series: list[tuple[str, float]],
) -> None:
    family = Numbers("gauge", "g", "A gauge.", "label")
    for label, value in series:
        family.set(value, label)
    # prometheus-client's parser splits lines like str.splitlines. Prometheus itself splits only at line
    # feeds.
    text = render([family]).decode()
    read = {
        one.labels["label"]: one.value
        for line in text.split("\n")[2:-1]
        if len(line.splitlines()) == 1
        for metric in text_string_to_metric_families(line)
        for one in metric.samples
    }
    for label, value in series:
        if len((label.replace("\n", "") + "x").splitlines()) == 1:
            assert repr(read[label]) == repr(float(value))


def test_a_histogram_counts_into_the_buckets_that_prometheus_expects() -> None:
    family = Histograms("h", "A histogram.", (0.1, 1), "model")
    for value in (0.05, 0.1, 0.5, 7.0):
        family.observe(value, "m")
    text = render([family])
    assert values(text, "h_bucket") == {("m", "0.1"): 2, ("m", "1.0"): 3, ("m", "+Inf"): 4}
    assert values(text, "h_count") == {("m",): 4}
    assert values(text, "h_sum") == {("m",): 7.65}
    (metric,) = text_string_to_metric_families(text.decode())
    assert (metric.type, metric.documentation) == ("histogram", "A histogram.")


def test_a_summary_is_a_count_and_a_sum() -> None:
    family = Summaries("s", "A summary.")
    family.set(3, 1.5)
    (metric,) = text_string_to_metric_families(render([family]).decode())
    assert metric.type == "summary"
    assert {one.name: one.value for one in metric.samples} == {"s_count": 3, "s_sum": 1.5}


# ── counted tenants ──


def test_every_ended_row_is_counted_once_and_passed_on() -> None:
    rows = Rows()
    metrics = CountedRows(rows, ShownTenants(5, lambda: ("acme", "quiet")))
    metrics.open(row(1))
    metrics.end(row(1, prompt_tokens=5, cached_tokens=2, generated_tokens=7, billed_tokens=6, ttft_ms=20.0))
    metrics.end(row(2, tenant="quiet", request_class="P3", status=429, error="too many", prompt_tokens=1))
    assert (rows.opened, [one.request_id for one in rows.ended]) == (["r1"], ["r1", "r2"])
    text = render(metrics.families)
    assert values(text, "appliance_requests_total") == {("m", "P1", "ok"): 1, ("m", "P3", "refused"): 1}
    assert values(text, "appliance_prompt_tokens_total") == {("m", "P1"): 5, ("m", "P3"): 1}
    assert values(text, "appliance_cached_prompt_tokens_total")["m", "P1"] == 2
    assert values(text, "appliance_generated_tokens_total")["m", "P1"] == 7
    assert values(text, "appliance_billed_tokens_total")["m", "P1"] == 6
    assert values(text, "appliance_tenant_requests_total") == {("acme", "ok"): 1, ("quiet", "refused"): 1}
    assert values(text, "appliance_time_to_first_token_seconds_sum") == {("m", "P1"): 0.02}


def test_outcomes_follow_the_status_that_the_client_received() -> None:
    said = {status: outcome(row(status=status)) for status in (200, 400, 404, 409, 422, 429, 499, 500, 503)}
    assert said == {
        200: "ok",
        400: "rejected",
        404: "rejected",
        409: "rejected",
        422: "rejected",
        429: "refused",
        499: "cancelled",
        500: "failed",
        503: "refused",
    }
    assert outcome(row(status=200, error="the replica died for good")) == "failed"


def test_repeated_answers_count_as_requests_but_not_for_latency() -> None:
    metrics = counted("acme")
    metrics.end(row(1, ttft_ms=20.0, e2e_ms=30.0))
    metrics.end(row(2, ttft_ms=0.1, e2e_ms=0.2, retry="repeated", retry_of="r1"))
    text = render(metrics.families)
    assert values(text, "appliance_requests_total") == {("m", "P1", "ok"): 2}
    assert values(text, "appliance_retries_total") == {("m", "repeated"): 1}
    assert values(text, "appliance_request_seconds_count") == {("m", "P1"): 1}


def test_names_invented_by_clients_are_never_labels() -> None:
    metrics = counted("acme")
    for number in range(1000):
        metrics.end(row(number, model=f'no\n"such"\\{number}', version=None, status=404))
    text = render(metrics.families)
    assert values(text, "appliance_requests_total") == {(OTHERS, "P1", "rejected"): 1000}
    assert b"such" not in text


def test_tenants_beyond_the_limit_are_combined_and_no_request_is_lost() -> None:
    names = [f"tenant-{number}" for number in range(500)]
    metrics = counted(*names, most=200)
    for number, name in enumerate(names):
        metrics.end(row(number, tenant=name, billed_tokens=3))
    billed = values(render(metrics.families), "appliance_tenant_billed_tokens_total")
    assert len(billed) == 201
    assert billed[OTHERS,] == 3 * 300
    assert sum(billed.values()) == 3 * 500
    # A tenant that already has a separate label keeps the label, however busy other tenants are.
    for _ in range(50):
        metrics.end(row(tenant=names[-1]))
    assert list(metrics.tenants) == names[:200]


def test_a_deleted_tenant_frees_its_label_and_its_last_requests_are_not_lost() -> None:
    known = {"acme", "brief"}
    shown = ShownTenants(2, lambda: known)
    assert [shown.label(name) for name in ("acme", "brief", "late")] == ["acme", "brief", OTHERS]
    assert not shown.forget_deleted()
    known.remove("brief")
    known.add("late")
    assert shown.forget_deleted()
    assert [shown.label(name) for name in ("acme", "brief", "late")] == ["acme", OTHERS, "late"]


def test_series_of_removed_objects_are_dropped() -> None:
    family = Numbers("counter", "c_total", "A counter.", "tenant", "outcome")
    for name in ("acme", "brief"):
        family.add(1, name, "ok")
    family.keep("tenant", ("acme", OTHERS))
    assert values(render([family]), "c_total") == {("acme", "ok"): 1}


# ── the documentation ──


def test_the_page_documents_exactly_the_existing_metrics_with_kind_and_labels() -> None:
    told = {}
    for line in PAGE.read_text().splitlines():
        if found := re.match(r"\| `([\w:]+)` \| (\w+) \| (.*?) \|", line):
            told[found[1]] = (found[2], tuple(re.findall(r"`(\w+)`", found[3])))
    assert told == {family.name: (family.kind, family.labels) for family in Families()}


def test_the_metrics_that_operators_are_told_to_watch_exist() -> None:
    names = {family.name for family in Families()}
    rules = re.findall(r"^ +expr: (.+)$", (PAGE.parent / "operating.md").read_text(), re.MULTILINE)
    used = {name for rule in rules for name in re.findall(r"\b(?:appliance_|vllm:)\w+", rule)}
    assert len(rules) > 5 and {re.sub("_(bucket|sum|count)$", "", name) for name in used} <= names
