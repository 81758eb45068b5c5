"""Settings: what is meant is found, and what cannot be used is named with field, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.settings import Flags, Settings, SettingsError, demo_model_folder, find_config, load_settings


def load(folder: Path, text: str, environ: dict[str, str] | None = None, **flags: object) -> Settings:
    path = folder / "appliance.toml"
    path.write_text(text)
    return load_settings(Flags(config=str(path), **flags), environ or {"HOME": str(folder)})  # type: ignore[arg-type]


def test_without_anything_the_shipped_model_is_served_on_a_private_socket(tmp_path: Path) -> None:
    settings = load_settings(Flags(), {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/run/user/7"})
    assert {name: model.folder for name, model in settings.models.items()} == {
        "demo": str(demo_model_folder())
    }
    assert (settings.run_dir, settings.listen) == ("/run/user/7/appliance", None)
    assert settings.state_dir == f"{tmp_path}/.local/state/appliance"
    assert (settings.unix.uids, settings.unix.api_mode) == ("owner", "0660")


def test_the_directories_that_systemd_gives_are_used(tmp_path: Path) -> None:
    environ = {
        "HOME": str(tmp_path),
        "RUNTIME_DIRECTORY": "/run/appliance",
        "STATE_DIRECTORY": "/var/lib/appliance",
    }
    settings = load_settings(Flags(), environ)
    assert (settings.run_dir, settings.state_dir) == ("/run/appliance", "/var/lib/appliance")


def test_flags_override_the_file_and_a_flagged_model_replaces_its_models(tmp_path: Path) -> None:
    text = 'fronts = 2\nlisten = "127.0.0.1:1"\n[models.a]\nfolder = "."\nmax_rows = 8\n'
    assert load(tmp_path, text).models["a"].folder == str(tmp_path)
    settings = load(tmp_path, text, fronts=3, dtype="float16", tensor_parallel_size=2)
    assert (settings.fronts, settings.address()) == (3, ("127.0.0.1", 1))
    model = settings.models["a"]
    assert (model.max_rows, model.dtype, model.tensor_parallel_size) == (8, "float16", 2)
    assert model.spec("a-0").model_path == str(tmp_path)
    flagged = load(tmp_path, text, models=[f"b={tmp_path}"], dtype="float16").models
    assert {name: model.dtype for name, model in flagged.items()} == {"b": "float16"}


def test_what_is_quantised_is_said_in_the_file_or_by_flags_and_reaches_the_replica(tmp_path: Path) -> None:
    text = '[models.a]\nfolder = "."\nkv_dtype = "fp8"\n'
    spec = load(tmp_path, text).models["a"].spec("a-0")
    assert (spec.dtype, spec.weights, spec.kv_dtype) == ("auto", "auto", "fp8")
    spec = load(tmp_path, text, weights="fp8", kv_dtype="auto").models["a"].spec("a-0")
    assert (spec.weights, spec.kv_dtype) == ("fp8", "auto")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fronts = 'x'", "fronts = 'x' cannot be used: expected `int`, got `str`"),
        ("fronts = 0", "fronts = 0 cannot be used: expected `int` >= 1"),
        ("frnts = 2", "frnts is not a setting: did you mean 'fronts'?"),
        ("[unix]\nuid = 1", "unix.uid is not a setting: did you mean 'uids'?"),
        ("[unix]\nuids = 'all'", "unix.uids = 'all' cannot be used: it can be a list, 'owner', 'any'"),
        ("[unix]\nuids = [1, 'x']", "unix.uids[1] = 'x' cannot be used"),
        ("[limits]\nmax_body_byte = 3", "max_body_byte is not a setting: did you mean 'max_body_bytes'?"),
        ("[models.a]\nfolder = '.'\nmax_rows = 0", "models.a.max_rows = 0 cannot be used"),
        ("[models.a]\nfolder = '.'\nmax_row = 3", "models.a.max_row is not a setting: did you mean"),
        ("[models.a]\nfolder = '.'\ndtype = 'int3'", "a.dtype = 'int3' cannot be used: it can be 'auto', "),
        ("[models.a]\nfolder = '.'\nweights = 'int8'", "weights = 'int8' cannot be used: it can be 'auto', "),
        ("[models.a]\nfolder = '.'\nkv_dtype = 'e5m2'", "a.kv_dtype = 'e5m2' cannot be used: it can "),
        ("[models.a]\nmax_rows = 3", "models.a lacks 'folder': add it"),
        ("[models.a]\nfolder = '/nope'", "models.a.folder = '/nope' is not a folder"),
        ("[models.'a b']\nfolder = '.'", "a model's name begins with a letter"),
        ("models = 3", "models = 3 must be tables: write [models.NAME]"),
        ("[unix]\napi_mode = 'rw'", "unix.api_mode = 'rw' cannot be used: write a file mode in octal"),
        ("[unix]\nadmin_mode = 384", "unix.admin_mode = 384 cannot be used: write a file mode in octal"),
        ("listen = 'here'", "listen = 'here' is not HOST:PORT"),
        ("config_file = 'x'", "config_file is not a setting"),
        ("a = = 1", "is not TOML"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_with_its_place_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(tmp_path, text)
    assert said in str(error.value)


def test_wrong_flags_are_named_too(tmp_path: Path) -> None:
    for flags, said in (
        ({"dtype": "int3"}, "dtype = 'int3' cannot be used"),
        ({"models": ["x"]}, "--model 'x' is not NAME=FOLDER"),
        ({"models": [f"x={tmp_path}", f"x={tmp_path}"]}, "names 'x' twice"),
        ({"config": "/nope.toml"}, "--config names /nope.toml, which is not a file"),
    ):
        with pytest.raises(SettingsError, match=said):
            load_settings(Flags(**flags), {"HOME": str(tmp_path)})


def test_the_settings_file_is_the_first_of_flag_environment_and_home(tmp_path: Path) -> None:
    home = tmp_path / "appliance" / "appliance.toml"
    home.parent.mkdir()
    home.touch()
    other = tmp_path / "other.toml"
    other.touch()
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/nonexistent"}
    assert find_config(None, environ) == home
    assert find_config(None, environ | {"APPLIANCE_CONFIG": str(other)}) == other
    assert find_config(str(home), environ | {"APPLIANCE_CONFIG": str(other)}) == home
