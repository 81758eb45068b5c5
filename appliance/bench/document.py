"""A benchmark's raw figures as a JSON document."""

from __future__ import annotations

import math
import time
from typing import Any

from appliance.bench.backlog import Backlog
from appliance.bench.messages import Record
from appliance.bench.rates import Found, Trial
from appliance.bench.results import Slo, Summary, distribution, tokens_of
from appliance.bench.server import Server, name_of
from appliance.bench.session import Measured, Result


def document(
    server: Server, seed: str, slo: Slo, results: list[Result], found: Found | None, version: str
) -> dict[str, Any]:
    """Everything that was measured. Times are milliseconds where the name ends in `_ms`; a request's `at_s`
    counts from its run's start, and all else of it from then. All numbers are finite; null stands where there
    is none."""
    made: dict[str, Any] = {
        "appliance": version,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": name_of(server.target),
        "model": server.model,
        "prompt_ids_below": server.vocabulary,
        "seed": seed,
        "slo": {"ttft_p99_ms": slo.ttft_p99_ms, "itl_p99_ms": slo.itl_p99_ms},
        "results": [_result(result) for result in results],
    }
    if found is not None:
        made["search"] = {
            "rate": found.best and found.best.rate,
            "goodput": found.best and found.best.summary.goodput,
            "resolution": found.best and round(found.best.resolution, 4),
            "note": found.note,
            "trials": [_trial(trial) for trial in found.trials],
        }
    return made


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "rate": trial.rate,
        "duration_s": trial.duration_s,
        "due": trial.requests,
        "sustained": trial.is_sustained,
        "reasons": list(trial.reasons),
        "given_up_after_s": None if trial.given_up_s is None else round(trial.given_up_s, 4),
        "backlog": _backlog(trial.backlog),
        **_summary(trial.summary),
    }


def _backlog(backlog: Backlog) -> dict[str, Any]:
    response_ms = None if math.isinf(backlog.response_s) else round(1000 * backlog.response_s, 3)
    return {
        "before": backlog.before,
        "after": backlog.after,
        "seconds": round(backlog.seconds, 4),
        "allowed": round(backlog.allowed, 2),
        "response_ms": response_ms,
        "growing": backlog.is_growing,
    }


def _result(result: Result) -> dict[str, Any]:
    shape = result.shape
    return {
        "name": result.name,
        "description": result.description,
        "requests": result.requests,
        "concurrency": result.concurrency,
        "rate": result.duration_s and result.requests / result.duration_s,
        "duration_s": result.duration_s,
        "prompt_tokens": shape.prompt_tokens,
        "output_tokens": shape.output_tokens,
        "temperature": shape.temperature,
        "top_p": shape.top_p,
        "figure": result.typical.summary.figure(result.figure),
        "unit": result.unit,
        "figures": [run.summary.figure(result.figure) for run in result.runs],
        "runs": [_run(run) for run in result.runs],
    }


def _run(run: Measured) -> dict[str, Any]:
    summary = run.summary
    return {
        **_summary(summary),
        "backlog": run.backlog and _backlog(run.backlog),
        "per_second": [
            {
                "output_tokens": round(second.output_tokens, 1),
                "first_tokens": second.first_tokens,
                "ended": second.ended,
                "running": second.running,
            }
            for second in summary.series
        ],
        "ttft_distribution_ms": [_bin(one.low, one.high, one.count) for one in distribution(summary.ttft_ms)],
        "itl_distribution_ms": [_bin(one.low, one.high, one.count) for one in distribution(summary.itl_ms)],
        "per_request": [
            _request(record, run.started_at) for record in sorted(run.records, key=lambda one: one.began_at)
        ],
    }


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "seconds": round(summary.seconds, 4),
        "requests": summary.requests,
        "succeeded": summary.succeeded,
        "unfinished": summary.unfinished,
        "failures": {
            kind: {"count": one.count, "example": one.example} for kind, one in summary.failures.items()
        },
        "output_tokens": summary.output_tokens,
        "prompt_tokens": summary.prompt_tokens,
        "tokens_counted_by_client": summary.tokens_counted_by_us,
        "chunks": summary.chunks,
        "short_answers": summary.short_answers,
        "output_tok_s": round(summary.output_tok_s, 2),
        "prompt_tok_s": round(summary.prompt_tok_s, 2),
        "requests_s": round(summary.requests_s, 4),
        "goodput": summary.goodput,
        **{
            f"{name}_ms": spread
            and {
                "p50": round(spread.p50, 3),
                "p90": round(spread.p90, 3),
                "p99": round(spread.p99, 3),
                "max": round(spread.max, 3),
            }
            for name, spread in (
                ("ttft", summary.ttft),
                ("itl", summary.itl),
                ("tpot", summary.tpot),
                ("e2e", summary.e2e),
            )
        },
        "late_p99_ms": round(summary.late_p99_ms, 3),
        "workers": summary.workers,
        "busiest_worker_cpu": round(summary.busiest_worker, 4),
    }


def _bin(low: float, high: float, count: int) -> dict[str, float]:
    return {"from": low, "to": high, "count": count}


def _request(record: Record, start: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "at_s": round(record.began_at - start, 4),
        "ttft_ms": None if record.first_at is None else round(1000 * (record.first_at - record.began_at), 3),
        "e2e_ms": round(1000 * (record.ended_at - record.began_at), 3),
        "late_ms": round(1000 * record.late_s, 3),
        "itl_max_ms": round(1000 * max(record.gaps_s), 3) if record.gaps_s else None,
        "tokens": tokens_of(record),
    }
    if record.failure:
        row |= {"failure": record.failure, "message": record.message}
    return row
