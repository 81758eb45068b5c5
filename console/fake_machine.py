"""The GPUs and alerts of the simulated service."""

from __future__ import annotations

from appliance.snapshot import Alert, Gpu, GpuProcess
from console.simulation import GPU_MEMORY_BYTES, SimReplica, Simulation

_INCIDENT_EVERY_S, _INCIDENT_S = 180.0, 75.0


def incident(simulation: Simulation) -> float | None:
    """Return the seconds since the current incident began, or None between incidents. During an incident, the
    last GPU reduces its clocks because of its temperature."""
    since = (simulation.now - simulation.started) % _INCIDENT_EVERY_S
    return since if since < _INCIDENT_S else None


def gpus_of(simulation: Simulation) -> list[Gpu]:
    """Return the telemetry of all GPUs."""
    return [
        _gpu(simulation, number, replica)
        for replica in simulation.replicas
        for number in replica.gpus
        if number < simulation.gpus
    ]


def _gpu(simulation: Simulation, number: int, replica: SimReplica) -> Gpu:
    random = simulation.random
    busy = replica.slice["busy"]
    utilization = max(0.0, min(100.0, busy * 100 - random.uniform(0, 6)))
    hot = number == simulation.gpus - 1 and incident(simulation) is not None
    ranks = len(replica.gpus)
    return Gpu(
        number=number,
        name="NVIDIA H200",
        uuid=f"GPU-{number:08x}",
        replicas=[replica.name],
        utilization_percent=utilization,
        memory_bytes=GPU_MEMORY_BYTES,
        used_bytes=replica.used_bytes // ranks + (1 << 30),
        weight_bytes=replica.weight_bytes // ranks,
        kv_bytes=replica.kv_bytes // ranks,
        power_w=120 + 5.2 * utilization + random.uniform(-12, 12),
        power_limit_w=700.0,
        temperature_c=(84 if hot else 48 + utilization * 0.2) + random.uniform(-1, 1),
        sm_clock_mhz=1410 if hot else 1980,
        max_sm_clock_mhz=1980,
        memory_clock_mhz=3201,
        throttle_reasons=["temperature"] if hot else [],
        nvlink_tx_bytes_per_s=random.uniform(8e9, 12e9) if ranks > 1 else 0.0,
        nvlink_rx_bytes_per_s=random.uniform(8e9, 12e9) if ranks > 1 else 0.0,
        ecc_corrected=3 if number == 2 else 0,
        ecc_uncorrected=0,
        last_xid=0,
        processes=[
            GpuProcess(
                pid=5000 + number,
                memory_bytes=replica.used_bytes // ranks,
                name="python",
                replica=replica.name,
            )
        ],
    )


def alerts_of(simulation: Simulation, gpus: list[Gpu]) -> list[Alert]:
    """Return the alerts for the current incident and for exhausted limits."""
    found = []
    since = incident(simulation)
    if since is not None and since > 5.0 and gpus:
        gpu = gpus[-1]
        found.append(
            Alert(
                id="gpu-throttled-1",
                rule="gpu-throttled",
                severity="critical" if since > 30.0 else "warning",
                state="firing" if since > 15.0 else "pending",
                where=f"GPU {gpu.number}",
                what=f"clocks reduced from {gpu.max_sm_clock_mhz} to {gpu.sm_clock_mhz} MHz",
                cause=f"temperature has been above 83 °C for {since:.0f} s",
                remedy="check the fans and the inlet temperature",
                since=simulation.now - since,
                value=gpu.temperature_c,
                threshold=83.0,
                unit="°C",
                suppressed=2 if since > 30.0 else 0,
            )
        )
    for tenant in simulation.tenants.values():
        if tenant.tokens_per_minute is not None and tenant.level > 0.9 * tenant.tokens_per_minute:
            found.append(
                Alert(
                    id=f"quota-{tenant.name}",
                    rule="tenant-near-limit",
                    severity="warning",
                    state="firing",
                    where=f"tenant {tenant.name}",
                    what=f"{tenant.level / tenant.tokens_per_minute:.0%} of tokens_per_minute in use",
                    cause=f"{tenant.running} running requests hold most of the limit",
                    remedy=f"raise the limit with: appliance tenants set {tenant.name} --tokens-per-minute N",
                    since=simulation.now - 20.0,
                    value=tenant.level,
                    threshold=0.9 * tenant.tokens_per_minute,
                    unit="tokens",
                )
            )
    return found
