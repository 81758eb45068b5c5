"""The GPUs of the simulated service."""

from __future__ import annotations

from appliance.snapshot import Gpu, GpuProcess
from console.simulation import GPU_MEMORY_BYTES, STARTUP_S, SimReplica, Simulation

_INCIDENT_EVERY_S, _INCIDENT_S = 180.0, 75.0


def incident(simulation: Simulation) -> bool:
    """Return whether the last GPU currently reduces its clocks because of its temperature."""
    return (simulation.now - simulation.started - STARTUP_S) % _INCIDENT_EVERY_S < _INCIDENT_S


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
        # A GPU without a link to another one does not support the counters of links.
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
