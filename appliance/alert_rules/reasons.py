"""Why each built-in rule exists and has its threshold."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "replica-down": (
        "A replica that answered requests no longer does. Its requests continue on "
        "another replica or after the restart, so clients notice a pause."
    ),
    "replica-failed": (
        "The checkpoint, the memory or the device does not permit a start. Waiting does not help."
    ),
    "replica-crash-loop": "One restart can be an accident. The third within 10 minutes has a lasting cause.",
    "model-failed": "No replica of the model can serve, so its requests are refused at once.",
    "front-down": (
        "The clients of a front process that ended lost their connections. Its requests were cancelled."
    ),
    "problem": (
        "Every problem that `appliance status` lists as current raises an alert after 3 "
        "seconds, unless a more specific rule covers it."
    ),
    "gpu-xid": (
        "The driver reports Xid errors for faults of the GPU, its memory, its links, or of a program on it."
    ),
    "gpu-memory-errors": "Uncorrected errors damage data. The driver ends the affected program.",
    "gpus-unreadable": "NVML stops to respond when a GPU falls off the bus or the driver hangs.",
    "gpu-hot": "Data-centre GPUs reduce their clocks at about 87 to 90 °C. A minute excludes short peaks.",
    "gpu-slowed-down": (
        "Reduced clocks make every step slower. Reaching the power limit is normal under "
        "load and raises no alert."
    ),
    "kv-cache-full": (
        "Without free blocks, sequences are preempted and new ones wait. A full cache for "
        "a minute is not a peak."
    ),
    "kv-cache-filling": (
        "The trend over 5 minutes leaves time to act. Below 60%, a rising cache is a normal start of load."
    ),
    "preemptions": (
        "Each preemption computes a sequence again. One within 2 seconds already costs throughput."
    ),
    "queue-full": "At the limit of the queue, requests are refused with status 503.",
    "class-late": (
        "The target is the wait that load shedding tries to keep. Half as long again for "
        "30 seconds means that it fails."
    ),
    "load-shedding": (
        "The service refuses lower classes to protect higher ones. This is intended, but "
        "an operator should know about it."
    ),
    "refusals": (
        "Some refusals are normal where tenants have limits. Six standard deviations "
        "above the usual rate are not."
    ),
    "failures": (
        "Errors of the service, not of clients. One in twenty requests for 15 seconds is "
        "more than single faults."
    ),
    "first-token-slow": (
        "The usual value is that of the last half hour. Below 500 ms, a change is not noticed by people."
    ),
    "tokens-slow": (
        "The usual value is that of the last half hour. Below 10 ms between tokens, a "
        "change is not noticed by people."
    ),
    "tenant-daily-quota": "At 90% there is time to raise the quota before requests are refused.",
    "disk-full": "On a full disk the request log waits in memory, and rows are lost after 50,000.",
    "disk-filling": (
        "Four hours leave time to act. The trend over an hour does not follow the write-ahead log."
    ),
    "memory-full": "Without free memory, the kernel ends processes, usually the largest: a replica.",
}
