"""Why each built-in rule exists and has its threshold."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "replica-down": (
        "A replica that answered requests no longer does. Its requests continue on another replica or "
        "after the restart, so clients notice a pause."
    ),
    "replica-failed": (
        "The checkpoint, the memory or the device does not permit a start. Waiting does not help."
    ),
    "replica-crash-loop": (
        "A single restart can be an accident. A third restart within 10 minutes has a persistent cause."
    ),
    "model-failed": "No replica of the model can serve, so its requests are refused at once.",
    "front-down": (
        "The clients of a front process that ended lost their connections. Its requests were cancelled."
    ),
    "problem": (
        "Every problem that `appliance status` lists as current raises an alert after 3 seconds, unless "
        "a more specific rule covers it."
    ),
    "gpu-xid": (
        "The driver reports Xid errors for faults of the GPU, its memory or its links, or of a program "
        "that uses it."
    ),
    "gpu-memory-errors": "Uncorrected errors damage data. The driver ends the affected program.",
    "gpus-unreadable": "NVML stops responding when a GPU falls off the bus or the driver hangs.",
    "gpu-hot": "Data-centre GPUs reduce their clocks at about 87 to 90 °C. A minute excludes short peaks.",
    "gpu-slowed-down": (
        "Reduced clocks make every step slower. Reaching the power limit is normal under load and raises "
        "no alert."
    ),
    "kv-cache-full": (
        "Without free blocks, sequences are preempted and new ones wait. A cache that is full for a "
        "minute is not a short peak."
    ),
    "kv-cache-filling": (
        "The trend over 5 minutes leaves time to act. Below 60%, it is normal that the use of the cache "
        "rises with the load."
    ),
    "preemptions": (
        "After each preemption, a sequence is computed again. One preemption every 2 seconds already "
        "reduces throughput."
    ),
    "queue-full": "At the limit of the queue, requests are refused with status 503.",
    "class-late": (
        "The target is the wait that load shedding tries to keep. If the oldest request waits 50% longer "
        "for 30 seconds, load shedding does not succeed."
    ),
    "load-shedding": (
        "The service refuses lower classes to protect higher ones. This is intended, but an operator "
        "should know about it."
    ),
    "refusals": (
        "Some refusals are normal if tenants have limits. A rate of six standard deviations above the "
        "usual rate is not normal."
    ),
    "failures": (
        "Counts errors of the service, not of clients. If one in twenty requests fails for 15 seconds, "
        "these are not isolated faults."
    ),
    "first-token-slow": (
        "The usual value is the mean of the last half hour. People do not notice changes below 500 ms."
    ),
    "tokens-slow": (
        "The usual value is the mean of the last half hour. People do not notice changes while the time "
        "between tokens is below 10 ms."
    ),
    "tenant-daily-quota": "At 90%, there is still time to raise the quota before requests are refused.",
    "disk-full": (
        "If the disk is full, rows of the request log wait in memory, and rows beyond 50,000 are lost."
    ),
    "disk-filling": (
        "Four hours leave time to act. A trend over an hour is not affected by short-term changes of the "
        "write-ahead log's size."
    ),
    "memory-full": "Without free memory, the kernel ends processes, usually the largest: a replica.",
}
