"""Tests of settings: their sources, and errors that name the field, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.alert_rules import AlertRule, AlertSink
from appliance.settings import (
    Flags,
    Settings,
    SettingsError,
    demo_model_folder,
    find_config,
    load_settings,
    read_settings,
)
from appliance.settings.files import field_lines


def load(folder: Path, text: str, environ: dict[str, str] | None = None, **flags: object) -> Settings:
    path = folder / "appliance.toml"
    path.write_text(text)
    return load_settings(Flags(config=str(path), **flags), environ or {"HOME": str(folder)})  # type: ignore[arg-type]


def test_without_settings_the_shipped_model_is_served_on_a_private_socket(tmp_path: Path) -> None:
    settings = load_settings(Flags(), {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/run/user/7"})
    assert {name: model.folder for name, model in settings.models.items()} == {
        "demo": str(demo_model_folder())
    }
    assert (settings.run_dir, settings.listen) == ("/run/user/7/appliance", None)
    assert settings.state_dir == f"{tmp_path}/.local/state/appliance"
    assert (settings.unix.uids, settings.unix.api_mode) == ("owner", "0660")


@pytest.mark.parametrize("named", [True, False])
def test_a_file_in_an_inaccessible_folder_is_named(
    tmp_path: Path, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".config" / "appliance" / "appliance.toml"

    def is_file(self: Path) -> bool:  # simulated, because the test may run as root, which can read everything
        if self == path:
            raise PermissionError(13, "Permission denied", str(path))
        return False

    monkeypatch.setattr(Path, "is_file", is_file)
    with pytest.raises(SettingsError) as caught:
        find_config(str(path) if named else None, {"HOME": str(tmp_path)})
    assert str(caught.value) == (
        f"{path}: the file cannot be accessed (Permission denied): give this user access to its folder, or "
        "set another file with --config"
    )


def test_the_directories_set_by_systemd_are_used(tmp_path: Path) -> None:
    environ = {
        "HOME": str(tmp_path),
        "RUNTIME_DIRECTORY": "/run/appliance",
        "STATE_DIRECTORY": "/var/lib/appliance",
    }
    settings = load_settings(Flags(), environ)
    assert (settings.run_dir, settings.state_dir) == ("/run/appliance", "/var/lib/appliance")


def test_flags_override_the_file_and_a_flagged_model_replaces_its_models(tmp_path: Path) -> None:
    text = 'fronts = 2\nlisten = "127.0.0.1:1"\n[models.a]\nfolder = "."\nmax_num_seqs = 8\n'
    assert load(tmp_path, text).models["a"].folder == str(tmp_path)
    settings = load(tmp_path, text, fronts=3, dtype="float16", tensor_parallel_size=2)
    assert (settings.fronts, settings.address()) == (3, ("127.0.0.1", 1))
    model = settings.models["a"]
    assert (model.max_num_seqs, model.dtype, model.tensor_parallel_size) == (8, "float16", 2)
    assert model.spec("a-0").model_path == str(tmp_path)
    flagged = load(tmp_path, text, models=[f"b={tmp_path}"], dtype="float16").models
    assert {name: model.dtype for name, model in flagged.items()} == {"b": "float16"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fronts = 'x'", "fronts = 'x' is not valid: write a whole number"),
        ("fronts = 0", "fronts = 0 is not valid: write a whole number ≥ 1"),
        ("[queue]\noutput_weight = inf", "output_weight = inf is not valid: write a number > 0 and ≤ 1000"),
        ("frnts = 2", "frnts is not a setting: did you mean 'fronts'?"),
        ("[unix]\nuid = 1", "unix.uid is not a setting: did you mean 'uids'?"),
        ("[unix]\nuids = 'all'", "unix.uids = 'all' is not valid: write 'any' or 'owner', or a list"),
        ("[unix]\nuids = [1, 'x']", "unix.uids[1] = 'x' is not valid"),
        ("[limits]\nmax_body_byte = 3", "max_body_byte is not a setting: did you mean 'max_body_bytes'?"),
        ("[models.a]\nfolder = '.'\nmax_num_seqs = 0", "models.a.max_num_seqs = 0 is not valid"),
        ("[models.a]\nfolder = '.'\nmax_num_seq = 3", "models.a.max_num_seq is not a setting: did you mean"),
        ("[models.a]\nfolder = '.'\ndtype = 'int3'", "a.dtype = 'int3' is not valid: write 'auto', "),
        ("[models.a]\nfolder = '.'\nquantization = 'int8'", "quantization = 'int8' is not valid: write "),
        ("[models.a]\nfolder = '.'\nkv_cache_dtype = 'e5m2'", "kv_cache_dtype = 'e5m2' is not valid: "),
        ("[models.a]\nmax_num_seqs = 3", "'folder' is missing from models.a: add folder"),
        ("[models.'a b']\nfolder = '.'", "and begin with a letter or digit"),
        ("models = 3", "models = 3 is not valid: write [models.NAME]"),
        ("[unix]\napi_mode = 'rw'", "unix.api_mode = 'rw' is not valid: write an octal file mode"),
        ("[unix]\nadmin_mode = 384", "unix.admin_mode = 384 is not valid: write an octal file mode"),
        ("listen = 'here'", "listen = 'here' is not HOST:PORT"),
        ("listen = 'gpu.lan:80'", "listen = 'gpu.lan:80' is not HOST:PORT with an IP address or localhost"),
        ("config_file = 'x'", "config_file is not a setting"),
        ("a = = 1", "is not valid TOML"),
        ('[models.a]\nfolder = "/a\\u0000b"', "models.a.folder = '/a\\x00b' is not valid: remove the null"),
        ('[admin]\ngroups = ["a\\u0000"]', "admin.groups = ['a\\x00'] is not valid: remove the null"),
        (f"a = {'[' * 3000}", "arrays or tables in the file are nested too deeply: nest fewer"),
    ],
)  # fmt: skip
def test_an_invalid_setting_is_named_with_its_place_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(tmp_path, text)
    assert said in str(error.value)


def test_invalid_flags_are_named_too(tmp_path: Path) -> None:
    for flags, said in (
        ({"dtype": "int3"}, "dtype = 'int3' is not valid"),
        ({"models": ["=x"]}, "--model: '=x' is not FOLDER or NAME=FOLDER"),
        ({"models": [f"x={tmp_path}", f"x={tmp_path}"]}, "--model: the model name 'x' is given twice"),
        ({"listen": "here"}, "--listen: listen = 'here' is not HOST:PORT"),
        ({"config": "/nope.toml"}, "--config: /nope.toml is not a file"),
    ):
        with pytest.raises(SettingsError, match=said):
            load_settings(Flags(**flags), {"HOME": str(tmp_path)})


def test_the_settings_file_comes_from_the_flag_or_the_environment_or_the_home_directory(
    tmp_path: Path,
) -> None:
    home = tmp_path / "appliance" / "appliance.toml"
    home.parent.mkdir()
    home.touch()
    other = tmp_path / "other.toml"
    other.touch()
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/nonexistent"}
    assert find_config(None, environ) == home
    assert find_config(None, environ | {"APPLIANCE_CONFIG": str(other)}) == other
    assert find_config(str(home), environ | {"APPLIANCE_CONFIG": str(other)}) == home


def test_files_in_conf_d_override_the_main_file_in_the_order_of_their_names(tmp_path: Path) -> None:
    drop_ins = tmp_path / "conf.d"
    drop_ins.mkdir()
    (drop_ins / "20-more.toml").write_text("fronts = 3\n[models.a]\nmax_num_seqs = 16\n[unix]\nuids = [7]\n")
    (drop_ins / "10-first.toml").write_text('[models.b]\nfolder = "."\n[models.a]\nmax_num_seqs = 8\n')
    (drop_ins / "30-not.toml.off").write_text("fronts = 9")
    text = """
        fronts = 2
        [models.a]
        folder = "."
        dtype = "float16"
        [unix]
        uids = [1, 2]
        api_mode = "0666"
    """
    settings = load(tmp_path, text)
    a, b = settings.models["a"], settings.models["b"]
    assert (settings.fronts, a.max_num_seqs, a.dtype, a.folder) == (3, 16, "float16", str(tmp_path))
    assert b.folder == str(drop_ins)  # relative to the folder of the file that sets it
    assert (settings.unix.uids, settings.unix.api_mode) == ([7], "0666")


def test_conf_d_works_without_a_main_file(tmp_path: Path) -> None:
    drop_ins = tmp_path / "appliance" / "conf.d"
    drop_ins.mkdir(parents=True)
    (drop_ins / "a.toml").write_text("fronts = 4")
    settings = load_settings(Flags(), {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)})
    assert (settings.fronts, settings.config_file) == (4, str(drop_ins / "a.toml"))


def test_the_place_of_a_setting_is_the_file_and_line_or_flag_that_set_it_last(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "x.toml").write_text("\n[queue]\nlimit = 9\n")
    main = tmp_path / "appliance.toml"
    main.write_text('# two\nfronts = 2\n\n[queue]\ntimeout_s = 1\nlimit = 3\n[models.a]\nfolder = "."\n')
    places = read_settings(Flags(config=str(main), fronts=5, dtype="float16"), {"HOME": "/"}).places
    assert str(places[("fronts",)]) == "--fronts"
    assert str(places[("queue", "timeout_s")]) == f"{main}:5"
    assert str(places[("queue", "limit")]) == f"{tmp_path}/conf.d/x.toml:3"
    assert str(places[("models", "a", "folder")]) == f"{main}:8"
    assert str(places[("models", "a", "dtype")]) == "--dtype"
    assert ("listen",) not in places


def test_every_error_in_every_file_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    extra = tmp_path / "conf.d" / "x.toml"
    extra.write_text("[limits]\nmax_body_bytes = 'much'\nmax_conections = 3\n")
    main = tmp_path / "appliance.toml"
    text = "fronts = 0\nfrnts = 1\nlisten = 'x'\n[models.a]\nmax_num_seqs = 'x'\n"
    text += "[unix]\nuids = [\n 1,\n 'x',\n]\n"
    with pytest.raises(SettingsError) as error:
        load(tmp_path, text)
    assert sorted((str(fault.place), fault.field) for fault in error.value.faults) == sorted(
        [
            (f"{main}:1", "fronts"),
            (f"{main}:2", "frnts"),
            (f"{main}:7", "unix.uids"),
            (f"{extra}:2", "limits.max_body_bytes"),
            (f"{extra}:3", "limits.max_conections"),
            (f"{main}:5", "models.a.max_num_seqs"),
            (f"{main}:4", "models.a.folder"),
            (f"{main}:3", "listen"),
        ]
    )
    assert (
        f"{main}:1: fronts = 0 is not valid: write a whole number ≥ 1 and ≤ 1024"
        in str(error.value).splitlines()
    )


def numbers_of(kind: Any, path: str = "", around: str = "{}") -> Iterator[tuple[str, str, Any]]:
    """Yield every place in the struct `kind` where a number is expected: its path, a template for a file with
    that number, and its type."""
    match kind:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            yield path, around, kind
        case msgspec.inspect.StructType():
            for field in kind.fields:
                yield from numbers_of(field.type, f"{path}.{field.encode_name}".lstrip("."))
        case msgspec.inspect.DictType():
            yield from numbers_of(kind.value_type, f"{path}.m")
        case msgspec.inspect.UnionType():
            for each in kind.types:
                yield from numbers_of(each, path, around)
        case msgspec.inspect.ListType(item_type=msgspec.inspect.StructType()):
            return  # A later test covers arrays of tables.
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            yield from numbers_of(kind.item_type, path, around.format("[{}]"))
        case msgspec.inspect.TupleType():
            for number, each in enumerate(kind.item_types):
                items = ["1"] * len(kind.item_types)
                items[number] = "{}"
                yield from numbers_of(each, path, around.format(f"[{', '.join(items)}]"))


NUMBERS = list(numbers_of(msgspec.inspect.type_info(Settings)))


@pytest.mark.parametrize(
    ("path", "around", "kind"), NUMBERS, ids=[f"{path} = {around}" for path, around, _ in NUMBERS]
)
def test_every_number_has_an_upper_bound_that_its_error_names(
    tmp_path: Path, path: str, around: str, kind: Any
) -> None:
    table = f'models.m.folder = "{demo_model_folder()}"\nmodels.m.required = false\n'
    folder = table if path.startswith("models.m.") else ""
    assert kind.le is not None
    load(tmp_path, f"{folder}{path} = {around.format(int(kind.le))}\n" if kind.le >= 1 else folder)
    for number in (10**20, int(kind.le) + 1):
        with pytest.raises(SettingsError) as caught:
            load(tmp_path, f"{folder}{path} = {around.format(number)}\n")
        fault = caught.value.faults[0]
        assert fault.field == path and str(number) in fault.description
        assert f"≤ {kind.le:.15g}" in fault.remedy
    if isinstance(kind, msgspec.inspect.FloatType):
        for word in ("inf", "nan", "1" + "0" * 400):
            with pytest.raises(SettingsError, match=rf"{path}(\[\d\])? = "):
                load(tmp_path, f"{folder}{path} = {around.format(word)}\n")


@pytest.mark.parametrize(
    ("text", "field", "description"),
    [
        ("models.a.idle_unload_s = 60", "models.a.idle_unload_s", "contradicts required = true"),
        ('groups.g = {models = ["a"], load = "all"}', "groups.g.models", "is not valid"),
        ('groups.g = {models = ["b", "b"], load = "all"}', "groups.g.models", "is not valid"),
        ('groups.g = {models = ["a", "b"], load = "one"}', "groups.g.models", "'a' always stays loaded"),
        ('groups.g = {models = ["b", "c"], load = "some"}', "groups.g.load", "some"),
        (
            'groups.g = {models = ["b", "c"], load = "all"}\ngroups.h = {models = ["c", "d"], load = "all"}',
            "groups.h.models",
            "'c' is in two groups that load all their models together, 'g' and 'h'",
        ),
        (
            'groups.g = {models = ["b", "c"], load = "all"}\ngroups.h = {models = ["b", "c"], load = "one"}',
            "groups.h.models",
            "another group loads them together",
        ),
    ],
)
def test_contradictory_settings_about_loading_are_refused(
    tmp_path: Path, text: str, field: str, description: str
) -> None:
    models = "".join(f'models.{name}.folder = "{demo_model_folder()}"\n' for name in "ab")
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, f"{models}models.b.required = false\n{text}\n")
    [fault] = caught.value.faults
    assert fault.field == field and description in fault.description


def test_groups_name_models_of_the_settings_and_of_the_registry(tmp_path: Path) -> None:
    found = load(tmp_path, 'groups.g = {models = ["x", "y"], load = "all"}\non_demand.memory_gb = 0.5\n')
    assert found.groups["g"].models == ["x", "y"] and found.on_demand.memory_gb == 0.5


ARRAYS: dict[str, tuple[Any, str]] = {
    "alerts.rules": (AlertRule, 'name = "r"\nmetric = "queue.waiting"\n'),
    "alerts.sinks": (AlertSink, 'command = ["x"]\n'),
}
"""For each array of tables in the settings: the type of a table, and its required fields."""


@pytest.mark.parametrize("path", ARRAYS)
def test_every_number_in_an_array_of_tables_has_an_upper_bound(tmp_path: Path, path: str) -> None:
    table, required = ARRAYS[path]
    numbers = list(numbers_of(msgspec.inspect.type_info(table)))
    assert numbers
    for name, _, kind in numbers:
        with pytest.raises(SettingsError) as caught:
            load(tmp_path, f"[[{path}]]\n{required}{name} = {int(kind.le) + 10**20}\n")
        fault = caught.value.faults[0]
        assert fault.field == f"{path}.1.{name}" and f"≤ {kind.le:.15g}" in fault.remedy
        assert fault.place.line == 2 + required.count("\n")


def test_errors_in_an_array_of_tables_have_their_lines(tmp_path: Path) -> None:
    text = '[[alerts.rules]]\nname = "a"\nmetric = "queue.waiting"\nabove = 1\n\n'
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text + text.replace('"a"', '"b"').replace("above = 1", 'above = "x"'))
    fault = caught.value.faults[0]
    assert (fault.field, fault.place.line) == ("alerts.rules.2.above", 9)
    with pytest.raises(SettingsError, match="the rules a, b, a name each other as causes"):
        load(
            tmp_path,
            text.replace("\n\n", '\ndownstream_of = ["b"]\n\n')
            + text.replace('"a"', '"b"').replace("\n\n", '\ndownstream_of = ["a"]\n\n'),
        )
    with pytest.raises(SettingsError, match=r"'none' is not a rule"):
        load(tmp_path, '[alerts]\ndisabled = ["none"]\n')


def test_the_walk_finds_the_numbers_of_every_table() -> None:
    paths = {path for path, _, _ in NUMBERS}
    assert len(paths) >= 40
    assert paths >= {"fronts", "models.m.replicas", "queue.targets_ms", "limits.max_body_bytes", "unix.uids"}


def test_a_number_with_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="number in the file has too many digits"):
        load(tmp_path, "fronts = 1" + "0" * 5000)


def test_an_origin_is_written_without_a_path(tmp_path: Path) -> None:
    for origins in (["https://a.example", "http://localhost:3000"], ["*"], []):
        assert list(load(tmp_path, f"[limits]\ncors_origins = {origins}\n").limits.cors_origins) == origins
    for wrong in ("https://a.example/", "a.example", "https://", "https://a b", ""):
        with pytest.raises(SettingsError, match="write an origin without a path") as error:
            load(tmp_path, f'[limits]\ncors_origins = ["*", "{wrong}"]\n')
        assert error.value.faults[0].field == "limits.cors_origins"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = = 1", 1),
        ("a = 1\n\nb = [1,\n2", 4),
        ('a = 1\nb = "never closed\n', 2),
        ("a = 1\na = 2\n", 2),
        ("[x]\n[y]\n[x]\n", 3),
    ],
)
def test_invalid_toml_is_reported_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(SettingsError) as error:
        load(tmp_path, text)
    (fault,) = error.value.faults
    assert (fault.place.source, fault.place.line) == (str(tmp_path / "appliance.toml"), line)
    assert "the file is not valid TOML" in str(error.value)


def test_the_line_of_a_setting_is_found_whatever_its_value_looks_like() -> None:
    text = """\
# [not a table]
one = '''
[no.table]
two = 2'''
list = [ # a comment [
  [1, 2],
  'a = b',
]

  [ models . 'a.b' ] # here
folder.name = '''
'''
inline = { x = 1, "y z" = { w = 2 } }
[models.c]"""
    assert field_lines(text) == {
        ("one",): 2,
        ("list",): 5,
        ("models", "a.b"): 10,
        ("models", "a.b", "folder"): 11,
        ("models", "a.b", "folder", "name"): 11,
        ("models", "a.b", "inline"): 13,
        ("models", "a.b", "inline", "x"): 13,
        ("models", "a.b", "inline", "y z"): 13,
        ("models", "a.b", "inline", "y z", "w"): 13,
        ("models", "c"): 14,
    }


def test_a_model_without_a_name_has_the_name_of_its_folder(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Org--Qwen3-8B" / "snapshots" / "0123abcd"
    for folder, name in (
        (tmp_path / "chat", "chat"),
        (tmp_path / "my chat (new)", "my-chat-new-"),
        (tmp_path / ".hidden=1", "hidden-1"),
        (snapshot, "Qwen3-8B"),
    ):
        folder.mkdir(parents=True)
        (model,) = load_settings(Flags(models=[str(folder)]), {"HOME": str(tmp_path)}).models.items()
        assert (model[0], model[1].folder) == (name, str(folder))
    with pytest.raises(SettingsError, match="the model name 'chat' is given twice"):
        load_settings(Flags(models=[str(tmp_path / "chat")] * 2), {"HOME": str(tmp_path)})
