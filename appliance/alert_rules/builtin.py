"""The built-in alert rules. `docs/alerts.md` is generated from them."""

from __future__ import annotations

from appliance.alert_rules.fields import AlertRule


class BuiltInRule(AlertRule, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A rule that ships with the product."""

    reason: str
    """Why the rule exists and how its threshold was chosen."""


_DEAD = ["replica-crash-loop", "replica-failed", "replica-down"]
"""Rules that detect dead replicas. While a replica is dead, requests may wait or fail."""
_BUSY = [*_DEAD, "model-failed", "front-down", "gpu-xid"]

BUILT_IN: tuple[BuiltInRule, ...] = (
    # ── processes ──
    BuiltInRule(
        name="replica-down",
        reason="A replica has stopped answering requests. Its requests continue on another replica or "
        "after a restart, so clients notice only a pause.",
        metric="models[*].replicas[*].state",
        severity="critical",
        texts=["restarting", "silent", "starting", "loading"],
        clear_texts=["ready", "sleeping", "draining", "stopped"],
        clear_for_s=5.0,
        downstream_of=["replica-crash-loop", "replica-failed", "gpu-xid", "gpu-failed", "gpus-unreadable"],
        description="{where} is not responding to requests ({text})",
        remedy="wait for the restart; if the failure recurs, see the replica's last error: appliance status",
    ),
    BuiltInRule(
        name="replica-failed",
        reason="The replica cannot start because of its checkpoint, memory or device. Waiting does not help.",
        metric="models[*].replicas[*].state",
        severity="critical",
        texts=["failed"],
        clear_for_s=5.0,
        downstream_of=["gpu-xid", "gpu-failed", "gpus-unreadable"],
        description="{where} cannot start",
        remedy="fix the cause of the replica's last error, which 'appliance status' shows; the service then "
        "retries",
    ),
    BuiltInRule(
        name="replica-crash-loop",
        reason="A single restart can be a coincidence. Three restarts within 10 minutes point to a "
        "persistent cause.",
        metric="models[*].replicas[*].restarts",
        severity="critical",
        measure="change",
        window_s=600.0,
        above=3.0,
        clear=1.5,
        downstream_of=["gpu-xid", "gpu-failed", "gpus-unreadable"],
        description="{where} was restarted {value} times within 10 min",
        remedy="drain the model (appliance drain -m {model}), and look for the first error in the log",
    ),
    BuiltInRule(
        name="model-failed",
        reason="No replica of the model can serve requests, so new requests are refused immediately.",
        metric="models[*].state",
        severity="critical",
        texts=["failed"],
        downstream_of=_DEAD,
        description="{where} is refusing all requests",
        remedy="fix the cause that 'appliance status' shows for the model",
    ),
    BuiltInRule(
        name="front-down",
        reason="When a front process exits, its clients lose their connections and its requests are "
        "cancelled.",
        metric="fronts[*].state",
        severity="warning",
        texts=["restarting"],
        description="{where} exited; its connections were closed",
        remedy="see the front process's last lines in the log; the service restarts the process",
    ),
    BuiltInRule(
        name="problem",
        reason="Every problem that `appliance status` lists as current raises an alert after 3 seconds, "
        "unless a more specific rule covers it.",
        metric="current_problems[*].description",
        severity="warning",
        texts=["?*"],
        for_s=3.0,
        downstream_of=[*_DEAD, "model-failed", "front-down"],
        description="{where}: {text}",
        remedy="{remedy}",
    ),
    # ── GPUs ──
    BuiltInRule(
        name="gpu-xid",
        reason="The driver reports Xid errors for faults in the GPU, its memory or its links, and for faults "
        "in programs that use the GPU.",
        metric="gpus[*].last_xid",
        severity="critical",
        measure="change",
        window_s=3600.0,
        above=1.0,
        downstream_of=["gpu-failed"],
        description="{where} reported an Xid error",
        remedy="look up the Xid in the kernel's log (journalctl -k), and run: appliance doctor",
    ),
    BuiltInRule(
        name="gpu-memory-errors",
        reason="Uncorrected errors corrupt data. The driver terminates the affected program.",
        metric="gpus[*].ecc_uncorrected",
        severity="critical",
        measure="change",
        window_s=3600.0,
        above=1.0,
        description="{where}: uncorrectable memory errors: {value}",
        remedy="drain the GPU's models and reset the GPU; if the errors recur, replace the GPU",
    ),
    BuiltInRule(
        name="gpu-failed",
        reason="A GPU that has fallen off the bus cannot be used until it is reset or the machine restarts. "
        "Replicas on other GPUs continue. Waiting for 10 seconds excludes single failed reads.",
        metric="gpus[*].error",
        severity="critical",
        texts=["?*"],
        for_s=10.0,
        description="{where} cannot be read: {text}",
        remedy="see the kernel's log (journalctl -k), and restart the machine to recover the GPU",
    ),
    BuiltInRule(
        name="gpus-unreadable",
        reason="No GPU can be read if the driver hangs or all GPUs have fallen off the bus.",
        metric="gpu_error",
        severity="critical",
        texts=["?*"],
        description="the GPU driver is not responding: {text}",
        remedy="see the kernel's log (journalctl -k); the machine may need a restart",
    ),
    BuiltInRule(
        name="gpu-hot",
        reason="Data-centre GPUs reduce their clocks at about 87 to 90 °C. Waiting for a minute excludes "
        "short peaks.",
        metric="gpus[*].temperature_c",
        above=88.0,
        clear=83.0,
        for_s=60.0,
        description="{where} is at {value}",
        remedy="check the fans and the airflow; above about 90 °C the GPU reduces its clocks",
        unit="°C",
    ),
    BuiltInRule(
        name="gpu-slowed-down",
        reason="Reduced clocks make every step slower. Reaching the power limit is normal under load and "
        "raises no alert.",
        metric="gpus[*].throttle_reasons[*]",
        texts=["hardware slowdown", "temperature*", "power brake"],
        for_s=30.0,
        clear_for_s=60.0,
        downstream_of=["gpu-hot"],
        description="{where} has reduced its clocks: {text}",
        remedy="check the cooling and the power supply; 'nvidia-smi -q -d PERFORMANCE' shows the reasons",
    ),
    # ── KV cache ──
    BuiltInRule(
        name="kv-cache-full",
        reason="Without free blocks, sequences are preempted and new sequences wait. A cache that stays "
        "full for a minute is not just a short peak.",
        metric="kv[*].blocks_used",
        per="blocks_total",
        above=0.97,
        clear=0.9,
        for_s=60.0,
        description="the KV cache of {where} is {value} full",
        remedy='add a replica, lower max_num_seqs or the tenants\' kv_share, or use kv_cache_dtype = "fp8"',
        unit="%",
    ),
    BuiltInRule(
        name="kv-cache-filling",
        reason="A trend over 5 minutes leaves time to act. Below 60%, it is normal for cache usage to rise "
        "with load.",
        metric="kv[*].blocks_used",
        per="blocks_total",
        measure="time_to",
        window_s=300.0,
        target=1.0,
        at_least=0.6,
        below=900.0,
        clear=1800.0,
        for_s=30.0,
        clear_for_s=60.0,
        downstream_of=["kv-cache-full"],
        description="the KV cache of {where} will be full in {value}",
        remedy="find the largest requests, limit their tenant (kv_share), or add a replica",
        unit="s",
    ),
    BuiltInRule(
        name="preemptions",
        reason="Each preempted sequence must be recomputed. Even one preemption every 2 seconds reduces "
        "throughput.",
        metric="kv[*].preemptions",
        measure="rate",
        window_s=60.0,
        above=0.5,
        clear=0.1,
        for_s=15.0,
        downstream_of=["kv-cache-full"],
        description="{where} is preempting sequences and recomputing them ({value})",
        remedy="lower max_num_seqs, or add a replica: the KV cache is too small for the running sequences",
        unit="/s",
    ),
    # ── queue ──
    BuiltInRule(
        name="queue-full",
        reason="When the queue reaches its limit, requests are refused with status 503.",
        metric="queue.waiting",
        per="queue.limit",
        severity="critical",
        above=0.95,
        clear=0.8,
        for_s=5.0,
        downstream_of=_BUSY,
        description="the queue is {value} full, so new requests will soon be refused",
        remedy="add capacity, or lower the limit of the tenant with the most waiting requests",
        unit="%",
    ),
    BuiltInRule(
        name="class-late",
        reason="Load shedding tries to keep waiting times within the target. If the oldest request has "
        "exceeded the target by 50% for 30 seconds, load shedding is not keeping up.",
        metric="queue.classes[*].oldest_wait_s",
        per="target_s",
        above=1.5,
        clear=1.0,
        for_s=30.0,
        downstream_of=[*_BUSY, "queue-full", "load-shedding"],
        description="the oldest request of {where} has waited for {value} of the target time",
        remedy="add capacity, or move batch work to a lower class",
        unit="%",
    ),
    BuiltInRule(
        name="load-shedding",
        reason="The service refuses requests of lower classes to protect higher classes. These refusals "
        "are intended, but an operator should know about them.",
        metric="queue.overload_step",
        above=1.0,
        clear=0.5,
        for_s=15.0,
        clear_for_s=60.0,
        downstream_of=[*_BUSY, "queue-full"],
        description="requests of lower classes are being refused because of overload (step {value})",
        remedy="add capacity, or lower the limit of the tenant with the most waiting requests",
    ),
    BuiltInRule(
        name="refusals",
        reason="Some refusals are normal if tenants have limits. A rate six standard deviations above "
        "the usual rate indicates a problem.",
        metric="rates.refused_per_s",
        measure="deviation",
        window_s=1800.0,
        at_least=1.0,
        above=6.0,
        clear=3.0,
        for_s=30.0,
        downstream_of=[*_BUSY, "queue-full", "load-shedding", "tenant-daily-quota"],
        description="unusually many requests are being refused ({value} standard deviations above the "
        "usual rate)",
        remedy="see the reasons: appliance requests --failed",
    ),
    BuiltInRule(
        name="failures",
        reason="The rule counts errors caused by the service, not those caused by clients. If one in twenty "
        "requests fails over 15 seconds, the failures are not isolated.",
        metric="rates.failed_per_s",
        per="rates.requests_per_s",
        severity="critical",
        above=0.05,
        clear=0.01,
        for_s=15.0,
        downstream_of=_BUSY,
        description="{value} of requests are failing",
        remedy="see the errors: appliance requests --failed",
        unit="%",
    ),
    # ── latency ──
    BuiltInRule(
        name="first-token-slow",
        reason="The usual value is the mean of the last half hour. People do not notice changes while "
        "the time to first token is below 500 ms.",
        metric="latency.ttft.p50_ms",
        measure="deviation",
        window_s=1800.0,
        at_least=500.0,
        above=6.0,
        clear=3.0,
        for_s=60.0,
        downstream_of=[
            *_BUSY,
            "queue-full",
            "load-shedding",
            "class-late",
            "kv-cache-full",
            "gpu-slowed-down",
        ],
        description="the median time to first token is {value} standard deviations above its usual value",
        remedy="compare the current load with earlier load (appliance requests --since 1h), or add a replica",
    ),
    BuiltInRule(
        name="tokens-slow",
        reason="The usual value is the mean of the last half hour. People do not notice changes while "
        "the time between tokens is below 10 ms.",
        metric="latency.itl.p50_ms",
        measure="deviation",
        window_s=1800.0,
        at_least=10.0,
        above=6.0,
        clear=3.0,
        for_s=60.0,
        downstream_of=[*_BUSY, "preemptions", "kv-cache-full", "gpu-slowed-down", "gpu-hot"],
        description="the median time between tokens is {value} standard deviations above its usual value",
        remedy="look for long prompts (appliance requests --running) and for reduced clocks (nvidia-smi)",
    ),
    # ── tenants ──
    BuiltInRule(
        name="tenant-daily-quota",
        reason="At 90%, there is still time to raise the quota before requests are refused.",
        metric="tenants[*].usage[tokens_per_day].used",
        per="capacity",
        severity="info",
        above=0.9,
        clear=0.8,
        for_s=10.0,
        description="{where} has used {value} of its daily token limit",
        remedy="tell the tenant, or raise the quota: appliance tenants set {tenant} --tokens-per-day N",
        unit="%",
    ),
    # ── machine ──
    BuiltInRule(
        name="disk-full",
        reason="If the disk is full, request log rows wait in memory, and rows beyond 50,000 are dropped.",
        metric="host.disk_free_bytes",
        per="host.disk_bytes",
        severity="critical",
        below=0.05,
        clear=0.08,
        for_s=30.0,
        description="only {value} of the state directory's disk is free",
        remedy="free space, or lower log.days, log.contents_days or telemetry.days",
        unit="%",
    ),
    BuiltInRule(
        name="disk-filling",
        reason="Four hours leave time to act. A trend over an hour is not affected by short-term changes in "
        "the write-ahead log's size.",
        metric="host.disk_free_bytes",
        measure="time_to",
        window_s=3600.0,
        target=0.0,
        below=14400.0,
        clear=28800.0,
        for_s=300.0,
        clear_for_s=600.0,
        downstream_of=["disk-full"],
        description="the state directory's disk will be full in {value}",
        remedy="find the files that are growing, or lower log.days and log.contents_days",
        unit="s",
    ),
    BuiltInRule(
        name="memory-full",
        reason="Without free memory, the kernel kills processes, usually the largest one, which is a "
        "replica.",
        metric="host.memory_used_bytes",
        per="host.memory_bytes",
        above=0.95,
        clear=0.9,
        for_s=30.0,
        description="{value} of the machine's memory is in use",
        remedy="find the processes that use the most memory; the kernel may kill replicas",
        unit="%",
    ),
)
