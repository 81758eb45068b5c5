"""The products that were measured: for each shape and number of rows the plan that won, or the library.

A table belongs to one GPU. `python -m engine.tune` writes it, to `kernels/tuned/<gpu>.json`; whoever owns
the kernels of a device loads it once and hands it to every product. Shapes and rows that it lacks follow the
rules of `linear_plans`. No Triton here, and no device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from kernels.triton import linear_plans
from kernels.triton.linear_plans import Plan

FOLDER = Path(__file__).resolve().parents[1] / "tuned"
"""Where the tables are that ship."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
"""Of weights, by their names in a table."""

_LIBRARY = "library"
_FORMS = ("gemv", "stream", "dot", "tiles")
_NUMBERS = ("rows", "block_n", "block_k", "warps", "stages", "split")
_REMEDY = "make the table again with python -m engine.tune"


class TableError(ValueError):
    """A table cannot be used: the message names file, product, rows, field and value."""


@dataclass(frozen=True, slots=True)
class Product:
    """`[rows, k] × [n, k]ᵀ`, with weights of `dtype`."""

    dtype: torch.dtype
    n: int
    k: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.n}x{self.k}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What won, for up to so many rows."""

    plan: Plan | None
    """None: the library's product."""
    us: float
    """Microseconds that it adds to a decoder's layer, with what must run beside it."""
    library_us: float
    """The library's."""
    layer_us: float | None = None
    """Microseconds of a decoder's layer, attention included, by which the plan was chosen together with those
    of the layer's other products; None: it was chosen by `us`."""


@dataclass(frozen=True, slots=True)
class Table:
    """The measured products of one GPU. `Table()` has none, and leaves all to the rules."""

    gpu: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    """Date and versions of the measurement."""
    products: Mapping[Product, Mapping[int, Entry]] = field(default_factory=dict)
    """By the most rows that an entry is for, rising."""
    shared_bytes: int = linear_plans.HOPPER_SHARED
    """Of shared memory, that a program of the GPU can have: the rules keep to it."""

    def choose(self, rows: int, n: int, k: int, dtype: torch.dtype) -> Plan | None:
        """As `linear_plans.choose`: the plan, or None for the library. The entry of the fewest rows that
        suffice counts; where there is none, the rules."""
        for most, entry in self.products.get(Product(dtype, n, k), {}).items():
            if rows <= most:
                return entry.plan
        return linear_plans.choose(rows, n, k, dtype, self.shared_bytes)

    def with_entry(self, product: Product, most_rows: int, entry: Entry) -> Table:
        """This table and one entry more, in place of what was there."""
        entries = {**self.products.get(product, {}), most_rows: entry}
        return replace(self, products={**self.products, product: dict(sorted(entries.items()))})

    def to_json(self) -> str:
        """One line an entry, sorted, so that two tables can be compared line by line."""
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
        return "\n".join([*lines, " }", "}"]) + "\n"


def table_path(gpu: str) -> Path:
    """The file of a GPU's table, as the driver names the GPU: "NVIDIA H200" → `nvidia-h200.json`."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def load_table(gpu: str, shared_bytes: int = linear_plans.HOPPER_SHARED) -> Table:
    """The table that ships for a GPU whose programs can have so many bytes of shared memory; an empty one
    where there is none. Raises TableError."""
    path = table_path(gpu)
    table = read_table(path) if path.exists() else Table(gpu)
    return replace(table, shared_bytes=shared_bytes)


def read_table(path: Path) -> Table:
    """Raises TableError for a file that is no table, and for plans that no kernel can run."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: cannot be read: {error}; {_REMEDY}") from None
    if not isinstance(values, dict) or not isinstance(values.get("products"), dict):
        raise TableError(f"{path}: has no object `products`; {_REMEDY}")
    products = {}
    for name, rows in values["products"].items():
        product = _product(path, name)
        if not isinstance(rows, dict) or not all(most.isdecimal() and int(most) > 0 for most in rows):
            raise TableError(
                f"{path}: {name}: is not an object with a key for each number of rows; {_REMEDY}"
            )
        entries = {
            int(most): _entry(f"{path}: {name}: {most}", product, int(most), rows[most]) for most in rows
        }
        products[product] = dict(sorted(entries.items()))
    about = {name: str(value) for name, value in values.items() if name not in ("gpu", "products")}
    return Table(str(values.get("gpu", "")), about, products)


def problem(plan: Plan, most_rows: int, product: Product) -> str | None:
    """Why a plan cannot serve a product of up to `most_rows` rows; None if it can."""
    if plan.form not in _FORMS:
        return f"form is {plan.form!r}, not one of {', '.join(_FORMS)}"
    for name in _NUMBERS:
        value = getattr(plan, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{name} is {value!r}, not a positive integer"
        if name != "stages" and value & (value - 1):
            return f"{name} is {value}, not a power of two"
    if plan.rows < most_rows:
        return f"rows is {plan.rows}, fewer than the {most_rows} that it is for"
    if plan.form in ("gemv", "stream"):
        if plan.rows != 1:
            return f"rows is {plan.rows}; {plan.form} has one"
        if plan.split != 1:
            return f"split is {plan.split}; {plan.form} has one"
    if plan.form == "stream" and product.dtype != torch.float8_e4m3fn:
        return f"form is 'stream', which is for float8_e4m3fn weights, not {product.dtype}"
    if plan.form == "tiles":
        if plan.rows < 8:
            return f"rows is {plan.rows}; the tensor cores have at least 8"
        if plan.warps % 4 or plan.block_n < 16 * plan.warps:
            return f"warps is {plan.warps}: of a tile of {plan.block_n}, 4 share 64 weight rows"
        if plan.block_k * product.dtype.itemsize < 128:
            return f"block_k is {plan.block_k}: a row of a tile is at least 128 bytes"
    step = {"gemv": 1, "stream": plan.warps * plan.block_k}.get(plan.form, plan.split * plan.block_k)
    if product.k % step:
        return f"block_k is {plan.block_k}: steps of {step} do not divide k = {product.k}"
    if plan.split > 1 and not linear_plans.fits_workspace(plan, product.n):
        return f"split is {plan.split}: its sums do not fit the workspace"
    return None


def _entry_fields(entry: Entry) -> dict[str, Any]:
    plan: dict[str, Any] = {"form": _LIBRARY}
    if entry.plan is not None:
        plan = {one.name: getattr(entry.plan, one.name) for one in fields(entry.plan)}
    figures = {"us": entry.us, "library_us": entry.library_us, "layer_us": entry.layer_us}
    return plan | {name: round(value, 1) for name, value in figures.items() if value is not None}


def _product(path: Path, name: str) -> Product:
    match = re.fullmatch(r"(\w+) ([1-9]\d*)x([1-9]\d*)", name)
    if match is None or match[1] not in DTYPES:
        raise TableError(
            f"{path}: {name!r} is no product; needed is DTYPE NxK, DTYPE of {', '.join(DTYPES)}; {_REMEDY}"
        )
    return Product(DTYPES[match[1]], int(match[2]), int(match[3]))


def _entry(where: str, product: Product, most_rows: int, values: Any) -> Entry:
    if not isinstance(values, dict):
        raise TableError(f"{where}: is {values!r}, not an object; {_REMEDY}")
    known = {"form", *_NUMBERS, "us", "library_us", "layer_us"}
    if unknown := sorted(set(values) - known):
        raise TableError(
            f"{where}: {unknown[0]} is no field; there are {', '.join(sorted(known))}; {_REMEDY}"
        )
    for name in ("us", "library_us", *({"layer_us"} & set(values))):
        if isinstance(values.get(name), bool) or not isinstance(values.get(name), int | float):
            raise TableError(f"{where}: {name} is {values.get(name)!r}, not a number; {_REMEDY}")
    plan = None
    if values.get("form") != _LIBRARY:
        # A number that is missing is caught as None is no number.
        numbers = {name: values.get(name) for name in _NUMBERS}
        plan = Plan(form=values.get("form"), **numbers)  # type: ignore[arg-type]
        if (wrong := problem(plan, most_rows, product)) is not None:
            raise TableError(f"{where}: {wrong}; {_REMEDY}")
    layer_us = float(values["layer_us"]) if "layer_us" in values else None
    return Entry(plan, float(values["us"]), float(values["library_us"]), layer_us)
