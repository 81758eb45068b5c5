"""Typed access to the fields of a checkpoint's `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config import CheckpointError, unreadable


class Fields:
    """A JSON object from a checkpoint. Its getters raise a CheckpointError that names the file, the field,
    its value and the remedy.

    As in transformers, a null field counts as absent.
    """

    def __init__(self, file: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.file = file
        self.values = values
        self.prefix = prefix

    @classmethod
    def read(cls, file: Path) -> Fields:
        try:
            values = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(
                f"{file}: no such file",
                "specify a Hugging Face checkpoint folder that contains this file",
            ) from None
        except OSError as error:
            raise unreadable(file, error) from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is not valid JSON: {error}", "copy the file again") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{file} is not a JSON object", "copy the file again")
        return cls(file, values)

    def error(self, name: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self.prefix}{name} is {self.values.get(name)!r}", remedy)

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"it must be an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None, above: float = 0.0) -> float:
        value = self._value(name, default)
        # The upper bound rejects NaN and infinity, which Python's JSON parser accepts.
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < 1e30:
            raise self.error(name, f"it must be a number above {above:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "it must be true or false")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            if default is None:
                raise CheckpointError(
                    f"{self.file}: {self.prefix}{name} is missing, but this model requires it",
                    "copy the file from the original model",
                )
            return default
        return value
