"""The fields and metrics of the screens Batches, KV cache, GPUs and Models."""

from __future__ import annotations

from console.explanations.explanation import NOW, SECOND, SLICE, START, STEPS, Explanation

ENGINE: dict[str, Explanation] = {
    "replicas": Explanation(
        "READY", "replicas", NOW, "Ready replicas and all replicas.", "appliance_replica_state"
    ),
    "queued": Explanation(
        "QUEUED", "requests", NOW, "Requests waiting for the model.", "status: models.queued"
    ),
    "weight_bytes": Explanation(
        "WEIGHTS",
        "bytes",
        NOW,
        "Memory used by the weights on all ranks.",
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
        "Mean step time. Decode steps only decode; mixed steps also process prompts.",
        "appliance_step_seconds",
    ),
    "idle_us": Explanation(
        "idle",
        "µs",
        STEPS,
        "Mean time that the GPU waits for the host before a step.",
        "appliance_device_idle_seconds",
    ),
    "credit_seqs": Explanation(
        "credit",
        "sequences",
        NOW,
        "Number of sequences that a replica can start now.",
        "appliance_credit_seqs",
    ),
    "load_seconds": Explanation(
        "loaded in",
        "s",
        "the last start",
        "Time taken to load the weights.",
        "status: models.replicas.load_seconds",
    ),
    "evictions": Explanation(
        "evictions",
        "blocks",
        START,
        "Cached blocks that were evicted to make room for new sequences.",
        "appliance_kv_evictions_total",
    ),
    "preemptions": Explanation(
        "preemptions",
        "preemptions",
        START,
        "Sequences that were preempted: they lost their blocks to other sequences and had to be recomputed.",
        "appliance_preemptions_total",
    ),
    "block_state": Explanation(
        "free, cached, used, shared",
        "blocks",
        NOW,
        "A cached block is free and still holds a prefix. A shared block has more than one reference: "
        "usually, several requests use it.",
        "kv: blocks.states",
    ),
    "block_age": Explanation(
        "age",
        "log2 of s",
        NOW,
        "Time since a cached block was last used, as a power of two.",
        "kv: blocks.ages",
    ),
    "mixed_steps": Explanation(
        "mixed",
        "steps",
        SECOND,
        "Number of steps that also processed prompts, and their mean duration.",
        "appliance_step_seconds",
    ),
    "decode_steps": Explanation(
        "decode",
        "steps",
        SECOND,
        "Number of decode-only steps, and their mean duration.",
        "appliance_step_seconds",
    ),
    "steps_running": Explanation(
        "SEQS, sequences",
        "sequences",
        NOW,
        "Number of running sequences, and the maximum number.",
        "appliance_sequences",
    ),
    "stall": Explanation(
        "!",
        "ms",
        SECOND,
        "A stall: a step with decodes that took more than three times as long as the mean decode-only "
        "step. Shows the longest step, and the request with the largest prefill chunk in it.",
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
        "THROTTLED, throttled by", "", NOW, "Reasons for reduced clocks.", "NVML clocks_event_reasons"
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
        "The MIG instances of a GPU that is split, with the memory in use on each of them. NVML reports no "
        "kernel time for such a GPU, so MIG is shown instead.",
        "gpus: mig_instances",
    ),
    "model_name": Explanation("NAME", "", "", "Product name of the GPU.", "NVML name"),
    "memory_parts": Explanation(
        "weights, KV cache, other, free",
        "bytes",
        NOW,
        "The parts of the GPU's memory. Other: activations, CUDA contexts and other processes.",
        "status: models.replicas.weight_bytes, models.replicas.kv_bytes; NVML memory.used",
    ),
    "kv_tokens": Explanation(
        "tokens",
        "tokens",
        NOW,
        "Capacity of the used blocks and of all blocks, in tokens. Under Longest contexts: the prompt and "
        "output tokens of a request so far.",
        "kv: blocks_used, blocks_total, block_tokens",
    ),
    "kv_size": Explanation("size", "bytes", NOW, "GPU memory of the KV cache, on all ranks.", "kv: kv_bytes"),
    "busy": Explanation(
        "busy",
        "% of time",
        SECOND,
        "Share of the time that the replica spent in steps.",
        "batches: step_ms, mixed_step_ms",
    ),
    "stall_time": Explanation("time", "date and time", "", "Time at which a stall ended.", "stalls: at"),
    "stall_mean": Explanation(
        "mean",
        "ms",
        SECOND,
        "Mean duration of the decode-only steps in the same second as a stall.",
        "stalls: mean_ms",
    ),
    "stall_decodes": Explanation(
        "decodes",
        "sequences",
        "the stalled step",
        "Sequences whose next token was delayed by a stall.",
        "stalls: decodes",
    ),
    "stall_prompt": Explanation(
        "prompt",
        "tokens",
        "the stalled step",
        "Prompt tokens that were processed in a stalled step.",
        "stalls: prompt_tokens",
    ),
    "stall_request": Explanation(
        "request with the largest chunk",
        "",
        "the stalled step",
        "The request, and its tenant, with the most prompt tokens in a stalled step.",
        "stalls: request, tenant",
    ),
    "predicted_bytes": Explanation(
        "fit",
        "bytes",
        "the last start",
        "Predicted GPU memory use on all ranks, computed before the replica started.",
        "status: models.replicas.predicted_bytes",
    ),
    "replica_memory": Explanation(
        "memory",
        "bytes",
        "the last start",
        "GPU memory that a replica uses, and the difference from the prediction. For a version: the memory "
        "of its weights and KV caches while it is loaded.",
        "status: models.replicas.used_bytes; registry: versions.memory_bytes",
    ),
    "replica_kv_bytes": Explanation(
        "KV cache",
        "bytes",
        NOW,
        "GPU memory of the KV cache, on all ranks.",
        "status: models.replicas.kv_bytes",
    ),
    "links": Explanation(
        "links",
        "",
        "the last start",
        "How the GPUs of a replica are connected, and how they exchange data.",
        "status: models.replicas.links, models.replicas.collectives",
    ),
    "version_number": Explanation(
        "version",
        "number",
        "",
        "Number of a version of the model. ● marks the default version.",
        "registry: versions.version",
    ),
    "added": Explanation(
        "added", "date and time", "", "Time at which the version was added.", "registry: versions.added_at"
    ),
    "folder": Explanation("folder", "", "", "Directory with the model's files.", "registry: versions.folder"),
    "aliases": Explanation(
        "aliases", "", NOW, "Other names that applications can use for the model.", "registry: aliases"
    ),
    "split": Explanation(
        "split",
        "% of requests",
        NOW,
        "How the requests for the name are divided among versions.",
        "registry: split",
    ),
    "shadow": Explanation(
        "shadow",
        "% of requests, % of tokens",
        "since the shadow was set or the service started",
        "Share of the requests that are copied to another version, and the share of tokens that were the "
        "same in both answers.",
        "registry: shadows.share, shadows.agreement",
    ),
    "scaled_replicas": Explanation(
        "replicas",
        "replicas",
        NOW,
        "Desired number of replicas, with its minimum and maximum.",
        "status: models.scaling.replicas",
    ),
    "demand": Explanation(
        "demand",
        "replicas",
        "now, and when a new replica would be ready",
        "The load in replicas: a load of 1.5 fully uses one and a half replicas.",
        "status: models.scaling.demand, models.scaling.expected",
    ),
    "scaling_reason": Explanation(
        "reason", "", NOW, "How the expected load was determined.", "status: models.scaling.reason"
    ),
    "scaling_refusal": Explanation(
        "refusal", "", NOW, "Reason why no replica can be added now.", "status: models.scaling.refusal"
    ),
    "uuid": Explanation("uuid", "", "", "Identifier of the GPU, as in nvidia-smi.", "gpus: uuid"),
    "gpu_replicas": Explanation("REPLICAS", "", NOW, "Replicas that run on the GPU.", "gpus: replicas"),
    "memory_clock_mhz": Explanation(
        "memory clock", "MHz", NOW, "Clock of the GPU's memory.", "gpus: memory_clock_mhz"
    ),
}
