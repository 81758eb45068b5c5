"""Tests authentication on every route of the fronts and of the admin API, as listed in their route tables.
Permitted and denied callers request each route, on every socket and in every spelling of its path.

For a new route, `test_every_route_has_its_permitted_callers_listed` fails until the route's permitted callers
are listed here. A route cannot be created without a scope (`appliance.scopes`).
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import httpx
import pytest

from appliance.actions import ACTIONS
from appliance.actions.parameters import (
    CreateKey,
    CreateTenant,
    DeleteTenant,
    ResumeTenant,
    RevokeKey,
    RotateKey,
    SuspendTenant,
)
from appliance.admin.alerts import alert_routes
from appliance.admin.app import admin_app
from appliance.admin.callers import Authenticator
from appliance.admin.checks import examination_routes
from appliance.admin.events import event_route
from appliance.admin.kv_blocks import kv_blocks_route
from appliance.admin.log_routes import log_routes
from appliance.admin.telemetry_routes import telemetry_routes
from appliance.admin.what_if import what_if_routes
from appliance.client import AdminClient
from appliance.front.app import build_app
from appliance.front.app_state import AppState
from appliance.monitoring.metrics.server import metrics_app
from appliance.scopes import OPEN, check_routes
from appliance.settings import AdminSettings
from tests.ports import free_port
from tests.system.asker import ask
from tests.system.callers import Askers, Matrix, everybody
from tests.system.service import CALL_TIMEOUT_S, service

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]

FRONT_RULES = {
    ("GET", "/health"): OPEN,
    ("GET", "/health/live"): OPEN,
    ("GET", "/health/ready"): OPEN,
    ("GET", "/openapi.json"): "inference",
    ("GET", "/v1/models"): "inference",
    ("GET", "/v1/models/{model:path}"): "inference",
    ("POST", "/v1/chat/completions"): "inference",
    ("POST", "/v1/completions"): "inference",
    ("POST", "/openai/deployments/{model:path}/chat/completions"): "inference",
    ("POST", "/openai/deployments/{model:path}/completions"): "inference",
    ("POST", "/tokenize"): "inference",
    ("POST", "/detokenize"): "inference",
}
ADMIN_RULES = {
    ("GET", "/models"): "read",
    ("GET", "/openapi.json"): "read",
    ("GET", "/status"): "read",
    ("GET", "/requests"): "read",
    ("GET", "/request-log"): "read",
    ("GET", "/audit"): "read",
    ("GET", "/audit/verify"): "read",
    ("GET", "/findings"): "read",
    ("GET", "/logs"): "read",
    ("GET", "/usage"): "read",
    ("GET", "/events"): "read",
    ("GET", "/kv-blocks"): "read",
    ("GET", "/alerts"): "read",
    ("GET", "/alert-log"): "read",
    ("GET", "/silences"): "read",
    ("GET", "/telemetry"): "read",
    ("GET", "/telemetry/snapshot"): "read",
    ("GET", "/telemetry/stored"): "read",
    ("POST", "/what-if/keys.set"): "read",
    ("POST", "/what-if/tenants.set"): "read",
    ("GET", "/keys"): "read",
    ("GET", "/tenants"): "read",
    ("GET", "/peers"): "read",
    ("GET", "/config"): "read",
    ("GET", "/metrics"): "read",
} | {("POST", f"/actions/{action.name}"): "admin" for action in ACTIONS}

METRICS_RULES = {("GET", "/metrics"): OPEN}

SERVERS = {
    "appliance/front/process.py",
    "appliance/admin/server.py",
    "appliance/monitoring/metrics/server.py",
}
"""All files that create an HTTP server. These tests must cover each of them."""

REQUIRED = {
    "/telemetry": "?metrics=queue.running&since=0&until=1",
    "/telemetry/stored": "?since=0&until=1",
    "/alert-log": "?since=0&until=1",
}
"""Query parameters without which a route answers with status 400."""
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND")
NOWHERE = ("/", "/nothing", "/v1", "/v1/", "/docs", "/redoc", "/metrics", "/health", "/admin", "/status", "*")


class Route(NamedTuple):
    method: str
    path: str
    wanted: str


def table(app: Any) -> list[Route]:
    return [
        Route(method, route.path, route.wanted)
        for route in check_routes(app)
        for method in sorted(route.methods or ())
    ]


def front_table() -> list[Route]:
    return table(build_app(AppState(lambda message: None, lambda message, descriptors: None))[0])


def admin_table() -> list[Route]:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            return lambda *words: None

    backend: Any = Anything()
    backend.routes = [
        *log_routes(backend, backend),
        event_route(backend, backend),
        kv_blocks_route(backend),
        *alert_routes(backend),
        *telemetry_routes(backend, backend),
        *examination_routes(backend),
        *what_if_routes(backend),
    ]
    return table(admin_app(backend, Authenticator(AdminSettings(), lambda key: None))[0])


def metrics_table() -> list[Route]:
    return table(metrics_app(bytes))


def one_of_each_kind(routes: list[Route]) -> list[Route]:
    """Return the first route of each method, scope and first segment of the path. All actions are routes of
    the same kind."""
    kinds = {(route.method, route.wanted, route.path.split("/")[1]): route for route in reversed(routes)}
    return list(kinds.values())


def concrete(path: str) -> str:
    """Return the path with its parameters filled in, so that it can be requested and the response ends."""
    return path.replace("{model:path}", "demo").replace("/events", "/events?frames=1") + REQUIRED.get(
        path, ""
    )


def spellings(path: str) -> list[str]:
    """Return other spellings of a path, which some servers treat as the same path."""
    first, _, rest = path[1:].partition("/")
    escaped = "/" + "".join(f"%{ord(letter):02x}" for letter in first) + ("/" + rest if rest else "")
    return [
        path + "/",
        "/" + path,
        path.replace("/", "//"),
        path.upper(),
        path.title(),
        escaped,
        path.replace("/", "%2f"),
        "/" + path[1:].replace("/", "%2f"),
        "/." + path,
        "/nothing/.." + path,
        "/health/live/.." + path,
        "/health/live" + path,
        path + "/../health/live",
        path + ";/health/live",
        path + "?/health/live",
        path + "%00",
        path + "%20",
        path + "#/health/live",
        "http://server" + path,
        "http://server/health/live#" + path,
    ]


@pytest.fixture(scope="module")
def askers() -> Iterator[Askers]:
    made = Askers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    port, metrics_port = free_port(), free_port()
    config = tmp_path_factory.mktemp("auth") / "appliance.toml"
    config.write_text('[unix]\napi_mode = "0666"\nadmin_mode = "0666"\n')
    with config.open("a") as file:
        file.write(f'[metrics]\nlisten = "127.0.0.1:{metrics_port}"\n')
    with service("--config", str(config), "--listen", f"127.0.0.1:{port}", "--fronts", "2") as running:
        for folder in (running.folder, running.run_dir):
            folder.chmod(0o755)
        yield Matrix(running, *everybody(running, port), metrics_port)


def holes(found: Iterable[str]) -> str:
    listed = list(found)
    return f"{len(listed)} holes:\n" + "\n".join(listed)


def test_every_route_has_its_permitted_callers_listed() -> None:
    for found, rules in (
        (front_table(), FRONT_RULES),
        (admin_table(), ADMIN_RULES),
        (metrics_table(), METRICS_RULES),
    ):
        declared = {(route.method, route.path): route.wanted for route in found}
        assert declared == rules
        assert len(found) == len(declared)


def test_the_running_processes_serve_the_routes_in_the_tables(matrix: Matrix) -> None:
    for caller, found in (
        (matrix.callers["inference"][0], front_table()),
        (matrix.operators["admin"][0], admin_table()),
    ):
        status, body = ask(caller.address, "GET", "/openapi.json", caller.headers)
        assert status == 200
        described = {
            (method.upper(), path) for path, item in json.loads(body)["paths"].items() for method in item
        }
        known = {(route.method, route.path.replace(":path", "")) for route in found}
        # Azure's paths are aliases of documented routes.
        aliases = {(method, path) for method, path in known if path.startswith("/openai/")}
        assert described == known - aliases - {("GET", "/openapi.json")}


def test_no_other_code_serves_http() -> None:
    """Fails if new code creates an `HttpServer` or another server. If it fails, extend the tests in this
    file."""
    serving = set()
    for path in sorted((ROOT / "appliance").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                if name in ("HttpServer", "start_server", "start_unix_server", "HTTPServer", "make_server"):
                    serving.add(str(path.relative_to(ROOT)))
    assert serving == SERVERS


def test_each_route_of_the_fronts_is_open_only_to_permitted_callers(matrix: Matrix, askers: Askers) -> None:
    found, asked = [], 0
    for route in front_table():
        for caller_kind, callers in matrix.callers.items():
            for caller in callers:
                status, body = askers.ask(caller, route.method, concrete(route.path))
                asked += 1
                if not expected_of_front(route, caller_kind, status, body):
                    found.append(f"{caller.name}: {route.method} {route.path}: {status} {body[:100]}")
    print(f"{asked} requests over {len(front_table())} routes")
    assert not found, holes(found)


def expected_of_front(route: Route, caller_kind: str, status: int, body: str) -> bool:
    if route.wanted == OPEN:
        return status == 200
    if caller_kind == "unknown":
        return status == 401
    if caller_kind in ("lacking", "suspended"):
        code = "insufficient_scope" if caller_kind == "lacking" else "tenant_suspended"
        return status == 403 and code in body
    return status in ((200,) if route.method == "GET" else (400,))


def test_on_the_fronts_no_spelling_of_a_path_and_no_method_bypasses_authentication(
    matrix: Matrix, askers: Askers
) -> None:
    open_paths = {route.path for route in front_table() if route.wanted == OPEN}
    others = [(method, path) for method, path in itertools.product(METHODS, NOWHERE)]
    for route in front_table():
        path = concrete(route.path)
        others += [(method, path) for method in METHODS]
        others += [(route.method, spelling) for spelling in spellings(path)]
    strangers = [
        caller
        for caller in matrix.callers["unknown"]
        if caller.name in ("tcp, none", "tcp, wrong", "unix, stranger")
    ]
    found = []
    for caller, (method, path) in itertools.product(
        strangers + matrix.callers["lacking"][:1] + matrix.callers["suspended"][:1], others
    ):
        status, body = askers.ask(caller, method, path)
        asked = unquote(path.removeprefix("http://server").partition("?")[0].partition("#")[0])
        if status == 400 and "invalid_http" in body:
            sound = True  # refused before the caller is identified
        elif asked.rstrip("/") in open_paths:
            sound = status in (200, 405)
        else:
            sound = status == 401 if caller in strangers else status in (403, 404)
        if not sound:
            found.append(f"{caller.name}: {method} {path}: {status} {body[:100]}")
    assert not found, holes(found)


def test_permitted_callers_get_no_server_error_with_any_spelling_of_a_path(
    matrix: Matrix, askers: Askers
) -> None:
    found = []
    for route in front_table():
        path = concrete(route.path)
        for method, spelling in [(method, path) for method in METHODS] + [
            (route.method, s) for s in spellings(path)
        ]:
            status, body = askers.ask(matrix.callers["inference"][0], method, spelling)
            if status >= 500 or status == 0:
                found.append(f"{method} {spelling}: {status} {body[:100]}")
    assert not found, holes(found)


def test_each_route_of_the_admin_socket_is_open_only_to_permitted_callers(
    matrix: Matrix, askers: Askers
) -> None:
    found, asked = [], 0
    for route in admin_table():
        for caller_kind, callers in matrix.operators.items():
            for caller in callers:
                status, body = askers.ask(caller, route.method, concrete(route.path))
                asked += 1
                if not expected_of_admin(route, caller_kind, status):
                    found.append(f"{caller.name}: {route.method} {route.path}: {status} {body[:100]}")
    print(f"{asked} requests over {len(admin_table())} routes")
    assert not found, holes(found)
    # None of the denied requests may have changed anything.
    with AdminClient(matrix.running.run_dir, CALL_TIMEOUT_S) as admin:
        assert len(admin.tenants()) == 4


def expected_of_admin(route: Route, caller_kind: str, status: int) -> bool:
    if caller_kind == "":
        return status in (401, 403)
    if caller_kind == "read" and route.wanted == "admin":
        return status == 403
    # The requests of permitted callers have no valid action parameters. Status 400 therefore shows that the
    # request passed authentication.
    return status == (200 if route.method == "GET" else 400)


def test_on_the_admin_socket_no_spelling_of_a_path_and_no_method_bypasses_authentication(
    matrix: Matrix, askers: Askers
) -> None:
    others = [(method, path) for method, path in itertools.product(METHODS, NOWHERE)]
    forecasts = set()
    for route in one_of_each_kind(admin_table()):
        others += [(method, route.path) for method in METHODS]
        others += [(route.method, spelling) for spelling in spellings(route.path)]
        if (route.method, route.wanted) == ("POST", "read"):
            forecasts |= {("POST", path) for path in (route.path, *spellings(route.path))}
    found = []
    for caller in matrix.operators[""]:
        if caller.name not in ("admin, stranger", "admin, wrong", "admin, inference"):
            continue
        for method, path in others:
            status, body = askers.ask(caller, method, path)
            if status not in (401, 403) and not (status == 400 and "invalid_http" in body):
                found.append(f"{caller.name}: {method} {path}: {status} {body[:100]}")
    for caller in matrix.operators["read"][:1]:
        for method, path in others:
            if method in ("GET", "HEAD", "OPTIONS", "TRACE"):
                continue
            status, body = askers.ask(caller, method, path)
            refused = (400, 403, 404, 405) if (method, path) in forecasts else (403, 404, 405)
            if status not in refused and not (status == 400 and "invalid_http" in body):
                found.append(f"{caller.name}: {method} {path}: {status} {body[:100]}")
    assert not found, holes(found)


def test_the_metrics_address_serves_only_metrics(matrix: Matrix) -> None:
    address, found = ["127.0.0.1", matrix.metrics_port], []
    others = [(method, path) for method, path in itertools.product(METHODS, NOWHERE)]
    for route in (*front_table(), *one_of_each_kind(admin_table()), *metrics_table()):
        others += [(route.method, concrete(route.path))]
        others += [("GET", spelling) for spelling in spellings(concrete(route.path))]
    for method, path in others:
        status, body = ask(address, method, path, [])
        asked = unquote(path.removeprefix("http://server").partition("?")[0].partition("#")[0])
        if asked == "/metrics":
            sound = status == (200 if method in ("GET", "HEAD") else 405) or (
                status == 400 and "invalid_http" in body
            )
        else:
            sound = status in (400, 404)
        if not sound:
            found.append(f"{method} {path}: {status} {body[:100]}")
    assert not found, holes(found)


def test_the_admin_api_is_served_on_no_other_socket(matrix: Matrix) -> None:
    key = matrix.callers["inference"][1]
    for route in admin_table():
        if route.path == "/openapi.json":
            continue
        status, _ = ask(key.address, route.method, route.path, key.headers)
        assert status == 404, route


def test_a_change_by_an_operator_applies_to_the_next_connection(matrix: Matrix) -> None:
    """A front receives an operator's change before it accepts any later connection, so the test does not
    wait."""
    address = matrix.callers["inference"][0].address

    def status(key: str) -> int:
        return ask(address, "GET", "/v1/models", [["Authorization", f"Bearer {key}"]])[0]

    with AdminClient(matrix.running.run_dir, CALL_TIMEOUT_S) as admin:
        admin.act(CreateTenant(name="brief"))
        for _ in range(10):
            made = admin.create_key("brief", "brief")
            assert {status(made.key) for _ in range(4)} == {200}
            admin.act(SuspendTenant(name="brief"))
            assert {status(made.key) for _ in range(4)} == {403}
            admin.act(ResumeTenant(name="brief"))
            assert {status(made.key) for _ in range(4)} == {200}
            admin.revoke_key(made.id)
            assert {status(made.key) for _ in range(4)} == {401}
        admin.act(DeleteTenant(name="brief"))


def test_each_request_on_a_keep_alive_connection_is_authenticated_again(matrix: Matrix) -> None:
    right = matrix.callers["inference"][0]
    with httpx.Client(base_url=f"http://127.0.0.1:{right.address[1]}", timeout=600) as http:
        good = http.get("/v1/models", headers=dict(right.headers))
        assert good.status_code == 200
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers={"Authorization": "Bearer ak-wrong"}).status_code == 401


def test_an_expired_or_revoked_key_is_refused_even_on_an_open_connection(matrix: Matrix) -> None:
    running = matrix.running
    address = matrix.callers["inference"][0].address
    revoked = running.act(CreateKey(name="revoked-soon"))
    brief = running.act(CreateKey(name="brief"))
    with httpx.Client(base_url=f"http://127.0.0.1:{address[1]}", timeout=600) as http:

        def status(key: str) -> int:
            return http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

        assert status(brief.key) == status(revoked.key) == 200
        running.act(RevokeKey(id=revoked.id))
        assert status(revoked.key) == 401
        running.act(RotateKey(id=brief.id, overlap_s=1.0))
        running.wait_until(lambda: status(brief.key) == 401, 60, "the key to expire")
