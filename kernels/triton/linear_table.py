"""Reads and writes tables of GEMM measurements. For each shape and row count, a table contains the fastest
plan, or records that the library (cuBLAS) is faster than every plan. For MoE layers, it contains the plans
for the experts' two GEMMs. Each table is for one GPU model. `python -m engine.tune` writes it to
`kernels/tuned/<gpu>.json`. The backend loads it once and passes it to every GEMM. For shapes and row counts
without an entry, the rules in `linear_plans` choose the plan. This module needs neither Triton nor a GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from kernels.triton import experts_plans, linear_plans
from kernels.triton.experts_plans import ExpertsPlan, ExpertsShape, LayerPlans
from kernels.triton.linear_plans import GemmPlan

FOLDER = Path(__file__).resolve().parents[1] / "tuned"
"""Folder with the shipped tables of GEMM measurements."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
"""Supported weight dtypes, keyed by their names in tuned tables."""

_LIBRARY = "library"
_FORMS = ("gemv", "stream", "dot", "tiles")
_NUMBERS = ("rows", "block_n", "block_k", "warps", "stages", "split")
_EXPERTS_FIELDS = tuple(one.name for one in fields(ExpertsPlan))
_REMEDY = "recreate the table with python -m engine.tune"


class TableError(ValueError):
    """Raised if a table cannot be used. The message contains the file, GEMM, row count, field and value."""


@dataclass(frozen=True, slots=True)
class Product:
    """The GEMM `[rows, k] × [n, k]ᵀ` with weights of `dtype`, for any number of rows."""

    dtype: torch.dtype
    n: int
    k: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.n}x{self.k}"


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """The fastest kernel for a GEMM with up to a given number of rows."""

    plan: GemmPlan | None
    """The plan, or None if the library (cuBLAS) is faster."""
    us: float
    """Time, in microseconds, that the GEMM adds to a decoder layer, including any separate launches it
    needs."""
    library_us: float
    """Time, in microseconds, that the library's GEMM adds to a decoder layer."""
    layer_us: float | None = None
    """The whole decoder layer's time in microseconds, including attention, if the layer's plans were chosen
    together to minimise this time. None if this plan was chosen to minimise `us`."""


@dataclass(frozen=True, slots=True)
class ExpertsEntry:
    """The fastest kernels for an MoE layer with up to a given number of tokens."""

    plans: LayerPlans
    us: float
    """The layer's time (norm, router and experts), in microseconds."""
    rules_us: float
    """The layer's time with the rule-based plans, in microseconds."""


@dataclass(frozen=True, slots=True)
class Table:
    """One GPU model's GEMM measurements. With an empty table, `Table()`, the rules choose every plan."""

    gpu: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    """Date and software versions of the measurement."""
    products: Mapping[Product, Mapping[int, PlanEntry]] = field(default_factory=dict)
    """Each GEMM's entries, keyed by maximum row count, in ascending order."""
    shared_bytes: int = linear_plans.HOPPER_SHARED
    """Shared memory, in bytes, available to a program on the GPU. The rules respect this limit."""
    hopper: bool = False
    """Whether the rules may choose plans that need a Hopper GPU."""
    experts: Mapping[ExpertsShape, Mapping[int, ExpertsEntry]] = field(default_factory=dict)
    """Each MoE layer's entries, keyed by maximum token count, in ascending order."""

    def choose_experts(self, tokens: int, shape: ExpertsShape) -> LayerPlans:
        """Return an MoE layer's plans from the entry with the smallest token count that is large enough, or
        from the rules if there is no such entry."""
        for most, entry in self.experts.get(shape, {}).items():
            if tokens <= most:
                return entry.plans
        sizes = (shape.top_k, shape.experts, shape.hidden, shape.intermediate)
        return experts_plans.choose(tokens, *sizes, shape.dtype, self.shared_bytes, shape.group)

    def with_experts(self, shape: ExpertsShape, tokens: int, entry: ExpertsEntry) -> Table:
        """Return a copy of this table with an MoE layer's entry added or replaced."""
        entries = {**self.experts.get(shape, {}), tokens: entry}
        return replace(self, experts={**self.experts, shape: dict(sorted(entries.items()))})

    def choose(
        self, rows: int, n: int, k: int, dtype: torch.dtype, block: tuple[int, int] | None = None
    ) -> GemmPlan | None:
        """Return a GEMM's plan from the entry with the smallest row count that is large enough, or from the
        rules if there is no such entry. Returns None if the library computes the GEMM. Tables have no entries
        for weights with one scale per `block` (rows and columns)."""
        for most, entry in self.products.get(Product(dtype, n, k), {}).items() if block is None else ():
            if rows <= most:
                return entry.plan
        return linear_plans.choose(rows, n, k, dtype, self.shared_bytes, block, self.hopper)

    def with_entry(self, product: Product, max_num_seqs: int, entry: PlanEntry) -> Table:
        """Return a copy of this table with one entry added or replaced."""
        entries = {**self.products.get(product, {}), max_num_seqs: entry}
        return replace(self, products={**self.products, product: dict(sorted(entries.items()))})

    def to_json(self) -> str:
        """Return the table as sorted JSON with one line per entry, so that tables can be compared line by
        line."""
        lines = ["{", f' "gpu": {json.dumps(self.gpu)},']
        lines += [f' "{name}": {json.dumps(value)},' for name, value in self.about.items()]
        lines.append(' "products": {')
        blocks = []
        for product in sorted(self.products, key=lambda one: (str(one.dtype), one.k, one.n)):
            rows = [
                f'   "{most}": {json.dumps(_entry_fields(entry))}'
                for most, entry in self.products[product].items()
            ]
            blocks.append(f'  "{product}": {{\n' + ",\n".join(rows) + "\n  }")
        lines.append(",\n".join(blocks))
        lines.append(" }")
        if self.experts:
            lines[-1] += ","
            lines.append(' "experts": {')
            blocks = []
            for shape in sorted(self.experts, key=str):
                rows = [
                    f'   "{most}": {json.dumps(_experts_fields(entry))}'
                    for most, entry in self.experts[shape].items()
                ]
                blocks.append(f'  "{shape}": {{\n' + ",\n".join(rows) + "\n  }")
            lines += [",\n".join(blocks), " }"]
        return "\n".join([*lines, "}"]) + "\n"


def table_path(gpu: str) -> Path:
    """Return the path of a GPU's table of GEMM measurements. The file name is derived from the GPU name
    reported by the driver: "NVIDIA H200" becomes `nvidia-h200.json`."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def load_table(gpu: str, shared_bytes: int = linear_plans.HOPPER_SHARED) -> Table:
    """Load the GEMM measurements shipped for a GPU. If none are shipped, return an empty table.
    `shared_bytes` is the GPU's shared memory per program. Raises TableError if the table is invalid."""
    path = table_path(gpu)
    table = read_table(path) if path.exists() else Table(gpu)
    return replace(table, shared_bytes=shared_bytes)


def read_table(path: Path) -> Table:
    """Read a table of GEMM measurements from a file. Raises TableError if the file is not a table or contains
    a plan that no kernel supports."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: cannot be read: {error}; {_REMEDY}") from None
    if not isinstance(values, dict) or not isinstance(values.get("products"), dict):
        raise TableError(f"{path}: has no `products` object; {_REMEDY}")
    products = {}
    for name, rows in values["products"].items():
        product = _product(path, name)
        if not isinstance(rows, dict) or not all(most.isdecimal() and int(most) > 0 for most in rows):
            raise TableError(f"{path}: {name}: expected an object whose keys are row counts; {_REMEDY}")
        entries = {
            int(most): _entry(f"{path}: {name}: {most}", product, int(most), rows[most]) for most in rows
        }
        products[product] = dict(sorted(entries.items()))
    about = {name: str(value) for name, value in values.items() if name not in ("gpu", "products", "experts")}
    return Table(
        str(values.get("gpu", "")), about, products, experts=_read_experts(path, values.get("experts", {}))
    )


def _read_experts(path: Path, values: Any) -> dict[ExpertsShape, dict[int, ExpertsEntry]]:
    found: dict[ExpertsShape, dict[int, ExpertsEntry]] = {}
    if not isinstance(values, dict):
        raise TableError(f"{path}: `experts` is not an object; {_REMEDY}")
    for name, rows in values.items():
        shape = _experts_shape(path, name)
        if not isinstance(rows, dict) or not all(most.isdecimal() and int(most) > 0 for most in rows):
            raise TableError(f"{path}: {name}: expected an object whose keys are token counts; {_REMEDY}")
        entries = {
            int(most): _experts_entry(f"{path}: {name}: {most}", shape, int(most), rows[most])
            for most in rows
        }
        found[shape] = dict(sorted(entries.items()))
    return found


def _experts_shape(path: Path, name: str) -> ExpertsShape:
    match = re.fullmatch(r"(\w+) (\d+)x(\d+)(?:/(\d+))? (\d+)x(\d+)", name)
    if match is None or match[1] not in DTYPES:
        raise TableError(
            f"{path}: {name!r} is not an MoE layer; expected DTYPE EXPERTSxTOP_K HIDDENxWIDTH "
            f"with DTYPE one of {', '.join(DTYPES)}; {_REMEDY}"
        )
    experts, top_k, held, hidden, width = (int(number or match[2]) for number in match.groups()[1:])
    return ExpertsShape(DTYPES[match[1]], experts, top_k, hidden, width, held)


def _experts_entry(where: str, shape: ExpertsShape, tokens: int, values: Any) -> ExpertsEntry:
    if not isinstance(values, dict) or set(values) != {"up", "down", "us", "rules_us"}:
        raise TableError(f"{where}: expected an object with up, down, us and rules_us; {_REMEDY}")
    plans = []
    for gemm, k in (("up", shape.hidden), ("down", shape.intermediate)):
        try:
            plan = ExpertsPlan(**values[gemm])
        except TypeError:
            raise TableError(
                f"{where}: {gemm}: expected the fields {', '.join(_EXPERTS_FIELDS)}; {_REMEDY}"
            ) from None
        wrong = experts_plans.problem(plan, tokens, shape, k, linear_plans.HOPPER_SHARED)
        if wrong is not None:
            raise TableError(f"{where}: {gemm}: {wrong}; {_REMEDY}")
        plans.append(plan)
    if (plans[0].form == "grouped") != (plans[1].form == "grouped"):
        raise TableError(f"{where}: only one of up and down is grouped; {_REMEDY}")
    for name in ("us", "rules_us"):
        if isinstance(values[name], bool) or not isinstance(values[name], int | float):
            raise TableError(f"{where}: {name} is {values[name]!r}, not a number; {_REMEDY}")
    return ExpertsEntry(LayerPlans(*plans), float(values["us"]), float(values["rules_us"]))


def _experts_fields(entry: ExpertsEntry) -> dict[str, Any]:
    plans = {"up": entry.plans.up, "down": entry.plans.down}
    numbers = {gemm: {name: getattr(plan, name) for name in _EXPERTS_FIELDS} for gemm, plan in plans.items()}
    return {**numbers, "us": round(entry.us, 1), "rules_us": round(entry.rules_us, 1)}


def problem(plan: GemmPlan, max_num_seqs: int, product: Product) -> str | None:
    """Return why a plan cannot compute a GEMM with up to `max_num_seqs` rows, or None if it can."""
    if plan.form not in _FORMS:
        return f"form is {plan.form!r}; expected one of {', '.join(_FORMS)}"
    for name in _NUMBERS:
        value = getattr(plan, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{name} is {value!r}, not a positive integer"
        if name != "stages" and value & (value - 1):
            return f"{name} is {value}, not a power of two"
    if plan.rows < max_num_seqs:
        return f"rows is {plan.rows}; the entry needs at least {max_num_seqs}"
    if plan.form in ("gemv", "stream"):
        if plan.rows != 1:
            return f"rows is {plan.rows}; {plan.form} requires 1"
        if plan.split != 1:
            return f"split is {plan.split}; {plan.form} requires 1"
    if plan.form == "stream" and product.dtype != torch.float8_e4m3fn:
        return f"form is 'stream', which needs float8_e4m3fn weights, not {product.dtype}"
    if plan.form == "tiles":
        if plan.rows < 8:
            return f"rows is {plan.rows}; the tensor cores need at least 8"
        if plan.warps % 4 or plan.block_n < 16 * plan.warps:
            return f"warps is {plan.warps}; it must be a multiple of 4, and at most block_n / 16"
        if plan.block_k * product.dtype.itemsize < 128:
            return f"block_k is {plan.block_k}; a tile row must have at least 128 bytes"
    if product.k % plan.k_divisor:
        return f"block_k is {plan.block_k}; k = {product.k} is not a multiple of {plan.k_divisor}"
    if plan.split > 1 and not linear_plans.fits_workspace(plan, product.n):
        return f"split is {plan.split}; its partial sums do not fit into the workspace"
    return None


def _entry_fields(entry: PlanEntry) -> dict[str, Any]:
    plan: dict[str, Any] = {"form": _LIBRARY}
    if entry.plan is not None:
        plan = {one.name: getattr(entry.plan, one.name) for one in fields(entry.plan)}
    times = {"us": entry.us, "library_us": entry.library_us, "layer_us": entry.layer_us}
    return plan | {name: round(value, 1) for name, value in times.items() if value is not None}


def _product(path: Path, name: str) -> Product:
    match = re.fullmatch(r"(\w+) ([1-9]\d*)x([1-9]\d*)", name)
    if match is None or match[1] not in DTYPES:
        raise TableError(
            f"{path}: {name!r} is not a GEMM; expected DTYPE NxK "
            f"with DTYPE one of {', '.join(DTYPES)}; {_REMEDY}"
        )
    return Product(DTYPES[match[1]], int(match[2]), int(match[3]))


def _entry(where: str, product: Product, max_num_seqs: int, values: Any) -> PlanEntry:
    if not isinstance(values, dict):
        raise TableError(f"{where}: expected an object, not {values!r}; {_REMEDY}")
    known = {"form", *_NUMBERS, "us", "library_us", "layer_us"}
    if unknown := sorted(set(values) - known):
        raise TableError(
            f"{where}: unknown field {unknown[0]}; known fields: {', '.join(sorted(known))}; {_REMEDY}"
        )
    for name in ("us", "library_us", *({"layer_us"} & set(values))):
        if isinstance(values.get(name), bool) or not isinstance(values.get(name), int | float):
            raise TableError(f"{where}: {name} is {values.get(name)!r}, not a number; {_REMEDY}")
    plan = None
    if values.get("form") != _LIBRARY:
        # A missing number has the value None, which `problem` reports as not being a positive integer.
        numbers = {name: values.get(name) for name in _NUMBERS}
        plan = GemmPlan(form=values.get("form"), **numbers)  # type: ignore[arg-type]
        if (wrong := problem(plan, max_num_seqs, product)) is not None:
            raise TableError(f"{where}: {wrong}; {_REMEDY}")
    layer_us = float(values["layer_us"]) if "layer_us" in values else None
    return PlanEntry(plan, float(values["us"]), float(values["library_us"]), layer_us)
