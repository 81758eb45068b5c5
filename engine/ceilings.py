"""The peak rates of known devices, and the lower bounds of step times that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.config import DTYPE_BYTES, EXPERTS, ExpertsConfig, ModelConfig
from engine.sizing import FP8, parameters


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peak rates of one device."""

    bytes_per_s: float
    """Read bandwidth of the device's memory."""
    gemm_per_s: float
    """Rate of 16-bit GEMMs in floating-point operations per second."""
    fp8_gemm_per_s: float
    attention_per_s: float

    def gemm_rate(self, weights: str) -> float:
        """Return the operations per second of GEMMs with weights of a dtype, or "fp8"."""
        return self.fp8_gemm_per_s if weights == FP8 else self.gemm_per_s


_H200 = Ceilings(bytes_per_s=4355e9, gemm_per_s=700e12, fp8_gemm_per_s=1320e12, attention_per_s=700e12)

CEILINGS: dict[str, Ceilings] = {
    "NVIDIA H200": _H200,
    # Not measured. Memory: the data sheet's 3.35 TB/s times the fraction that an H200 reaches of its data
    # sheet's 4.8 TB/s. Operations: those of an H200, which has the same multiprocessors and data-sheet rates.
    "NVIDIA H100 80GB HBM3": replace(_H200, bytes_per_s=3.35e12 * _H200.bytes_per_s / 4.8e12),
}
"""Peak rates by device name. docs/performance.md describes the measurements."""


def device_model(device: str) -> str:
    """Return the model of a device named as in `ReplicaInfo.devices`: the name without its number."""
    return device.partition(" ")[2] or device


def ceilings(device: str) -> Ceilings | None:
    """Return the peak rates of a device named as in `ReplicaInfo.devices`; None if they are not known."""
    return CEILINGS.get(device_model(device))


def layer_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the layers, without embeddings and the output matrix, that a token
    is multiplied by: of a mixture of experts, only the chosen experts."""
    matrices = 1 if config.tie_word_embeddings else 2
    every = parameters(config) - matrices * config.vocab_size * config.hidden_size
    if config.experts is None:
        return every
    return every - (config.experts.count - config.experts.top_k) * _expert_parameters(config)


def read_parameters(config: ModelConfig, tokens: int) -> float:
    """Return the number of parameters of the layers that a pass of `tokens` tokens reads: of a mixture of
    experts, those that at least one token chooses (`expected_experts`)."""
    if config.experts is None:
        return layer_parameters(config)
    others = expected_experts(config.experts, tokens) - config.experts.top_k
    return layer_parameters(config) + others * _expert_parameters(config)


def expected_experts(experts: ExpertsConfig, tokens: int) -> float:
    """Return how many different experts of a layer `tokens` tokens choose on average, if each token is
    equally likely to choose any of them."""
    return experts.count * (1 - (1 - experts.top_k / experts.count) ** tokens)


def _expert_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of one routed expert in every layer that has experts."""
    assert config.experts is not None
    each = 3 * config.hidden_size * config.experts.intermediate_size
    return config.layer_kinds.count(EXPERTS) * each


@dataclass(frozen=True, slots=True)
class LeastTimes:
    """Lower bounds of the times of a replica; 0 if the device is not known."""

    step_s: float = 0.0
    """Lower bound of the time of a decode step, in which every rank reads its matrices once."""
    prompt_token_s: float = 0.0
    """Lower bound of the time per prompt token, from the GEMMs of the layers."""


def least_times(config: ModelConfig, device: str, weights: str, ranks: int) -> LeastTimes:
    """Return the bounds for a model on `ranks` devices named as in `ReplicaInfo.devices`.

    weights: dtype of the layers' matrices, from DTYPE_BYTES or "fp8".
    """
    rates = ceilings(device)
    if rates is None:
        return LeastTimes()
    matrices = layer_parameters(config)  # also those that a step of one token reads
    weight_bytes = 1 if weights == FP8 else DTYPE_BYTES[weights]
    head_bytes = 2 * config.vocab_size * config.hidden_size
    return LeastTimes(
        step_s=(matrices * weight_bytes + head_bytes) / ranks / rates.bytes_per_s,
        prompt_token_s=2 * matrices / ranks / rates.gemm_rate(weights),
    )
