"""Finished requests: the newest rows of the request log. A request's details show where its time was
spent."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.actions import TargetKind
from appliance.pages import NamedRequest
from console import units
from console.context import Context
from console.lines import BLANK, Line, fact_lines
from console.roles import Role
from console.screens.panels import CLASS_ROLES
from console.screens.request_time import Part, time_lines
from console.screens.table import TableColumn, TableView
from console.source import MAX_ROWS, ListName


def _result(row: NamedRequest) -> str:
    reason = row.finish_reason or units.UNKNOWN
    return f"{row.status or units.UNKNOWN} {reason}" if row.failed else reason


def _result_role(row: NamedRequest) -> Role:
    if not row.failed:
        return "good"
    return "warn" if (row.status or 0) < 500 else "bad"


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _tokens_per_s(row: NamedRequest) -> float | None:
    return None if not row.itl_ms else 1000 / row.itl_ms


def _parts(row: NamedRequest) -> list[Part]:
    """Return a request's phases. Without a first token, all time after the queue counts as prefill.
    Interrupted requests have no measured duration, so their phases are unknown."""
    queue_s, ttft_s, total_s = _seconds(row.queue_ms), _seconds(row.ttft_ms), _seconds(row.e2e_ms)
    if queue_s is None or total_s is None:
        return []
    parts = [Part("queue", queue_s)]
    if ttft_s is None:
        return [*parts, Part("prefill", total_s - queue_s)]
    return [*parts, Part("prefill", ttft_s - queue_s), Part("decode", total_s - ttft_s)]


class FinishedView(TableView[NamedRequest]):
    """The screen that lists finished requests."""

    name = "finished"
    key = "4"
    title = "Finished requests"
    short = "Reqs"
    alternate = "requests"
    help_text = (
        f"The last {MAX_ROWS} finished requests in the request log, newest first. Press {{open}} to see how "
        "long a request spent in the queue, in prefill and in decode. Press {variant} to see the "
        "unfinished requests."
    )
    target: TargetKind = "request"
    sorted_by = "finished_at"
    reverse = True
    max_rows = MAX_ROWS
    empty = "no finished requests yet"
    columns = (
        TableColumn("request_id", "REQUEST", 10, lambda r: r.request_id, right=False, flexible=True),
        TableColumn(
            "finished_at",
            "ENDED",
            14,
            lambda r: r.finished_at,
            lambda r: units.short_date(r.finished_at),
            drop=2,
            unit="time",
        ),
        TableColumn("result", "RESULT", 10, _result, right=False, role=_result_role),
        TableColumn(
            "class_name",
            "CL",
            3,
            lambda r: r.request_class,
            right=False,
            role=lambda r: CLASS_ROLES.get(r.request_class, "dim"),
            drop=7,
        ),
        TableColumn("tenant", "TENANT", 11, lambda r: r.tenant, right=False, role=lambda r: "bold"),
        TableColumn(
            "key_name", "KEY", 14, lambda r: r.key_name or r.key_id, right=False, drop=9, role=lambda r: "dim"
        ),
        TableColumn("model", "MODEL", 13, lambda r: r.model, right=False, drop=4),
        TableColumn(
            "duration_s", "TIME", 6, lambda r: _seconds(r.e2e_ms), lambda r: units.ms(r.e2e_ms), unit="s"
        ),
        TableColumn(
            "queue_s",
            "QUEUE",
            6,
            lambda r: _seconds(r.queue_ms),
            lambda r: units.ms(r.queue_ms),
            drop=6,
            unit="s",
        ),
        TableColumn(
            "ttft_s",
            "TTFT",
            6,
            lambda r: _seconds(r.ttft_ms),
            lambda r: units.ms(r.ttft_ms),
            drop=5,
            unit="s",
        ),
        TableColumn(
            "prompt_tokens", "PROMPT", 7, lambda r: r.prompt_tokens, lambda r: units.count(r.prompt_tokens)
        ),
        TableColumn(
            "cached_tokens",
            "CACHED",
            7,
            lambda r: r.cached_tokens,
            lambda r: units.count(r.cached_tokens),
            drop=10,
        ),
        TableColumn(
            "generated_tokens",
            "OUT",
            6,
            lambda r: r.generated_tokens,
            lambda r: units.count(r.generated_tokens),
            role=lambda r: "output",
        ),
        TableColumn(
            "tokens_per_s", "TOK/S", 6, _tokens_per_s, lambda r: units.rate(_tokens_per_s(r)), drop=3
        ),
        TableColumn("replica", "REPLICA", 15, lambda r: r.replica, right=False, drop=11),
    )
    explanations = (
        *(column.name for column in columns),
        *("phases", "error", "arrived", "user", "peer", "endpoint", "unit", "streamed", "itl_ms"),
        *("request_preemptions", "resubmissions"),
    )

    def lists(self) -> tuple[ListName, ...]:
        return ("finished",)

    def rows(self, context: Context) -> Sequence[NamedRequest]:
        return context.rows_of("finished", NamedRequest)

    def id_of(self, row: NamedRequest) -> str:
        return row.request_id

    def note(self, context: Context) -> str:
        count = sum(row.failed for row in self.rows(context))
        return f"{count} failed" if count else ""

    def describe(self, row: NamedRequest, context: Context, width: int) -> list[Line]:
        lines: list[Line] = [
            BLANK,
            *time_lines("Time from arrival to completion", _seconds(row.e2e_ms), _parts(row), width),
            BLANK,
        ]
        facts = (
            ("result", f"{row.finish_reason or units.UNKNOWN}, HTTP status {row.status or units.UNKNOWN}"),
            ("error", row.error or "none"),
            ("arrived", units.date(row.created_at)),
            ("ended", units.date(row.finished_at)),
            ("class", row.request_class),
            ("tenant", row.tenant or "none"),
            ("key", " ".join(part for part in (row.key_name, row.key_id) if part) or "none"),
            ("user", row.user or "none"),
            ("peer", row.peer or "none"),
            ("endpoint", row.endpoint),
            (
                "model",
                f"{row.model or units.UNKNOWN}" + (f" for {row.fallback_of}" if row.fallback_of else ""),
            ),
            ("answered by", row.unit or row.model or units.UNKNOWN),
            ("replica", row.replica or "none (never started)"),
            ("streamed", "yes" if row.stream else "no"),
            ("prompt tokens", f"{units.count(row.prompt_tokens)} ({units.count(row.cached_tokens)} cached)"),
            (
                "output tokens",
                f"{units.count(row.generated_tokens)} ({units.count(row.billed_tokens)} delivered)",
            ),
            ("inter-token time", units.ms(row.itl_ms)),
            ("preemptions", units.count(row.preemptions)),
            ("resubmissions", units.count(row.resubmissions)),
        )
        return lines + fact_lines(facts, width)
