"""Fields and metrics on the Batches, KV cache, GPUs and Models screens."""

from __future__ import annotations

from console.explanations.explanation import NOW, SECOND, SLICE, START, STEPS, Explanation

ENGINE: dict[str, Explanation] = {
    "replicas": Explanation(
        "READY", "replicas", NOW, "Number of ready replicas, out of the total.", "appliance_replica_state"
    ),
    "queued": Explanation(
        "QUEUED", "requests", NOW, "Requests waiting for the model.", "status: models.queued"
    ),
    "weight_bytes": Explanation(
        "WEIGHTS",
        "bytes",
        NOW,
        "Weight memory, across all ranks.",
        "status: models.replicas.weight_bytes",
    ),
    "max_model_len": Explanation(
        "CONTEXT",
        "tokens",
        NOW,
        "Maximum sequence length: prompt plus output.",
        "status: models.max_model_len",
    ),
    "restarts": Explanation(
        "RESTARTS", "restarts", START, "Restarts of the model's replicas.", "appliance_replica_restarts_total"
    ),
    "version": Explanation("VERSION", "", NOW, "Fingerprint of the model's files.", "status: models.version"),
    "step_ms": Explanation(
        "step, decode step, mixed step",
        "ms",
        STEPS,
        "Mean step time. Decode steps only decode; mixed steps also process prompts. On the Models screen, "
        "times older than 5 s are shown with their age.",
        "appliance_step_seconds",
    ),
    "idle_us": Explanation(
        "idle",
        "µs",
        STEPS,
        "Mean time the GPU waits for the host before a step.",
        "appliance_device_idle_seconds",
    ),
    "credit_seqs": Explanation(
        "credit",
        "sequences",
        NOW,
        "Number of additional sequences that the replica can start now.",
        "appliance_credit_seqs",
    ),
    "load_seconds": Explanation(
        "loaded in",
        "s",
        "the last start",
        "Weight loading time.",
        "status: models.replicas.load_seconds",
    ),
    "evictions": Explanation(
        "evictions",
        "blocks",
        START,
        "Cached blocks evicted to make room for new sequences.",
        "appliance_kv_evictions_total",
    ),
    "preemptions": Explanation(
        "preemptions",
        "preemptions",
        START,
        "Number of times that a sequence lost its blocks to another one and had to be recomputed.",
        "appliance_preemptions_total",
    ),
    "block_state": Explanation(
        "free, cached, used, shared",
        "blocks",
        NOW,
        "A cached block is free but still holds a prefix. A shared block has more than one reference, "
        "usually from several requests.",
        "kv: blocks.states",
    ),
    "block_age": Explanation(
        "age",
        "log2 of s",
        NOW,
        "Time since a cached block was last used, on a log2 scale.",
        "kv: blocks.ages",
    ),
    "mixed_steps": Explanation(
        "mixed",
        "steps",
        SECOND,
        "Steps that also processed prompts: count and mean duration.",
        "appliance_step_seconds",
    ),
    "decode_steps": Explanation(
        "decode",
        "steps",
        SECOND,
        "Decode-only steps: count and mean duration.",
        "appliance_step_seconds",
    ),
    "steps_running": Explanation(
        "SEQS, sequences",
        "sequences",
        NOW,
        "Number of running sequences, and the maximum.",
        "appliance_sequences",
    ),
    "stall": Explanation(
        "!",
        "ms",
        SECOND,
        "A stall: a step with decodes that took more than three times as long as the mean decode-only step. "
        "The longest one is shown, with the request that had the largest prefill chunk in that step.",
        "batches: longest_ms; stalls: request, tenant",
    ),
    "computed_tokens": Explanation(
        "tokens: prompt, out",
        "tokens",
        SECOND,
        "Prompt tokens processed and output tokens generated.",
        "batches: computed_tokens",
    ),
    "number": Explanation("GPU", "index", "", "GPU index, as in NVML and nvidia-smi.", "gpus: number"),
    "sm_clock_mhz": Explanation("MHz, SM clock", "MHz", NOW, "SM clock.", "NVML clocks.sm"),
    "throttle_reasons": Explanation(
        "THROTTLED, throttled by", "", NOW, "Why the GPU's clocks are reduced.", "NVML clocks_event_reasons"
    ),
    "nvlink": Explanation(
        "NVLINK/s, NVLink",
        "bytes/s",
        SLICE,
        "Bytes sent and received over all NVLink links.",
        "NVML NVLINK_THROUGHPUT_DATA",
    ),
    "ecc": Explanation(
        "ECC, ECC errors",
        "errors",
        "since the driver was loaded",
        "Memory errors, as uncorrected/corrected.",
        "NVML ecc.errors",
    ),
    "last_xid": Explanation(
        "XID, last Xid", "", START, "Most recent Xid error code; - means none.", "NVML events"
    ),
    "mig_instances": Explanation(
        "MIG instances, MIG",
        "bytes",
        NOW,
        "The GPU's MIG instances, with the memory in use on each. NVML reports no kernel time for a GPU in "
        "MIG mode, so MIG is shown instead.",
        "gpus: mig_instances",
    ),
    "model_name": Explanation(
        "NAME, ERR",
        "",
        NOW,
        "GPU product name. If the GPU cannot be read, its use is shown as ERR and its name as the reason.",
        "NVML name; gpus: error",
    ),
    "memory_parts": Explanation(
        "weights, KV cache, other, free",
        "bytes",
        NOW,
        "What the GPU's memory is used for. Other: activations, CUDA contexts and other processes.",
        "status: models.replicas.weight_bytes, models.replicas.kv_bytes; NVML memory.used",
    ),
    "kv_tokens": Explanation(
        "tokens",
        "tokens",
        NOW,
        "Used and total capacity of the KV cache. Under Longest contexts: a request's prompt and output "
        "tokens so far.",
        "kv: blocks_used, blocks_total, block_tokens",
    ),
    "kv_size": Explanation("size", "bytes", NOW, "KV cache memory, across all ranks.", "kv: kv_bytes"),
    "busy": Explanation(
        "busy",
        "% of time",
        SECOND,
        "Share of time that the replica spent running steps.",
        "batches: step_ms, mixed_step_ms",
    ),
    "stall_time": Explanation("time", "date and time", "", "When the stall ended.", "stalls: at"),
    "stall_mean": Explanation(
        "mean",
        "ms",
        SECOND,
        "Mean duration of decode-only steps in the second of the stall.",
        "stalls: mean_ms",
    ),
    "stall_decodes": Explanation(
        "decodes",
        "sequences",
        "the stalled step",
        "Number of sequences whose next token was delayed by the stall.",
        "stalls: decodes",
    ),
    "stall_prompt": Explanation(
        "prompt",
        "tokens",
        "the stalled step",
        "Prompt tokens processed in the stalled step.",
        "stalls: prompt_tokens",
    ),
    "stall_request": Explanation(
        "request with the largest chunk",
        "",
        "the stalled step",
        "The request with the most prompt tokens in the stalled step, and its tenant.",
        "stalls: request, tenant",
    ),
    "predicted_bytes": Explanation(
        "fit",
        "bytes",
        "the last start",
        "Predicted GPU memory use across all ranks, computed before the replica started.",
        "status: models.replicas.predicted_bytes",
    ),
    "replica_memory": Explanation(
        "memory",
        "bytes",
        "the last start",
        "GPU memory used by the replica, and the difference from the prediction. For a version: the memory "
        "that its weights and KV caches use while it is loaded.",
        "status: models.replicas.used_bytes; registry: versions.memory_bytes",
    ),
    "replica_kv_bytes": Explanation(
        "KV cache",
        "bytes",
        NOW,
        "KV cache memory, across all ranks.",
        "status: models.replicas.kv_bytes",
    ),
    "links": Explanation(
        "links",
        "",
        "the last start",
        "How the replica's GPUs are connected and exchange data.",
        "status: models.replicas.links, models.replicas.collectives",
    ),
    "version_number": Explanation(
        "version",
        "number",
        "",
        "Model version. ● marks the default.",
        "registry: versions.version",
    ),
    "added": Explanation(
        "added", "date and time", "", "When the version was added.", "registry: versions.added_at"
    ),
    "folder": Explanation("folder", "", "", "Directory with the model's files.", "registry: versions.folder"),
    "aliases": Explanation(
        "aliases", "", NOW, "Other names that applications can use for the model.", "registry: aliases"
    ),
    "split": Explanation(
        "split",
        "% of requests",
        NOW,
        "How requests for the model name are divided among its versions.",
        "registry: split",
    ),
    "shadow": Explanation(
        "shadow",
        "% of requests, % of tokens",
        "since the shadow was set or the service started",
        "Share of requests copied to another version, and share of tokens that match in both answers.",
        "registry: shadows.share, shadows.agreement",
    ),
    "scaled_replicas": Explanation(
        "replicas",
        "replicas",
        NOW,
        "Desired number of replicas, with the minimum and maximum.",
        "status: models.scaling.replicas",
    ),
    "demand": Explanation(
        "demand",
        "replicas",
        "now, and when a new replica would be ready",
        "Load, expressed as the number of replicas that it would keep fully busy.",
        "status: models.scaling.demand, models.scaling.expected",
    ),
    "scaling_reason": Explanation(
        "reason", "", NOW, "How the expected load was determined.", "status: models.scaling.reason"
    ),
    "scaling_refusal": Explanation(
        "refusal", "", NOW, "Why no replica can be added now.", "status: models.scaling.refusal"
    ),
    "uuid": Explanation("uuid", "", "", "GPU identifier, as in nvidia-smi.", "gpus: uuid"),
    "gpu_replicas": Explanation("REPLICAS", "", NOW, "Replicas running on the GPU.", "gpus: replicas"),
    "memory_clock_mhz": Explanation(
        "memory clock", "MHz", NOW, "Current frequency of the memory clock.", "gpus: memory_clock_mhz"
    ),
}
