"""The simulated service's GPUs, host and front processes."""

from __future__ import annotations

from appliance.protocol.status import FrontStatus
from appliance.snapshot import Gpu, GpuProcess, Host, Process
from console.simulated import GPU_MEMORY_BYTES, STARTUP_S, SimReplica
from console.simulation import Simulation

_INCIDENT_EVERY_S, _INCIDENT_S = 180.0, 75.0


def incident(simulation: Simulation) -> bool:
    """Return whether the last GPU is currently thermally throttled."""
    return (simulation.now - simulation.started - STARTUP_S) % _INCIDENT_EVERY_S < _INCIDENT_S


def gpus_of(simulation: Simulation) -> list[Gpu]:
    """Return telemetry for all GPUs."""
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
    hot = number == simulation.gpus - 1 and incident(simulation)
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
        temperature_c=(90 if hot else 48 + utilization * 0.2) + random.uniform(-1, 1),
        sm_clock_mhz=1410 if hot else 1980,
        max_sm_clock_mhz=1980,
        memory_clock_mhz=3201,
        throttle_reasons=["temperature"] if hot else [],
        # A GPU that is not linked to another one has no link counters.
        unsupported=[] if ranks > 1 else ["nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"],
        nvlink_tx_bytes_per_s=random.uniform(8e9, 12e9) if ranks > 1 else None,
        nvlink_rx_bytes_per_s=random.uniform(8e9, 12e9) if ranks > 1 else None,
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


def fronts_of(sim: Simulation) -> list[FrontStatus]:
    """Return the front processes' state."""
    tokens = sum(one.generated_tokens for one in sim.replicas)
    running = sum(len(one.running) for one in sim.replicas)
    return [
        FrontStatus(
            name=f"front-{number}",
            state="ready",
            pid=4800 + number,
            connections=running // 2 + 11 * number,
            busy_connections=running // 2,
            max_connections=4096,
            streams=running // 2,
            requests=sim.counts["admitted"] // 2,
            tokens=tokens // 2,
            cpu_seconds=tokens / 2 * 14e-6,
            cpu_us_per_token=14.1 + number,
        )
        for number in (1, 2)
    ]


def host_of(sim: Simulation) -> Host:
    """Return statistics about the machine and its processes."""
    random = sim.random
    processes = [
        Process(name="core", role="core", pid=4711, cpu_percent=random.uniform(6, 9), memory_bytes=187 << 20)
    ]
    for number in (1, 2):
        processes.append(
            Process(
                name=f"front-{number}",
                role="front",
                pid=4800 + number,
                cpu_percent=random.uniform(28, 41),
                memory_bytes=(240 + 9 * number) << 20,
                restarts=0,
            )
        )
    for replica in sim.replicas:
        processes.append(
            Process(
                name=replica.name,
                role="replica",
                pid=5000 + replica.gpus[0],
                cpu_percent=random.uniform(94, 100) * len(replica.gpus),
                memory_bytes=(3 + len(replica.gpus)) << 30,
                restarts=0,
            )
        )
    return Host(
        name="gpu-01",
        cpus=96,
        cpu_percent=random.uniform(9, 13),
        load_1m=random.uniform(9, 12),
        memory_bytes=1024 << 30,
        memory_used_bytes=141 << 30,
        disk_bytes=3500 << 30,
        disk_free_bytes=2210 << 30,
        processes=processes,
    )
