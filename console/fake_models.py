"""The simulated service's models, replicas and drains."""

from __future__ import annotations

from appliance.protocol import DrainStatus, ModelStatus, ReplicaStatus
from console.simulated import SimDrain, SimReplica
from console.simulation import Simulation


def models_of(sim: Simulation) -> list[ModelStatus]:
    """Return all models' state."""
    found = []
    for name in dict.fromkeys(one.model for one in sim.replicas):
        drains = sim.drains_of(name)
        replicas = [_replica(one) for one in sim.replicas if one.model == name]
        found.append(
            ModelStatus(
                name=name,
                folder=f"/srv/models/{name}",
                version=f"sha256:{abs(len(name) * 7_919_111):08x}",
                created=1_780_000_000,
                state="ready" if not drains else "draining" if sim.drained(name) else "drained",
                max_model_len=131_072 if "70b" in name else 32_768,
                queued=sum(one.model == name for one in sim.queue),
                drain_eta_s=_drain_eta_s(sim, name),
                replicas=replicas,
            )
        )
    return found


def drain_of(sim: Simulation, model: str | None, drain: SimDrain) -> DrainStatus:
    """Return the state of a model's drain, or of the service's drain if `model` is None."""
    left = sim.drained(model)
    until = sim.now if drain.completed_at is None else drain.completed_at
    return DrainStatus(
        model=model,
        state="draining" if drain.completed_at is None else "drained",
        grace_s=drain.grace_s,
        grace_left_s=max(0.0, drain.since + drain.grace_s - sim.now),
        queue=drain.hold,
        started_at=drain.since,
        elapsed_s=until - drain.since,
        running=sum(one.started is not None for one in left),
        queued=sum(one.started is None for one in left),
        held=sum(one.held for one in sim.queue if model in (None, one.model)),
        tokens_left=sum(int(one.output - one.generated) for one in left),
        eta_s=_drain_eta_s(sim, model),
        ended=drain.cancelled,
    )


def _replica(one: SimReplica) -> ReplicaStatus:
    ranks = len(one.gpus)
    return ReplicaStatus(
        name=one.name,
        state="ready",
        pids=[5000 + gpu for gpu in one.gpus],
        devices=[f"cuda:{gpu}" for gpu in one.gpus],
        backend="cuda",
        dtype="bfloat16",
        weights="fp8",
        kv_cache_dtype="fp8",
        tensor_parallel_size=ranks,
        links="NVLink (18 links)" if ranks > 1 else "",
        collectives="peer memory" if ranks > 1 else "",
        parameters=70_600_000_000 if ranks > 1 else 8_200_000_000,
        weight_bytes=one.weight_bytes,
        kv_bytes=one.kv_bytes,
        predicted_bytes=one.used_bytes - (311 << 20),
        used_bytes=one.used_bytes,
        load_seconds=one.load_seconds,
        max_num_seqs=one.max_num_seqs,
        max_num_batched_tokens=one.budget,
        step=int(one.step),
        credit_seqs=one.max_num_seqs - len(one.running),
        credit_tokens=one.budget,
        last_report_s=0.04,
        running=len(one.running),
        blocks_total=one.blocks,
        blocks_used=one.used,
        blocks_cached=len(one.cached),
        preemptions=one.preemptions,
        prompt_tokens=one.prompt_tokens,
        cached_tokens=one.cached_tokens,
        computed_tokens=one.computed_tokens,
        generated_tokens=one.generated_tokens,
        decode_steps=int(one.slice["decode_steps"]),
        step_ms=one.slice["step_ms"],
        idle_us=one.slice["idle_us"],
        mixed_steps=int(one.slice["mixed_steps"]),
        mixed_step_ms=one.slice["mixed_step_ms"],
        mixed_idle_us=one.slice["mixed_idle_us"],
    )


def _drain_eta_s(sim: Simulation, model: str | None) -> float:
    """Return the time until the last running request has generated all its output tokens."""
    replicas = [one for one in sim.replicas if model in (None, one.model)]
    left_ms = [
        (request.output - request.generated) * one.decode_ms for one in replicas for request in one.running
    ]
    return max(left_ms, default=0.0) / 1000
