"""Builds two kinds of messages: one asks the core to admit a request, and the other submits the request to a
replica."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from appliance.channel.core_messages import Admitted
from appliance.channel.front_messages import Admit
from appliance.channel.prefixes import prefix_hashes
from appliance.front.generation_task import GenerationTask
from appliance.front.request_context import RequestContext
from appliance.front.sample import Sample
from engine.client import ReplicaClient
from engine.messages import Submit, pack_tokens


def admit_message(
    context: RequestContext, task: GenerationTask, samples: list[Sample], attempt: int, send_prefixes: bool
) -> Admit:
    """Return the message that asks the core to admit the request.

    On later attempts, only unfinished samples are counted, and the tokens already generated for a sample
    count as part of its prompt. `send_prefixes` is true if the core can choose between several replicas.
    """
    again = attempt > 0
    running = [sample for sample in samples if not sample.finish_reason]
    emitted = sum(len(sample.token_ids) for sample in running)
    prompt_tokens = (
        sum(len(sample.prompt.token_ids) for sample in running) + emitted if again else task.prompt_tokens
    )
    return Admit(
        **context.logged_fields(),
        unit=task.model.unit,
        attempt=attempt,
        submissions=len(running) if again else len(task.prompts),
        num_seqs=len(running),
        prompt_tokens=prompt_tokens,
        max_tokens=sum(sample.prompt.max_tokens for sample in running) - emitted,
        prefixes=prefix_hashes(task.prompts[0].token_ids) if send_prefixes else (),
        may_fall_back=task.fall_back is not None and not again,
        may_lower=task.may_lower,
        asked_class=task.asked_class,
        deadline_ms=context.deadline_ms,
        retry_of=context.retry_of,
        shadow_of=task.shadow_of,
        keep_alive_s=task.keep_alive_s,
    )


def submit_messages(
    context: RequestContext,
    task: GenerationTask,
    samples: list[Sample],
    link: ReplicaClient,
    admitted: Admitted,
) -> Iterator[tuple[Submit, list[Sample]]]:
    """Yield each submission to the replica, together with its samples. The first attempt has one submission
    per prompt. Later attempts have one per unfinished sample, and its prompt includes the tokens already
    generated for that sample."""
    n = task.samples
    if admitted.attempt:
        groups = [(sample.prompt, [sample]) for sample in samples if not sample.finish_reason]
    else:
        groups = [(prompt, samples[prompt.index * n : prompt.index * n + n]) for prompt in task.prompts]
    seen: set[int] = set()
    for prompt, group in groups:
        sampling = task.sampling_for(prompt)
        if sampling.prompt_logprobs is not None and (prompt.logprobs is not None or prompt.index in seen):
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        seen.add(prompt.index)
        submit = Submit(
            handle=link.next_handle(),
            request_id=context.request_id,
            index=prompt.index,
            prompt=pack_tokens(prompt.token_ids),
            output_token_ids=group[0].token_ids if admitted.attempt else [],
            n=len(group),
            first_sample=group[0].number,
            sampling=sampling,
            cache_salt=admitted.cache_salt,
            priority=admitted.priority,
            urgency=admitted.urgency,
            reserved_slots=admitted.reserved_slots,
        )
        yield submit, group
