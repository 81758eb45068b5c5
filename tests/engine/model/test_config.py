"""Tests of reading `config.json` in all supported formats. Errors must name the file, the field, the value
and the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import CheckpointError, ExpertsConfig, ModelConfig, RopeConfig, UnsupportedError
from engine.families import read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 101,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2_MOE = {**LLAMA, "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}
QWEN3_MOE = {**LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
OLMOE = {**LLAMA, "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]}


def _compressed(**changes: Any) -> dict[str, Any]:
    """Return a quantization_config in the format of llm-compressor. `changes` replace fields in the scheme of
    the weights."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", **changes}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _read(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


def test_fields_missing_from_an_old_llama_config_have_their_defaults(tmp_path: Path) -> None:
    config = _read(tmp_path, LLAMA)
    assert config.head_dim == 8
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.max_position_embeddings == 2048
    assert config.rms_norm_eps == 1e-6
    assert config.dtype == "float32"
    assert config.sliding_windows == (None,) * 4
    assert config.layer_kinds == ("dense",) * 4
    assert not (config.tie_word_embeddings or config.qkv_bias or config.o_bias or config.mlp_bias)
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert _read(tmp_path, without).kv_heads == 8


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        (LLAMA | {"sliding_window": 9}, (None,) * 4),
        (MISTRAL, (4096,) * 4),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (MISTRAL | {"sliding_window": 9}, (9,) * 4),
        (MIXTRAL, (None,) * 4),
        (MIXTRAL | {"sliding_window": 9}, (9,) * 4),
        (OLMOE | {"sliding_window": 9}, (None,) * 4),
        (QWEN3_MOE | {"sliding_window": 9}, (None,) * 4),
        (QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 9}, (9,) * 4),
        (QWEN2_MOE | {"sliding_window": 0}, (None,) * 4),
        (QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 9}, (9, None, 9, None)),
        (
            QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            (9, None, None, None),
        ),
        (QWEN2 | {"sliding_window": 9}, (None,) * 4),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 9}, (None,) * 4),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
            (None,) * 3 + (9,),
        ),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 9, None, 9),
        ),
    ],
)
def test_windows_are_those_of_each_family(
    values: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert _read(tmp_path, values).sliding_windows == windows


def test_families_differ_in_biases_and_norms(tmp_path: Path) -> None:
    qwen2, qwen3 = _read(tmp_path, QWEN2), _read(tmp_path, QWEN3)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    biased = _read(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("values", "experts"),
    [
        (LLAMA | {"num_experts": 8}, None),
        (QWEN3_MOE, ExpertsConfig(128, 8, 768, False, count_field="num_local_experts")),
        (QWEN3_MOE | {"num_experts": 16, "norm_topk_prob": True}, ExpertsConfig(16, 8, 768, True)),
        (
            QWEN3_MOE | {"num_local_experts": 16},
            ExpertsConfig(16, 8, 768, False, count_field="num_local_experts"),
        ),
        (QWEN2_MOE, ExpertsConfig(60, 4, 1408, False, 5632)),
        (MIXTRAL, ExpertsConfig(8, 2, 96, True, None, "num_local_experts", "intermediate_size")),
        (
            OLMOE | {"num_experts_per_tok": 3},
            ExpertsConfig(64, 3, 96, False, width_field="intermediate_size"),
        ),
    ],
)
def test_experts_are_those_of_each_family(
    values: dict[str, Any], experts: ExpertsConfig | None, tmp_path: Path
) -> None:
    config = _read(tmp_path, values)
    assert config.experts == experts
    assert config.layer_kinds == ("dense" if experts is None else "experts",) * 4
    assert config.qk_norm_all_heads == (config.model_type == "olmoe")
    assert config.rms_norm_eps == (1e-5 if config.model_type in ("mixtral", "olmoe") else 1e-6)
    assert config.rope.theta == (1e6 if config.model_type == "mixtral" else 1e4)


@pytest.mark.parametrize("family", [QWEN2_MOE, QWEN3_MOE])
def test_some_layers_of_a_qwen_model_with_experts_are_dense(family: dict[str, Any], tmp_path: Path) -> None:
    def kinds(**changes: Any) -> str:
        return "".join(kind[0] for kind in _read(tmp_path, family | changes).layer_kinds)

    assert kinds(mlp_only_layers=[0, 3]) == "deed"
    assert kinds(decoder_sparse_step=2) == "dede"
    assert kinds(decoder_sparse_step=3, mlp_only_layers=[2]) == "dddd"


def test_the_width_of_every_expert_must_divide_by_the_ranks(tmp_path: Path) -> None:
    family = QWEN2_MOE | {"num_key_value_heads": 8, "intermediate_size": 97, "moe_intermediate_size": 36}
    with pytest.raises(UnsupportedError, match="does not divide experts of 36; this model supports 1, 2, 4"):
        _read(tmp_path, family).check_parallel(8)
    with pytest.raises(UnsupportedError, match=r"not divide an MLP of 97 and experts of 36; .* supports 1$"):
        _read(tmp_path, family | {"mlp_only_layers": [1]}).check_parallel(8)
    shared = family | {"shared_expert_intermediate_size": 30}
    with pytest.raises(
        UnsupportedError, match=r"not divide experts of 36 and a shared expert of 30; .* 1, 2$"
    ):
        _read(tmp_path, shared).check_parallel(8)


def test_whole_experts_must_divide_by_the_ranks_instead_of_their_width(tmp_path: Path) -> None:
    family = QWEN2_MOE | {"num_key_value_heads": 8, "num_experts": 4, "moe_intermediate_size": 37}
    family["shared_expert_intermediate_size"] = 32
    config = _read(tmp_path, family).with_whole_experts()
    config.check_parallel(4)
    with pytest.raises(UnsupportedError, match=r"does not divide 4 experts; this model supports 1, 2, 4$"):
        config.check_parallel(8)
    assert config.experts is not None
    parts = [config.shard(4, rank).experts(config.experts) for rank in range(4)]
    assert [part.first for part in parts] == [0, 1, 2, 3]
    assert {(part.count, part.width, part.start) for part in parts} == {(1, 37, 0)}
    with pytest.raises(UnsupportedError, match="expert_parallel is true, but llama models have no experts"):
        _read(tmp_path, LLAMA).with_whole_experts()


def test_rope_and_dtype_are_read_from_configs_of_both_versions(tmp_path: Path) -> None:
    rope = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    older = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **rope}, "torch_dtype": "bfloat16"}
    newer = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **rope}, "dtype": "bfloat16"}
    assert _read(tmp_path, LLAMA | older) == _read(tmp_path, LLAMA | newer)
    assert _read(tmp_path, LLAMA | newer).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("rope", "default", "limit"),
    [
        ({}, 2048, 2048),
        ({"rope_type": "linear", "factor": 4}, 2048, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 2048, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192, 8192),
        ({"rope_type": "yarn", "original_max_position_embeddings": 512}, 2048, 2048),
    ],
)
def test_lengths_follow_from_the_scaling(
    rope: dict[str, Any], default: int, limit: int, tmp_path: Path
) -> None:
    config = _read(tmp_path, LLAMA | {"rope_scaling": rope})
    assert config.resolve_length(None) == default
    assert config.resolve_length(limit) == limit
    with pytest.raises(
        UnsupportedError, match=f"max_model_len is {limit + 1}; this checkpoint allows 1 to {limit}"
    ):
        config.resolve_length(limit + 1)
    with pytest.raises(UnsupportedError, match="max_model_len is 0"):
        config.resolve_length(0)


@pytest.mark.parametrize(
    ("quantised", "fp8"),
    [
        (None, False),
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "fmt": "e4m3", "weight_block_size": None},
            True,
        ),
        (_compressed(), True),
        (_compressed(strategy="tensor"), True),
        (_compressed(symmetric=True, dynamic=False, observer="minmax"), True),
        # The checkpoint quantises only its KV cache. The loader ignores this, because the settings determine
        # the dtype of the KV cache.
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {}}, False),
    ],
)
def test_fp8_matrices_are_detected_from_the_config(
    quantised: dict[str, Any] | None, fp8: bool, tmp_path: Path
) -> None:
    assert _read(tmp_path, LLAMA | {"quantization_config": quantised}).fp8 is fp8


NAN = float("nan")
REFUSED = [
    ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported values: llama (LlamaForCausalLM), mistral ("),
    ({"model_type": None}, "model_type is None; supported values: llama"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is ['LlamaForSequenceClass"),
    ({"architectures": 5}, "architectures is 5; supported values: llama"),
    ({"hidden_size": None}, "hidden_size is missing, but this model requires it"),
    ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer of at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer of at least 1"),
    ({"vocab_size": True}, "vocab_size is True; it must be an integer"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads (8)"),
    ({"num_attention_heads": 6}, "num_attention_heads is 6; without head_dim it must divide hidden_size 64"),
    ({"head_dim": 7}, "head_dim is 7; rotary embeddings need an even number"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps is nan; it must be a number above 0"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu is supported"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
    ({"torch_dtype": "float64"}, "torch_dtype is 'float64'; supported values: float32, bfloat16, float16"),
    ({"dtype": ["float32"]}, "dtype is ['float32']; supported values: float32"),
    (
        {"quantization_config": ["fp8"]},
        "quantization_config is ['fp8']; it must be an object that contains quant_method",
    ),
    *(
        (
            {"quantization_config": quantised},
            f"quantization_config.{field}; supported quantised checkpoints are fp8 and compressed-tensors",
        )
        for quantised, field in (
            ({}, "quant_method is None"),
            ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
            ({"quant_method": ["fp8"]}, "quant_method is ['fp8']"),
            ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
            (_compressed(type="int"), "config_groups.group_0.weights.type is 'int'"),
            (_compressed(num_bits=4), "config_groups.group_0.weights.num_bits is 4"),
            (_compressed(strategy="block"), "config_groups.group_0.weights.strategy is 'block'"),
            (_compressed(strategy=None), "config_groups.group_0.weights.strategy is None"),
            (_compressed(strategy=["channel"]), "config_groups.group_0.weights.strategy is ['channel']"),
            (_compressed(symmetric=False), "config_groups.group_0.weights.symmetric is False"),
        )
    ),
    *(
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}, message)
        for groups, message in (
            (
                None,
                "quantization_config.config_groups is None; it must be an object with one entry per group",
            ),
            (
                [{}],
                "quantization_config.config_groups is [{}]; it must be an object with one entry per group",
            ),
            (
                {"a": 1},
                "quantization_config.config_groups is {'a': 1}; the weights of group a must be an object",
            ),
            ({"a": {"weights": None}}, "the weights of group a must be an object"),
        )
    ),
    (
        {"rope_scaling": {"type": "longrope"}},
        "rope_scaling.type is 'longrope'; supported values: default, linear",
    ),
    ({"rope_scaling": {"type": ["yarn"]}}, "rope_scaling.type is ['yarn']; supported values:"),
    ({"rope_scaling": [1]}, "rope_scaling is [1]; it must be one set of parameters for all layers"),
    ({"rope_scaling": {"full_attention": {}}}, "one set of parameters for all layers"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        "rope_scaling.factor is 0.5; it must be at least 1",
    ),
    (
        {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
        "rope_scaling.low_freq_factor is 4; it must be below high_freq_factor (4)",
    ),
    ({"rope_theta": -1}, "rope_theta is -1; it must be a number above 0"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}},
        "rope_parameters.rope_theta is 1.0; yarn needs a base above 1",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only full rotation"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "head_dim is 2; dynamic rope needs"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_a_bad_field_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        _read(tmp_path, LLAMA | change)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; there are only 8 experts"),
        (QWEN3_MOE | {"num_experts": 0}, "num_experts is 0; it must be an integer of at least 1"),
        (QWEN2_MOE | {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; it must be true or false"),
        (QWEN3_MOE | {"mlp_only_layers": [[1]]}, "mlp_only_layers is [[1]]; it must be a list of integers"),
        (QWEN3_MOE | {"mlp_only_layers": 1}, "mlp_only_layers is 1; it must be a list of integers"),
        (OLMOE | {"clip_qkv": 8.0}, "clip_qkv is 8.0; only null is supported"),
    ],
)
def test_a_bad_field_of_experts_is_refused_by_name(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        _read(tmp_path, values)
    assert message in str(caught.value)


def test_layer_types_must_fit(tmp_path: Path) -> None:
    for kinds, message in [
        (["full_attention"], "it must be a list of 4 entries (num_hidden_layers)"),
        (["linear_attention"] * 4, "only full_attention and sliding_attention are supported"),
        ([["full_attention"]] * 4, "only full_attention and sliding_attention are supported"),
        (["sliding_attention"] * 4, "sliding_attention needs use_sliding_window and sliding_window"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            _read(tmp_path, QWEN3 | {"layer_types": kinds})
        assert message in str(caught.value)


def test_files_that_are_not_there_or_not_json_are_named(tmp_path: Path) -> None:
    for content, message in [
        (None, ": no such file"),
        ("{", " is not valid JSON"),
        ("[" * 10**6, " is not valid JSON"),
        ("[1]", " is not a JSON object"),
    ]:
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError) as caught:
            read_config(tmp_path)
        assert f"{tmp_path / 'config.json'}{message}" in str(caught.value)
    with pytest.raises(CheckpointError, match="no such folder; specify a Hugging Face checkpoint folder"):
        read_config(tmp_path / "nowhere")


def test_a_number_of_ranks_that_does_not_divide_is_refused_and_valid_numbers_are_listed(
    tmp_path: Path,
) -> None:
    config = _read(tmp_path, LLAMA)
    for size in (1, 2, 4, 8):
        config.check_parallel(size)
    with pytest.raises(UnsupportedError) as caught:
        config.check_parallel(3)
    assert str(caught.value) == (
        "tensor_parallel_size is 3, which does not divide 8 attention heads and 2 KV heads; "
        "this model supports 1, 2, 4, 8"
    )
    with pytest.raises(UnsupportedError, match="does not divide an MLP of 90; this model supports 1, 2"):
        _read(tmp_path, LLAMA | {"intermediate_size": 90}).check_parallel(4)
    with pytest.raises(UnsupportedError, match="it must be at least 1"):
        config.check_parallel(0)
    with pytest.raises(
        UnsupportedError, match="rank is 2; with tensor_parallel_size 2, it must be from 0 to 1"
    ):
        config.shard(2, 2)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shards_tile_the_model(size: int, tmp_path: Path) -> None:
    config = _read(tmp_path, LLAMA)
    shards = [config.shard(size, rank) for rank in range(size)]
    assert [s.first_head for s in shards] == [rank * 8 // size for rank in range(size)]
    assert sum(s.vocab_real for s in shards) == 101
    assert {s.vocab for s in shards} == {-(-101 // size)}
    group = config.heads // config.kv_heads
    for shard in shards:
        # A rank holds only the KV heads that its query heads use.
        wanted = {head // group for head in range(shard.first_head, shard.first_head + shard.heads)}
        assert wanted == set(range(shard.first_kv_head, shard.first_kv_head + shard.kv_heads))


def test_reading_a_config_and_sizing_it_load_no_torch() -> None:
    code = "import sys, engine.sizing, engine.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
