"""Peak rates of known devices, and the resulting lower bounds on step times."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.config import EXPERTS, ExpertsConfig, ModelConfig
from engine.messages import WeightsDType
from engine.sizing import FP8, FP8_BLOCKS, element_bytes, parameters


@dataclass(frozen=True, slots=True)
class Ceilings:
    """A device's peak memory bandwidth and compute rates."""

    bytes_per_s: float
    """Read bandwidth of device memory in bytes per second."""
    gemm_per_s: float
    """Rate of 16-bit GEMMs in floating-point operations per second."""
    fp8_gemm_per_s: float
    attention_per_s: float

    def gemm_rate(self, weights: WeightsDType) -> float:
        """Return the GEMM rate in operations per second for weights of dtype `weights`."""
        return self.fp8_gemm_per_s if weights in (FP8, FP8_BLOCKS) else self.gemm_per_s


_H200 = Ceilings(bytes_per_s=4355e9, gemm_per_s=700e12, fp8_gemm_per_s=1320e12, attention_per_s=700e12)

CEILINGS: dict[str, Ceilings] = {
    "NVIDIA H200": _H200,
    # The H100's rates are estimates. The bandwidth assumes that an H100 reaches the same fraction of its data
    # sheet value (3.35 TB/s) as an H200 does (4.8 TB/s). The compute rates are the H200's, because the data
    # sheets list the same multiprocessor count and compute rates for both.
    "NVIDIA H100 80GB HBM3": replace(_H200, bytes_per_s=3.35e12 * _H200.bytes_per_s / 4.8e12),
}
"""Peak rates by device name. docs/performance.md describes how they were measured."""


def device_model(device: str) -> str:
    """Return the device model without its device number: "NVIDIA H200" for "cuda:0 NVIDIA H200"."""
    return device.partition(" ")[2] or device


def ceilings(device: str) -> Ceilings | None:
    """Return a device's peak rates, or None if they are unknown. `device` is an entry of
    `ReplicaInfo.devices`."""
    return CEILINGS.get(device_model(device))


def layer_parameters(config: ModelConfig) -> int:
    """Return the number of layer parameters that one token uses. Embeddings, the output matrix and experts
    not chosen by the token are excluded."""
    matrices = 1 if config.tie_word_embeddings else 2
    every = parameters(config) - matrices * config.vocab_size * config.hidden_size
    if config.experts is None:
        return every
    return every - (config.experts.count - config.experts.top_k) * _expert_parameters(config)


def read_parameters(config: ModelConfig, tokens: int) -> float:
    """Return the number of layer parameters that a pass of `tokens` tokens reads. Only experts chosen by at
    least one token are read (`expected_experts`)."""
    if config.experts is None:
        return layer_parameters(config)
    others = expected_experts(config.experts, tokens) - config.experts.top_k
    return layer_parameters(config) + others * _expert_parameters(config)


def expected_experts(experts: ExpertsConfig, tokens: int) -> float:
    """Return the expected number of distinct experts that `tokens` tokens choose in each layer, if all
    experts are equally likely to be chosen."""
    return experts.count * (1 - (1 - experts.top_k / experts.count) ** tokens)


def _expert_parameters(config: ModelConfig) -> int:
    """Return the total number of parameters in one routed expert of every layer that has experts."""
    assert config.experts is not None
    each = 3 * config.hidden_size * config.experts.intermediate_size
    return config.layer_kinds.count(EXPERTS) * each


@dataclass(frozen=True, slots=True)
class MinTimes:
    """Lower bounds on a replica's step times, or 0 if the device is unknown."""

    step_s: float = 0.0
    """Lower bound on the duration of a decode step, in which each rank reads all of its matrices once."""
    prompt_token_s: float = 0.0
    """Lower bound on the time per prompt token, derived from the layers' GEMMs."""


def min_times(config: ModelConfig, device: str, weights: WeightsDType, ranks: int) -> MinTimes:
    """Return lower bounds on the step times of a model on `ranks` devices.

    `device` is an entry of `ReplicaInfo.devices`. `weights` is the dtype of the layers' matrices.
    """
    rates = ceilings(device)
    if rates is None:
        return MinTimes()
    matrices = layer_parameters(config)  # the parameters that a one-token decode step reads
    weight_bytes = element_bytes(weights)
    head_bytes = 2 * config.vocab_size * config.hidden_size
    return MinTimes(
        step_s=(matrices * weight_bytes + head_bytes) / ranks / rates.bytes_per_s,
        prompt_token_s=2 * matrices / ranks / rates.gemm_rate(weights),
    )
