"""Loading a GPU library's kernels before anybody waits for them.

cuBLAS picks another kernel at many numbers of rows, and the driver loads each when it is first launched, for
which it waits until the device has nothing to do: in a step of prompts, a stall of a tenth of a second for
everybody who decodes.
"""

from __future__ import annotations

import torch

from engine.model.decoder import Decoder
from kernels import Stream


def product_rows(most: int) -> list[int]:
    """Numbers of rows at which to ask the library for a product, from `most` down: close together where its
    choice follows them closely. The most first, so that torch's allocator finds room for all others in what
    it then has: upwards, each would take memory of its own, some gigabytes together."""
    steps = [*range(8, 513, 8), *range(576, 2049, 64), *range(2304, most, 256)]
    return [most] + [rows for rows in reversed(steps) if rows < most]


def load_products(decoder: Decoder, step_tokens: int, max_rows: int) -> None:
    """Run a layer's products for numbers of tokens up to `step_tokens`, and the output matrix for those up to
    `max_rows`. Every rank must call it; nothing is kept of it, and it does not wait for the device."""
    config, shard, layer = decoder.config, decoder.shard, decoder.layers[0]
    eps, ranks = config.rms_norm_eps, decoder.ranks

    def zeros(rows: int, width: int) -> torch.Tensor:
        return torch.zeros((rows, width), dtype=decoder.dtype, device=decoder.device)

    for tokens in product_rows(step_tokens):
        residual = Stream(zeros(tokens, config.hidden_size))
        layer.attention.qkv.after_norm(residual, layer.input_norm, eps)
        attended = zeros(tokens, shard.heads * config.head_dim)
        residual = layer.attention.o.add_to(residual, attended, layer.post_norm, ranks)
        activated = layer.mlp.activate(residual, layer.post_norm, eps)
        layer.mlp.down.add_to(residual, activated, None, ranks)
    for rows in product_rows(max_rows):
        decoder.logits(zeros(rows, config.hidden_size))
