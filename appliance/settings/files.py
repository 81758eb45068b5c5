"""Reads the main settings file and the files in the `conf.d` directory next to it. Files in `conf.d` override
the main file, and later ones (in alphabetical order) override earlier ones."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from appliance.settings import faults
from appliance.settings.faults import Fault, Place, SettingsError

SYSTEM_CONFIG = Path("/etc/appliance/appliance.toml")
DROP_INS = "conf.d"

_SYNTAX_LINE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


class Tables(NamedTuple):
    """The merged contents of the settings files."""

    values: dict[str, Any]
    places: dict[faults.Path, Place]
    """The file and line that last set each setting and table."""
    files: list[Path]


def find_config(flag: str | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the main settings file, or None if there is none. The file need not exist if its
    `conf.d` directory does. Raises SettingsError if an explicitly named file does not exist or cannot be
    accessed by this user."""
    for named, by in ((flag, "--config"), (environ.get("APPLIANCE_CONFIG"), "$APPLIANCE_CONFIG")):
        if named:
            path = Path(named).absolute()
            if not _is_file(path):
                raise SettingsError(
                    Fault(
                        place=Place(by),
                        description=f"{path} is not a file",
                        remedy="create the file, or set another path",
                    )
                )
            return path
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(
        environ.get("HOME") or os.path.expanduser("~"), ".config"
    )
    for path in (SYSTEM_CONFIG, Path(home) / "appliance" / "appliance.toml"):
        if _is_file(path) or drop_ins(path):
            return path
    return None


def drop_ins(path: Path) -> list[Path]:
    """Return the files that override the main file at `path`, in alphabetical order."""
    return sorted(found for found in (path.parent / DROP_INS).glob("*.toml") if _is_file(found))


def read_tables(path: Path | None) -> Tables:
    """Read the main file, if it exists, and the files that override it. Raises SettingsError listing all
    syntax errors."""
    tables = Tables({}, {}, [])
    if path is None:
        return tables
    found: list[Fault] = []
    for file in [*([path] if _is_file(path) else []), *drop_ins(path)]:
        try:
            values, lines = read_file(file)
        except SettingsError as error:
            found += error.faults
            continue
        _anchor_folders(values, file)
        _merge(tables.values, values)
        tables.places.update({field: Place(str(file), line) for field, line in lines.items()})
        tables.files.append(file)
    if found:
        raise SettingsError(*found)
    return tables


def field_lines(text: str) -> dict[faults.Path, int]:
    """Return the line on which each setting and table in a TOML text begins. The TOML parser does not record
    line numbers, so the text is split into statements. A statement ends at the first line that makes it valid
    TOML."""
    import tomllib

    lines = text.split("\n")
    found: dict[faults.Path, int] = {}
    header: faults.Path = ()
    arrays: Counter[faults.Path] = Counter()
    begin = 0
    for end in range(1, len(lines) + 1):
        statement = "\n".join(lines[begin:end])
        try:
            table = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # the value continues on the next line
        if statement.lstrip().startswith("["):
            header = max(_paths(table), key=len)
            found.setdefault(header, begin + 1)
            if statement.lstrip().startswith("[["):
                # Tables in an array are numbered from 1.
                arrays[header] += 1
                header = (*header, str(arrays[header]))
                found[header] = begin + 1
        else:
            for path in _paths(table):
                found.setdefault(header + path, begin + 1)
        begin = end
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError as error:
        fault = Fault(
            place=Place(str(path)),
            description=f"the file cannot be accessed ({error.strerror})",
            remedy="give this user access to its folder, or set another file with --config",
        )
        raise SettingsError(fault) from error


def read_file(path: Path) -> tuple[dict[str, Any], dict[faults.Path, int]]:
    """Return the tables in a TOML file and the line of each setting. Raises SettingsError if the file cannot
    be read."""
    import tomllib

    def fault(description: str, remedy: str, line: int | None = None) -> SettingsError:
        return SettingsError(Fault(place=Place(str(path), line), description=description, remedy=remedy))

    try:
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        return tomllib.loads(text), field_lines(text)
    except tomllib.TOMLDecodeError as error:
        said = _SYNTAX_LINE.search(str(error))
        line = int(said[1]) if said and said[1] else text.count("\n") + 1
        description = _SYNTAX_LINE.sub("", str(error))
        raise fault(
            "the file is not valid TOML", f"{description[:1].lower()}{description[1:]}", line
        ) from error
    except UnicodeDecodeError as error:
        raise fault(f"the file is not UTF-8 text ({error})", "save the file as UTF-8") from error
    except ValueError as error:
        raise fault(f"a number in the file has too many digits ({error})", "use a smaller number") from error
    except RecursionError as error:
        raise fault("arrays or tables in the file are nested too deeply", "nest fewer") from error
    except OSError as error:
        raise fault(
            f"the file cannot be read ({error.strerror})", "give the service's user read access"
        ) from error


def _paths(table: Mapping[str, Any]) -> Iterator[faults.Path]:
    for name, value in table.items():
        yield (name,)
        if isinstance(value, dict):
            for path in _paths(value):
                yield (name, *path)


def _anchor_folders(table: dict[str, Any], path: Path) -> None:
    """Make the paths in model settings absolute, resolving them against the folder of the file that contains
    them."""
    models = table.get("models")
    if isinstance(models, dict):
        for model in models.values():
            for name in ("folder", "chat_template"):
                if isinstance(model, dict) and isinstance(model.get(name), str):
                    model[name] = str(path.parent / os.path.expanduser(model[name]))


def _merge(into: dict[str, Any], table: Mapping[str, Any]) -> None:
    for name, value in table.items():
        known = into.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            _merge(known, value)
        else:
            into[name] = value
