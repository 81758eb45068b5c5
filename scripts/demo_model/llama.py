"""Implements the Llama architecture in plain torch, for training.

The model uses RMSNorm, RoPE in the rotate-half convention, grouped-query attention, SwiGLU and tied
embeddings.

Parameters are named as in Hugging Face's LlamaForCausalLM, so a state dict can be used as a checkpoint.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    """The model's dimensions. They are chosen so that every dimension of a shard is a multiple of 64, even if
    matrices are split across four ranks."""

    vocabulary: int = 5120
    hidden: int = 384
    intermediate: int = 1024
    layers: int = 5
    query_heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    context: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


class LlamaAttention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        query, keys = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Apply causal attention to x [batch, length, hidden]. Returns the same shape."""
        batch, length, _ = x.shape
        shape = self.shape
        query = self.q_proj(x).view(batch, length, shape.query_heads, shape.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, shape.kv_heads, shape.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, shape.kv_heads, shape.head_dim).transpose(1, 2)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class LlamaMlp(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Norm(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.weight = nn.Parameter(torch.ones(shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class LlamaLayer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.self_attn = LlamaAttention(shape)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = LlamaMlp(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaBody(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)


class Llama(nn.Module):
    """The decoder, with tied input and output embeddings.

    Weights are initialised as in GPT-2: normally distributed with standard deviation 0.02, and output
    projections scaled by 1/sqrt(2 × layers).
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = LlamaBody(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (
                    (2 * shape.layers) ** -0.5
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 1.0
                )
                nn.init.normal_(parameter, std=0.02 * scale)
        cosine, sine = rope_tables(shape)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, vocabulary] for tokens [batch, length] int64."""
        length = tokens.shape[1]
        cosine, sine = self.get_buffer("cosine")[:length], self.get_buffer("sine")[:length]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cosine, sine)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats, over all labels other than -100. `labels` is int64, [batch,
        length]."""
        return functional.cross_entropy(
            self(tokens).flatten(0, 1).float(), labels.flatten(), ignore_index=-100
        )


def rope_tables(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [context, head_dim] float32. Each frequency occurs twice, for the rotate-half
    convention."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float32), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply RoPE (Su et al. 2021) in the rotate-half convention to x [..., length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)
