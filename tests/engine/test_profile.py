"""Tests of the profile: each kernel's time, memory traffic and gaps."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.bench.shapes import SHAPES, write_config
from engine.ceilings import CEILINGS, read_parameters
from engine.config import ModelConfig
from engine.families import read_config
from engine.messages import ReplicaInfo
from engine.profile.__main__ import main
from engine.profile.report import idle_gaps, kernel_rows, lines
from engine.profile.steps import StepShape
from engine.profile.trace import TraceTimeline, read_timeline, short_name
from engine.profile.work import KernelWork, label_kernels, work_by_kernel

H200 = CEILINGS["NVIDIA H200"]
ONE_TOKEN = StepShape([641], [], 1)


def kernel(name: str, start: float, us: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": us, "pid": 0, "tid": 7}


def timeline_of(tmp_path: Path, events: list[dict[str, Any]]) -> TraceTimeline:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    return read_timeline(path)


@pytest.fixture
def llama(tmp_path: Path) -> ModelConfig:
    return read_config(write_config("llama-3.1-8b", tmp_path / "model"))


@pytest.fixture
def mixture(tmp_path: Path) -> ModelConfig:
    return read_config(write_config("qwen3-30b-a3b", tmp_path / "mixture"))


def with_shared_expert(mixture: ModelConfig, width: int) -> ModelConfig:
    assert mixture.experts is not None
    return replace(mixture, experts=replace(mixture.experts, shared_intermediate_size=width))


def info(**fields: Any) -> ReplicaInfo:
    made: dict[str, Any] = dict.fromkeys(("dtype", "weights", "kv_cache_dtype"), "bfloat16")
    for field in msgspec.structs.fields(ReplicaInfo):
        made.setdefault(field.name, {int: 0, float: 0.0, str: ""}.get(field.type, []))
    return ReplicaInfo(**made | fields)


# ── the time line ────────────────────────────────────────────────────────────────────────────────────


def test_an_overlapping_kernel_counts_from_the_end_of_the_previous_one(tmp_path: Path) -> None:
    events = [
        kernel("_norm", 100, 10),
        kernel("_dot", 104, 26),
        kernel("_dot", 105, 20),
        kernel("_rope", 35, 5),
    ]
    timeline = timeline_of(tmp_path, [*events, kernel("aten::mm", 0, 500, "cpu_op")])
    assert timeline.on_gpu and timeline.us == 95
    assert [(call.name, call.us, call.gap_us) for call in timeline.calls] == [
        ("_rope", 5, 0),
        ("_norm", 10, 60),
        ("_dot", 20, 0),
        ("_dot", 0, 0),
    ]


def test_on_a_cpu_the_time_of_nested_operations_is_excluded(tmp_path: Path) -> None:
    events = [
        kernel("aten::linear", 0, 100, "cpu_op"),
        kernel("aten::mm", 10, 60, "cpu_op"),
        kernel("aten::empty", 20, 5, "cpu_op"),
        kernel("aten::add", 70, 30, "cpu_op"),
        kernel("aten::mul", 100, 7, "cpu_op"),
    ]
    timeline = timeline_of(tmp_path, events)
    assert {call.name: call.us for call in timeline.calls} == {
        "aten::linear": 10,
        "aten::mm": 55,
        "aten::empty": 5,
        "aten::add": 30,
        "aten::mul": 7,
    }


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither kernels nor operations"):
        timeline_of(tmp_path, [])


def test_kernel_names_are_shortened() -> None:
    copy = "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(X)>(int)"
    gemm = "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int> > >(Params)"
    assert short_name(copy) == "vectorized_elementwise_kernel bfloat16_copy"
    assert short_name(gemm) == "cutlass device_kernel"
    assert short_name("void cublasLt::splitKreduce_kernel<32, 16, int>(Params)") == "splitKreduce_kernel"
    assert short_name("nvjet_tst_64x8_64x16_2x1_v_bz_TNT") == "nvjet_tst_64x8_64x16_2x1_v_bz_TNT"
    assert short_name("_prefill_kernel") == "_prefill_kernel"


# ── the work of kernels ────────────────────────────────────────────────────────────────────────────────


def test_gemms_are_labelled_by_their_order(llama: ModelConfig) -> None:
    one_layer = llama.with_layers([0])
    layer = [
        "_norm",
        "_gemv",
        "_rope",
        "nvjet_tst_64x8",
        "_dot",
        "splitKreduce_kernel",
        "cutlass device_kernel",
    ]
    names = [*layer, "_stream", "scan_kernel"]
    assert label_kernels(names, one_layer, [ONE_TOKEN]) == [
        "_norm",
        "qkv (_gemv)",
        "_rope",
        "o (nvjet_tst_64x8)",
        "gate_up (_dot)",
        "splitKreduce_kernel",
        "down (cutlass device_kernel)",
        "lm_head (_stream)",
        "scan_kernel",
    ]
    nothing_sampled = StepShape([], [(0, 100)], 0)
    assert label_kernels(layer, one_layer, [nothing_sampled])[-1] == "down (cutlass device_kernel)"
    # The recording has one GEMM too many, so its GEMMs cannot be assigned to linears.
    assert label_kernels(names, one_layer, [nothing_sampled])[1] == "gemms (_gemv)"


def test_kernels_of_experts_have_labels_of_their_own(mixture: ModelConfig) -> None:
    few = ["_place", "_gemv", "_rope", "_dot", "_route", "_up_gemv", "_down_gemv", "_stream"]
    one_layer = mixture.with_layers([0])
    assert label_kernels(few, one_layer, [ONE_TOKEN]) == [
        "_place",
        "qkv (_gemv)",
        "_rope",
        "o (_dot)",
        "route (_route)",
        "experts up (_up_gemv)",
        "experts down (_down_gemv)",
        "lm_head (_stream)",
    ]
    many = ["_norm", "_logits", "_choose", "_place", "_grouped", "_quantise", "_grouped", "_combine"]
    two_layers = label_kernels(
        ["_dot", "_dot", *many] * 2, mixture.with_layers([0, 1]), [StepShape([], [], 0)]
    )
    assert two_layers == 2 * [
        "qkv (_dot)",
        "o (_dot)",
        "_norm",
        "route (_logits)",
        "choose (_choose)",
        "sort (_place)",
        "experts up (_grouped)",
        "_quantise",
        "experts down (_grouped)",
        "combine (_combine)",
    ]
    names = ["_dot", "_dot", "_route", "_up_dot", "nvjet", "_dot", "_dot", "_down_dot", "_stream"]
    shared = with_shared_expert(one_layer, 512)
    assert label_kernels(names, shared, [ONE_TOKEN])[4:7] == [
        "shared gate (nvjet)",
        "shared gate_up (_dot)",
        "shared down (_dot)",
    ]


def test_every_kernel_of_experts_has_a_label(mixture: ModelConfig) -> None:
    kernels = Path(__file__).parents[2] / "kernels" / "triton"
    launched = [
        name
        for file in ("experts_few.py", "experts_many.py", "experts_route.py")
        for name in re.findall(r"^ +(_\w+)\[.*\]\($", (kernels / file).read_text(), re.MULTILINE)
    ]
    assert {"_route", "_grouped", "_combine"} <= set(launched)
    labels = label_kernels(
        [name for kernel in launched for name in (kernel, "_grouped")], mixture, [ONE_TOKEN]
    )
    works = work_by_kernel(mixture, info(), [ONE_TOKEN], H200)
    assert {label.partition(" (")[0] for label in labels} <= works.keys()


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_step_reads_the_experts_that_its_tokens_choose(mixture: ModelConfig, tokens: int) -> None:
    works = work_by_kernel(mixture, info(), [StepShape([641] * tokens, [], tokens)], H200)
    chosen = 128 * (1 - (1 - 8 / 128) ** tokens)
    assert works["experts up"].bytes == pytest.approx(48 * chosen * 2 * 768 * 2048 * 2, rel=0.01)
    assert works["experts down"].bytes == pytest.approx(48 * chosen * 768 * 2048 * 2, rel=0.01)
    assert works["experts up"].operations == 48 * 2 * tokens * 8 * 2 * 768 * 2048
    assert works["gate_up"].bytes == works["down"].bytes == 0
    names = ("qkv", "o", "route", "experts up", "experts down")
    read = 2 * read_parameters(mixture, tokens)
    assert sum(works[name].bytes for name in names) == pytest.approx(read, rel=0.02)
    assert works["gemms"].bytes == sum(works[name].bytes for name in ("qkv", "o", "lm_head"))


def test_fp8_halves_the_experts_but_not_the_router(mixture: ModelConfig) -> None:
    wide, half = (
        work_by_kernel(mixture, info(weights=weights), [ONE_TOKEN], H200) for weights in ("bfloat16", "fp8")
    )
    for name in ("experts up", "experts down"):
        assert half[name].bytes / wide[name].bytes == pytest.approx(0.5, rel=0.01)
        assert half[name].per_s == H200.fp8_gemm_per_s
    assert half["route"] == wide["route"]


def test_ranks_share_the_experts_but_not_the_router(mixture: ModelConfig) -> None:
    config = with_shared_expert(mixture, 512)
    one, two = (work_by_kernel(config, info(tensor_parallel_size=size), [ONE_TOKEN], H200) for size in (1, 2))
    for name in ("experts up", "experts down", "shared gate_up", "shared down"):
        assert two[name].operations == one[name].operations / 2
    for name in ("route", "shared gate"):
        assert two[name] == one[name]


def test_a_prompt_of_a_mixture_is_limited_by_its_operations(mixture: ModelConfig) -> None:
    shape = StepShape([], [(0, 8192)], 1)
    few = work_by_kernel(mixture, info(), [shape], H200)
    many = work_by_kernel(mixture, info(), [shape], H200, launched={"_logits", "_grouped"})
    # In the last layer, only the last token is computed.
    assert few["experts up"].operations == 4 * (47 * 8192 + 1) * 8 * 768 * 2048
    assert few["experts up"].limit_us(H200) == pytest.approx(1e6 * few["experts up"].operations / 700e12)
    more = many["experts down"].bytes - few["experts down"].bytes
    assert more == (47 * 8192 + 1) * (8 - 2) * 2048 * 2
    assert many["combine"].bytes == (47 * 8192 + 1) * (8 + 2) * 2048 * 2


def test_a_decode_step_reads_every_weight_once_and_the_cache_once(llama: ModelConfig) -> None:
    works = work_by_kernel(llama, info(), [ONE_TOKEN], H200)
    assert works["gate_up"].bytes == pytest.approx(32 * 28672 * 4096 * 2, rel=1e-3)
    assert works["lm_head"].bytes == pytest.approx(128256 * 4096 * 2, rel=1e-3)
    # 641 tokens occupy 11 pages of 64 tokens, which are 704 tokens.
    assert works["decode_kernel"].bytes == pytest.approx(32 * 2 * 8 * 704 * 128 * 2, rel=0.02)
    gemms = [works[name] for name in ("qkv", "o", "gate_up", "down", "lm_head")]
    assert sum(work.limit_us(H200) for work in gemms) == pytest.approx(15.0e9 / 4355e3, rel=0.01)
    assert works["gemms"].bytes == sum(work.bytes for work in gemms)


def test_fp8_halves_the_layers_weights_and_the_cache_but_not_the_output_matrix(llama: ModelConfig) -> None:
    wide = work_by_kernel(llama, info(), [ONE_TOKEN], H200)
    half = work_by_kernel(llama, info(weights="fp8", kv_cache_dtype="fp8"), [ONE_TOKEN], H200)
    assert half["down"].bytes / wide["down"].bytes == pytest.approx(0.5, rel=0.01)
    assert half["decode_kernel"].bytes / wide["decode_kernel"].bytes == pytest.approx(132 / 256, rel=0.01)
    assert half["lm_head"].bytes == wide["lm_head"].bytes


def test_norms_fused_into_gemms_are_not_counted_as_norm_kernels(llama: ModelConfig) -> None:
    step = StepShape([640] * 8, [], 8)
    every = work_by_kernel(llama, info(), [step], H200)["_norm"].bytes
    assert every == (2 * 32 + 1) * 8 * 4096 * 2 * 2
    assert work_by_kernel(llama, info(), [step], H200, norms=2)["_norm"].bytes == every * 2 / 65


def test_a_prompt_is_limited_by_its_operations(llama: ModelConfig) -> None:
    works = work_by_kernel(llama, info(), [StepShape([], [(0, 8192)], 1)], H200)
    assert works["qkv"].operations == 2 * 32 * 8192 * 6144 * 4096
    assert works["qkv"].limit_us(H200) == pytest.approx(1e6 * works["qkv"].operations / 700e12)
    # In the last layer, all tokens except the last are only written to the cache.
    assert works["o"].operations == 2 * (31 * 8192 + 1) * 4096 * 4096
    assert works["_prefill_kernel"].operations == 4 * 31 * 32 * 128 * 8192 * 8193 / 2
    assert works["decode_kernel"].operations == 4 * 32 * 128 * 8192
    later = work_by_kernel(llama, info(), [StepShape([], [(4096, 4096)], 1)], H200)
    assert later["_prefill_kernel"].operations == pytest.approx(
        works["_prefill_kernel"].operations * 0.75, rel=0.01
    )


def test_prompt_attention_is_counted_for_the_kernel_that_runs_it(llama: ModelConfig) -> None:
    pytest.importorskip("triton")
    long, short = StepShape([], [(0, 8192)], 1), StepShape([], [(0, 512)] * 4, 4)
    apart = [work_by_kernel(llama, info(), [shape], H200) for shape in (long, short)]
    both = work_by_kernel(llama, info(), [long, short], H200, launched={"_prefill_hopper"})
    assert [both[name] for name in ("_prefill_hopper", "_prefill_kernel")] == [
        work["_prefill_kernel"] for work in apart
    ]
    assert both["_expand_kernel"] == apart[0]["_expand_kernel"] + apart[1]["_expand_kernel"]


@pytest.mark.parametrize(("cache", "kernel"), [("fp8", "_prefill_hopper"), ("bfloat16", "_prefill_kernel")])
def test_chunks_that_read_an_fp8_cache_directly_do_not_affect_the_kernel_choice_of_others(
    llama: ModelConfig, cache: str, kernel: str
) -> None:
    pytest.importorskip("triton")
    shape = StepShape([], [(0, 2048), *[(0, 32)] * 100], 101)
    works = work_by_kernel(llama, info(kv_cache_dtype=cache), [shape], H200, launched={"_prefill_hopper"})
    kernels = ("_prefill_hopper", "_prefill_kernel")
    assert [name for name in kernels if works[name].operations] == [kernel]


def test_the_work_of_several_steps_is_summed(llama: ModelConfig) -> None:
    one = work_by_kernel(llama, info(), [ONE_TOKEN], H200)
    three = work_by_kernel(llama, info(), [ONE_TOKEN] * 3, H200)
    assert three["o"] == KernelWork(3 * one["o"].bytes, 3 * one["o"].operations, one["o"].per_s)


# ── the table ────────────────────────────────────────────────────────────────────────────────────────


def test_times_and_gaps_add_up_to_the_step(tmp_path: Path) -> None:
    events = [
        kernel(name, start, us) for name, start, us in [("_dot", 0, 40), ("_norm", 45, 5), ("_dot", 48, 52)]
    ]
    timeline = timeline_of(tmp_path, events)
    names = ["down (_dot)", "_norm", "down (_dot)"]
    rows = kernel_rows(names, timeline, {"down": KernelWork(871e6, 0.0, None)}, steps=2)
    gaps = idle_gaps(names, timeline, steps=2)
    assert [(row.name, row.calls, row.us) for row in rows] == [
        ("down (_dot)", 1.0, 45.0),
        ("_norm", 0.5, 2.5),
    ]
    assert [(gap.after, gap.before, gap.us) for gap in gaps] == [("down (_dot)", "_norm", 2.5)]
    assert sum(row.share for row in rows) + 5 / timeline.us == pytest.approx(1.0)
    text = "\n".join(lines(rows, gaps, timeline, 2, H200))
    assert "mean step of 2: 50.0 µs" in text
    # Reading 435.5 MB takes at least 100 µs, so a profile that reports a shorter time must be wrong.
    assert text.splitlines()[2].split()[-4:] == ["435.5", "9,678", "0.0", "222%"]
    assert "gaps: 2.5 µs, 5.0%" in text


def test_a_profile_of_a_small_model_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SHAPES["llama-3.2-1b"] | {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 256}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(small | {"bos_token_id": 1, "eos_token_id": 2}))
    trace = tmp_path / "out" / "trace.json"
    options = ["--model", str(tmp_path), "--load-format", "dummy", "--device", "cpu"]
    sizes = ["--max-num-seqs", "8", "--max-num-batched-tokens", "1024", "--kv-blocks", "128"]
    command = ["engine.profile", *options, *sizes, "--workload", "b8_decode"]

    def profile(*wanted: str) -> str:
        monkeypatch.setattr(sys, "argv", [*command, *wanted])
        assert main() == 0
        return capsys.readouterr().out

    printed = profile("--steps", "3", "--trace", str(trace))
    assert "decode steps; weights float32, KV float32 on cpu" in printed
    assert "8 tokens per step, 8 of them decodes" in printed
    assert "recorded" not in printed
    linear = next(line.split() for line in printed.splitlines() if "linear" in line)
    # Each step has five GEMMs: four in the only layer, and the GEMM with the output matrix.
    assert float(linear[1]) == 5.0
    assert json.loads(trace.read_text())["traceEvents"]
    printed = profile("--kind", "mixed", "--steps", "20")
    assert (
        "recorded 8 steps instead of 20: the workload has no more consecutive steps of this kind" in printed
    )
    assert "mean step of 8:" in printed
    monkeypatch.setattr(sys, "argv", [*command, "--skip", "300"])
    assert main() == 1
    assert "--skip is 300, but the workload has at most 255 consecutive" in capsys.readouterr().err
