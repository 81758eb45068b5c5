"""The fields and metrics of the overview. Other screens show some of them, too."""

from __future__ import annotations

from console.explanations.explanation import MINUTE, NOW, RATE, SLICE, Explanation

OVERVIEW: dict[str, Explanation] = {
    "generated_tokens_per_s": Explanation(
        "output tokens/s",
        "tokens/s",
        RATE,
        "Output tokens generated per second by all replicas.",
        "appliance_engine_generated_tokens_total",
    ),
    "prompt_tokens_per_s": Explanation(
        "prompt tokens/s",
        "tokens/s",
        RATE,
        "Prompt tokens per second of the sequences started by all replicas, including cached tokens.",
        "appliance_engine_prompt_tokens_total",
    ),
    "cached": Explanation(
        "cached",
        "%",
        RATE,
        "Share of the prompt tokens that came from the prefix cache.",
        "appliance_engine_cached_tokens_total",
    ),
    "peak": Explanation(
        "peak",
        "tokens/s",
        "the period of the chart",
        "Highest value in the chart.",
        "appliance_engine_generated_tokens_total, appliance_engine_prompt_tokens_total",
    ),
    "ttft": Explanation(
        "TTFT",
        "ms, s",
        MINUTE,
        "Time to first token: from a request's arrival until its first token is written to the socket. p50 "
        "is the median; 99% of the requests were faster than p99.",
        "appliance_time_to_first_token_seconds",
    ),
    "itl": Explanation(
        "ITL",
        "ms",
        MINUTE,
        "Inter-token latency: the mean time between the output tokens of a request.",
        "appliance_inter_token_seconds",
    ),
    "queue": Explanation(
        "queue",
        "ms, s",
        MINUTE,
        "Time spent in the queue, from admission to the first dispatch.",
        "appliance_queue_seconds",
    ),
    "e2e": Explanation(
        "E2E",
        "ms, s",
        MINUTE,
        "End-to-end latency: from a request's arrival to the end of its response.",
        "appliance_request_seconds",
    ),
    "percentiles": Explanation(
        "p50, p90, p99",
        "ms, s",
        MINUTE,
        "Percentiles of the finished requests: 50%, 90% and 99% of them took at most this long.",
        "appliance_request_seconds",
    ),
    "waiting": Explanation(
        "waiting, WAIT",
        "requests",
        NOW,
        "Requests waiting to be dispatched to a replica.",
        "appliance_queue_requests",
    ),
    "failed_per_s": Explanation(
        "errors, failed",
        "requests/s, % of ended requests",
        RATE,
        "Requests that failed because of an error of the service, and their share of all ended requests.",
        "events: rates.failed_per_s, rates.requests_per_s",
    ),
    "refused_per_s": Explanation(
        "refused",
        "requests/s",
        RATE,
        "Requests that the service refused because of a limit or of overload.",
        "events: rates.refused_per_s",
    ),
    "oldest_wait_s": Explanation(
        "oldest",
        "s",
        NOW,
        'Waiting time of the oldest waiting request. "late" means that it exceeds the target.',
        "appliance_queue_oldest_wait_seconds",
    ),
    "expected_wait_s": Explanation(
        "expect",
        "s",
        NOW,
        "Predicted waiting time of a request that arrives now, based on the measured rates.",
        "status: queue.classes.expected_wait_s",
    ),
    "target_s": Explanation(
        "target",
        "s",
        NOW,
        "Target for the waiting time of a service class.",
        "status: queue.classes.target_s",
    ),
    "running": Explanation(
        "running, RUN",
        "requests",
        NOW,
        "Requests running on a replica.",
        "appliance_running_requests",
    ),
    "kv_used": Explanation(
        "KV used, KV, KV blocks, used",
        "% of blocks",
        NOW,
        "KV blocks in use by unfinished sequences. Cached blocks do not count, because they can be reused.",
        "appliance_kv_used_blocks, appliance_kv_blocks",
    ),
    "hit_rate": Explanation(
        "hit",
        "% of prompt tokens",
        MINUTE,
        "Share of prompt tokens that came from the prefix cache.",
        "appliance_engine_cached_tokens_total",
    ),
    "utilization_percent": Explanation(
        "kernel time, USE",
        "% of time",
        "NVML's sample period, at most 1 s",
        "Share of time during which at least one kernel was running. It does not show how much of the GPU "
        "the kernels used.",
        "NVML utilization.gpu",
    ),
    "used_bytes": Explanation(
        "memory, MEM", "bytes", NOW, "GPU memory in use by all processes.", "NVML memory.used"
    ),
    "power_w": Explanation("W, POWER", "watts", NOW, "Power draw of the board.", "NVML power.draw"),
    "temperature_c": Explanation(
        "°, TEMP, temperature",
        "°C",
        NOW,
        "Temperature of the GPU. T means that the GPU is throttled: its clocks are reduced.",
        "NVML temperature.gpu",
    ),
    "alerts": Explanation(
        "alerts",
        "",
        NOW,
        "Alerts that are firing or acknowledged. ‼ critical, ! warning, i info.",
        "alerts",
    ),
    "process_name": Explanation(
        "process",
        "",
        "",
        "A process of the service: the core, a front or a replica. A number with ↻ counts its restarts.",
        "events: host.processes.name, host.processes.restarts",
    ),
    "cpu_percent": Explanation(
        "cpu",
        "% of one core",
        SLICE,
        "CPU usage of a process. The host's usage is a percentage of all cores.",
        "process_cpu_seconds_total, appliance_front_cpu_seconds_total",
    ),
    "load_1m": Explanation("load", "processes", "1 min", "Load average of the host.", "/proc/loadavg"),
    "host_memory": Explanation(
        "memory, mem",
        "% or bytes",
        NOW,
        "Memory in use on the host, as a percentage of all memory, or by a process (resident set). The GPU "
        "panel shows the used share of each GPU's memory.",
        "events: host.memory_used_bytes, host.processes.memory_bytes",
    ),
    "disk_free": Explanation(
        "disk free, free",
        "bytes",
        NOW,
        "Free space on the file system of the state directory.",
        "events: host.disk_free_bytes",
    ),
}
