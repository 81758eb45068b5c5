"""Manages the lifecycle of a validated request: admission, submission to a replica, resubmission if the
replica is lost, and settlement."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from appliance.channel.core_messages import Admitted, Refused
from appliance.channel.front_messages import (
    FinishReasons,
    RequestProgress,
    Settle,
    ShadowMeasure,
    join_reasons,
)
from appliance.front.app_state import AppState
from appliance.front.errors import ApiError, engine_error, internal_error, refusal_error
from appliance.front.generation_task import GenerationTask
from appliance.front.keeping import Transcript
from appliance.front.limits import rate_limit_headers
from appliance.front.request_context import RequestContext
from appliance.front.request_messages import admit_message, submit_messages
from appliance.front.sample import Sample, samples_of
from engine.client import ReplicaClient
from engine.messages import FinishReason, Output, Submit

log = logging.getLogger(__name__)

MAX_RESUBMISSIONS = 3
_RESUBMIT_DELAY_S = 0.02
"""Delay in seconds before the first resubmission. The delay doubles each time, giving the core time to notice
that the replica is lost."""

_MAX_BACKLOG_BYTES = 1 << 20
"""No resubmission is sent to a replica while its channel has more than this many unread bytes."""
_BACKLOG_CHECK_S = 0.005

CLIENT_DISCONNECTED = 499


class Generation:
    """Runs one request: responds to messages from the core, outputs from the replica, and a client
    disconnect. `ended` is set once the request has finished: either every sample has a `finish_reason`, or
    `failure` holds an error, or `left` is set because the client disconnected. The response calls `settle`
    after writing the answer.
    """

    def __init__(self, state: AppState, context: RequestContext, task: GenerationTask) -> None:
        self.state = state
        self.context = context
        self.task = task
        self.is_kept = context.identity.log_policy != "metadata"
        """Whether the tenant's log policy keeps prompts and answers."""
        self.samples = samples_of(task, self.is_kept)
        self.begun = asyncio.Event()
        """An event that is set when the first output arrives, or when the request finishes without output."""
        self.ended = asyncio.Event()
        self.failure: ApiError | None = None
        self.left = False
        self.ran = False
        """Whether the request has been submitted to a replica."""
        self.on_progress: Callable[[Sample], None] | None = None
        """Called after an output has been added to a sample."""
        self.on_end: Callable[[], None] | None = None
        """Called when the request has finished, and again when its client disconnects."""
        self.record: Callable[[bytes], None] | None = None
        """Called with each part of the answer's body, if the answer is kept for retries. If None, the request
        ends when its client disconnects."""
        self.on_fallback: Callable[[], None] | None = None
        """Called after the request has moved to its fallback model and its `task` and `samples` have been
        replaced, which can happen only before the first output."""
        self.headers: dict[str, str] = {}
        """Response headers that describe the caller's rate limits."""
        self.prompt_tokens = task.prompt_tokens
        """Total number of tokens in all prompts."""
        self.completion_tokens = 0
        """Number of answer tokens generated so far by all samples, excluding tokens after a stop string."""
        self.cached_tokens = 0
        """Number of prompt tokens found in the prefix cache. A prompt is counted when its first output
        arrives."""
        self.delivered_tokens = 0
        """Number of output tokens written to the client. Updated by the response."""
        self.first_bytes_at: float | None = None
        """Monotonic time, in seconds, at which the stream's first bytes were written. Set by the response."""
        self.last_token_at = 0.0
        """Monotonic time, in seconds, at which the latest output token arrived."""
        self._open = len(self.samples)
        self._attempt = 0
        self._preempted: set[int] = set()
        """Indices of the attempts, starting at 0, that ended because the replica was stopped to make room for
        another model. Such attempts do not count as lost replicas."""
        self._submitted = False
        self._settled = False
        self._link: ReplicaClient | None = None
        self._handles: list[int] = []
        self._submitted_at = 0.0
        self._first_token_at: float | None = None
        self._retry: asyncio.TimerHandle | None = None

    # ── events from the client ──

    def start(self) -> None:
        """Request admission from the core."""
        self.state.active[self.context.request_id] = self
        self.context.admitted = True
        self.context.connection.on_disconnect = self.client_disconnected
        self._ask()
        self.context.prepared()
        self.state.charge(self.context, self.context.encoded_tokens - self.task.prompt_tokens)

    def client_disconnected(self, error: str = "the client disconnected") -> None:
        """End the request, because its client has disconnected. If the answer is kept for retries, the
        request continues."""
        if self.record is None:
            self.left = True
            self._drop()
            self._end()
            self.settle(CLIENT_DISCONNECTED, error)
        if self.on_end is not None:
            # End the stream or, if the answer is kept, record the events held back for a slow client.
            self.on_end()

    def too_slow(self) -> None:
        """Close the connection, because the client is reading its answer too slowly."""
        self.client_disconnected("the client read the answer too slowly")
        self.context.connection.cut_off()

    # ── messages from the core ──

    def admitted(self, message: Admitted) -> None:
        """Submit the request to the replica chosen by the core."""
        if message.attempt != self._attempt or self.ended.is_set() or self._submitted:
            return
        link = self.state.replicas.get(message.replica)
        if link is None:
            self._replica_disconnected()
            return
        self._link = link
        self._submitted = self.ran = True
        self._submitted_at = time.monotonic()
        self.task.fall_back = None
        if not self.task.needs_body:
            self.context.body.release()
        self.headers = rate_limit_headers(message.rate_limits)
        if message.most_tokens is not None:
            for prompt in self.task.prompts:
                prompt.max_tokens = min(prompt.max_tokens, message.most_tokens)
        messages = submit_messages(self.context, self.task, self.samples, link, message)
        submissions = ((submit, self._sink(submit.handle, group)) for submit, group in messages)
        if self._attempt:
            self.state.background.run(self._submit_in_turns(link, submissions))
            return
        for submit, sink in submissions:
            self._handles.append(submit.handle)
            link.submit(submit, sink, self._replica_disconnected)
            if self._link is not link:
                # The channel to the replica broke, so all submissions will be repeated on another replica.
                break

    def refused(self, message: Refused) -> None:
        """End the request after the core has refused it. If this was the first attempt, the core has already
        closed the request's log row. On a later attempt, the client may have received part of the answer, so
        the core waits for `settle`.
        """
        if message.attempt != self._attempt or self._settled:
            return
        if message.falls_back:
            self.state.background.run(self._fall_back(refusal_error(message)))
            return
        if not self._attempt:
            self._settled = True
            self.state.active.pop(self.context.request_id, None)
        self.headers = rate_limit_headers(message.rate_limits)
        self._fail(refusal_error(message))

    async def _fall_back(self, refusal: ApiError) -> None:
        """Prepare the request for its fallback model and request admission again. If the fallback model
        cannot answer it either, the client gets the core's refusal for the original model."""
        prepare, self.task.fall_back = self.task.fall_back, None
        try:
            if prepare is None:
                raise refusal
            task = await prepare()
        except ApiError:
            self.context.prepared()
            self._fail(refusal)
            return
        except Exception:
            log.exception("request %s could not be prepared for the fallback model", self.context.request_id)
            self.context.prepared()
            self._fail(refusal)
            return
        if not self.ended.is_set():
            self.task, self.samples = task, samples_of(task, self.is_kept)
            self._open, self.prompt_tokens = len(self.samples), task.prompt_tokens
            if self.on_fallback is not None:
                self.on_fallback()
            self._ask()
        self.context.prepared()

    def abort(self, message: str) -> None:
        """End the request immediately because an operator or a drain has cancelled it."""
        self._fail(ApiError(503, message, code="aborted", retry_after_s=1.0))

    def preempted(self) -> None:
        """Record that the replica is about to be stopped so that another model can be loaded."""
        self._preempted.add(self._attempt)

    def progress(self) -> RequestProgress:
        """Return the request's progress, for operators."""
        first = self._first_token_at
        return RequestProgress(
            self.context.request_id,
            self._generated_tokens,
            self.cached_tokens,
            None if first is None else self.context.elapsed_ms(first) / 1000.0,
        )

    @property
    def _generated_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    # ── outputs from the replica ──

    def _take(self, handle: int, sample: Sample, output: Output) -> None:
        prompt = sample.prompt
        if output.cached_tokens is not None and prompt.cached_tokens is None:
            prompt.cached_tokens = output.cached_tokens
            self.cached_tokens += output.cached_tokens
        if output.prompt_logprobs is not None:
            prompt.logprobs = output.prompt_logprobs
        if sample.finish_reason or self.failure is not None or self.left:
            return
        if output.finish_reason in ("error", "cancelled"):
            self._fail(engine_error(output))
            return
        delivered = sample.delivered
        try:
            sample.take(output)
        except Exception:
            # The message also contains outputs for other requests, so an error must end only this request.
            log.exception("request %s: failed to process an output", self.context.request_id)
            self._fail(internal_error())
            return
        self.completion_tokens += sample.delivered - delivered
        if output.token_ids:
            self.state.tokens += len(output.token_ids)
            self.last_token_at = now = time.monotonic()
            if self._first_token_at is None:
                self._first_token_at = now
                self.begun.set()
        if sample.finish_reason:
            self._open -= 1
            if not output.finish_reason and self._link is not None:
                self._link.cancel(handle, sample.number)
        if self.on_progress is not None:
            self.on_progress(sample)
        if not self._open:
            self._end()

    def _replica_disconnected(self) -> None:
        """Schedule a resubmission, because the replica was lost. Called once for each submission that was
        running on the replica."""
        self._link = None
        self._handles.clear()
        if self.ended.is_set() or self._retry is not None:
            return
        losses = self._attempt - len(self._preempted - {self._attempt})
        gives_up = losses >= MAX_RESUBMISSIONS and self._attempt not in self._preempted
        if gives_up or self.task.shadow_of:
            self._fail(
                ApiError(
                    503,
                    f"the model's replica failed {losses + 1} times during this request",
                    code="replica_failed",
                    retry_after_s=5.0,
                )
            )
            return
        delay_s = _RESUBMIT_DELAY_S * 2 ** min(losses, MAX_RESUBMISSIONS)
        self._retry = asyncio.get_running_loop().call_later(delay_s, self._ask_again)

    def _ask_again(self) -> None:
        self._retry = None
        if not self.ended.is_set():
            self._attempt += 1
            self._ask()

    # ── messages to the core and the replica ──

    def _ask(self) -> None:
        self._submitted = False
        has_choice = len(self.state.replicas) > 1
        self.state.to_core(admit_message(self.context, self.task, self.samples, self._attempt, has_choice))

    async def _submit_in_turns(
        self, link: ReplicaClient, submissions: Iterator[tuple[Submit, Callable[[Output], None]]]
    ) -> None:
        """Send the submissions one by one, no faster than the replica reads them, because each contains a
        whole prompt. The core has already counted every submission, so all of them must be sent. If the
        request has already finished, each submission is cancelled immediately after it is sent.
        """
        attempt = self._attempt
        for submit, sink in submissions:
            if link.closed:
                if self._attempt == attempt:
                    self._replica_disconnected()
                return
            self._handles.append(submit.handle)
            link.submit(submit, sink, self._replica_disconnected)
            if self.ended.is_set():
                link.cancel(submit.handle)
                link.forget(submit.handle)
            await asyncio.sleep(0)
            while link.backlog_bytes > _MAX_BACKLOG_BYTES and not link.closed:
                await asyncio.sleep(_BACKLOG_CHECK_S)

    def _sink(self, handle: int, group: list[Sample]) -> Callable[[Output], None]:
        take = self._take
        if len(group) == 1:
            sample = group[0]
            return partial(take, handle, sample)
        first = group[0].number
        return lambda output: take(handle, group[output.sample - first], output)

    # ── end and settlement ──

    def _fail(self, error: ApiError) -> None:
        if self.ended.is_set():
            return
        self.failure = error
        self._drop()
        self._end()

    def _drop(self) -> None:
        """Cancel the samples still being generated by the replica."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._link is not None and self._open:
            for handle in self._handles:
                self._link.cancel(handle)

    def _end(self) -> None:
        if self.ended.is_set():
            return
        self.begun.set()
        self.ended.set()
        if self._link is not None:
            for handle in self._handles:
                self._link.forget(handle)
        if self.on_end is not None:
            self.on_end()

    def settle(self, status: int, error: str = "") -> None:
        """Report the request's end to the core. Calling this again has no effect."""
        if self._settled:
            return
        self._settled = True
        self.context.connection.release()
        self.state.active.pop(self.context.request_id, None)
        now = time.monotonic()
        first = self.first_bytes_at or self._first_token_at
        gaps = self._generated_tokens - len(self.samples)
        itl_ms = None
        if gaps > 0 and self._first_token_at is not None:
            # Count the elapsed time once per sample: the samples run in parallel, so in each engine step,
            # every sample waits for its next token.
            itl_ms = (self.last_token_at - self._first_token_at) * 1000.0 * len(self.samples) / gaps
        self.state.to_core(
            Settle(
                request_id=self.context.request_id,
                submitted=self._submitted,
                status=status,
                finish_reason=self.finish_reason(status),
                error=error[:500],
                delivered_tokens=self.delivered_tokens,
                ttft_ms=None if first is None else self.context.elapsed_ms(first),
                itl_ms=itl_ms,
                e2e_ms=self.context.elapsed_ms(now),
            )
        )

    def another(self, context: RequestContext, task: GenerationTask) -> Generation:
        """Create a `Generation` for another request in the same front."""
        return Generation(self.state, context, task)

    def measure(self) -> ShadowMeasure | None:
        """Return the answer's timings and length, or None if the answer is empty or a replica was lost."""
        if self._first_token_at is None or self._attempt:
            return None
        tokens = sum(sample.delivered for sample in self.samples)
        began = self._submitted_at
        return ShadowMeasure(self._first_token_at - began, self.last_token_at - began, tokens)

    @property
    def answers(self) -> list[Sample]:
        """The samples included in the answer, in order. If more than `n` samples per prompt were generated,
        only each prompt's best `n` are included."""
        task = self.task
        if task.samples == task.n:
            return self.samples
        best: list[Sample] = []
        for first in range(0, len(self.samples), task.samples):
            # The sort is stable, so samples with the same log probability keep their order.
            of_prompt = sorted(
                self.samples[first : first + task.samples], key=lambda sample: -sample.cumulative_logprob
            )
            best += of_prompt[: task.n]
        return best

    def transcript(self) -> Transcript:
        """Return the prompts and the answers generated so far. Both are empty unless the log policy keeps
        them."""
        tokenizer = self.task.model.tokenizer
        return Transcript(
            self.context.request_id,
            self.context.identity,
            self.context.arrived_at,
            self.task.asked,
            ["".join(sample.kept_text or ()) for sample in self.answers],
            lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False),
        )

    def finish_reason(self, status: int) -> FinishReasons:
        """Return the samples' finish reasons."""
        rest: FinishReason = (
            "error" if self.failure is not None and self.failure.code != "aborted" else "cancelled"
        )
        if status == CLIENT_DISCONNECTED:
            rest = "cancelled"
        return join_reasons(sample.finish_reason or rest for sample in self.samples)
