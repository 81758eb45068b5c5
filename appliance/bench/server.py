"""Checks the server before a run: its address, its model, the valid token ids and its response to a test
request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from appliance.bench.client import Client, TargetExchange, refusal_text
from appliance.bench.load import Load, Target, http_failure
from appliance.bench.processes import BenchError
from appliance.bench.workloads import Shape

_ANSWER_S = 30.0
_SAFE_VOCAB_SIZE = 1000
"""Vocabulary size assumed if it cannot be determined. Every model in common use has at least this many
tokens."""
_SAMPLE = "".join(chr(code) for code in (*range(32, 127), *range(0xA1, 0x17F), *range(0x391, 0x3CA))) + (
    " The quick brown fox jumps over the lazy dog; international organisations nevertheless reconsidered "
    "their responsibilities. def __init__(self, parameters): return [] # 1234567890 пример 例文 مثال उदाहरण"
)


class Server(msgspec.Struct, frozen=True):
    """The properties of a server that has passed the checks."""

    target: Target
    model: str
    vocab_size: int
    vocab_size_source: str
    """How the vocabulary size was determined, as shown to the operator."""
    max_model_len: int | None = None
    """Maximum combined number of prompt and output tokens, or None if not reported by the server."""

    def check_length(self, shape: Shape) -> None:
        """Raise BenchError if the model's maximum length is too short for a request of this shape."""
        wanted = shape.prompt_tokens + shape.output_tokens
        if self.max_model_len is not None and wanted > self.max_model_len:
            raise BenchError(
                f"{shape.prompt_tokens} prompt tokens and {shape.output_tokens} output tokens add up to "
                f"{wanted} tokens, but {self.model!r} allows only {self.max_model_len}: use fewer "
                "tokens, or serve the model with a larger max_model_len"
            )


def parse_url(base_url: str, api_key: str | None) -> Target:
    """Return the target for a base URL as accepted by the `openai` client. If the URL has no path, `/v1` is
    added. Raises BenchError if the URL is invalid."""
    url = urlsplit(base_url)
    try:
        port = url.port
    except ValueError:
        port = 0
    if url.scheme not in ("http", "https") or not url.hostname or port == 0 or url.query or url.fragment:
        raise BenchError(
            f"--base-url {base_url!r} is not a valid API address: use a URL such as http://127.0.0.1:8080/v1"
        )
    is_tls = url.scheme == "https"
    return Target(
        host=url.hostname,
        port=port or (443 if is_tls else 80),
        tls_name=url.hostname if is_tls else "",
        authority=url.netloc.rpartition("@")[2],
        prefix=url.path.rstrip("/") or "/v1",
        api_key=_checked_key(api_key),
    )


def socket_target(
    path: str, api_key: str | None = None, trusted_uids: frozenset[int] = frozenset()
) -> Target:
    """Return the target for a Unix socket. Raises BenchError if the path cannot be used."""
    # Do not make the path absolute: a relative path may fit the length limit even if the absolute path does
    # not.
    if len(path.encode()) > 107:
        raise BenchError(f"--socket {path!r} is too long: a socket path can have at most 107 bytes")
    if not Path(path).exists():
        raise BenchError(f"the socket {path} does not exist: check that the server is running")
    return Target(socket=path, api_key=_checked_key(api_key), trusted_uids=trusted_uids)


def find_server(target: Target, model: str | None, vocab_size: int | None) -> Server:
    """Determine the server's models and vocabulary size, and request a completion of two tokens. Raises
    BenchError if the server cannot be used."""
    return asyncio.run(_find_server(target, model, vocab_size))


def _checked_key(api_key: str | None) -> str:
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise BenchError(
            "--api-key contains characters that are not allowed in an HTTP header: check the pasted key"
        )
    return api_key or ""


async def _find_server(target: Target, model: str | None, vocab_size: int | None) -> Server:
    client = Client(target, _ANSWER_S)
    try:
        served = await _models(client)
        chosen = _choose(served, model, target)
        if vocab_size is None:
            vocab_size, source = await _vocab_size(client, served.get(chosen, {}), chosen)
        else:
            source = "--vocab-size"
        length = served.get(chosen, {}).get("max_model_len")
        server = Server(target, chosen, vocab_size, source, length if isinstance(length, int) else None)
        await _try(client, server)
    finally:
        client.close()
    return server


async def _models(client: Client) -> dict[str, dict[str, Any]]:
    """Return the models listed at /v1/models, by id. The result is empty if the route does not exist."""
    target = client.target
    status, body = await _ask(client, "GET", f"{target.prefix}/models")
    if status == 404:
        return {}
    if status in (401, 403):
        raise _unauthorised(target, status, refusal_text(body))
    if status != 200:
        raise BenchError(f"{target}/models returned status {status}: {refusal_text(body)}")
    try:
        return {str(model["id"]): model for model in json.loads(body)["data"]}
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{target} is not an OpenAI-compatible API: it returned no list of models") from None


def _choose(served: dict[str, dict[str, Any]], model: str | None, target: Target) -> str:
    if model is not None:
        if served and model not in served:
            raise BenchError(
                f"--model {model!r} is not served; available models: {', '.join(sorted(served))}"
            )
        return model
    if not served:
        raise BenchError(
            f"{target}/models lists no models: check the address (most end in /v1), or set a model with "
            "--model"
        )
    return next(iter(served))


async def _vocab_size(client: Client, document: dict[str, Any], model: str) -> tuple[int, str]:
    """Return a number below which all token ids are valid: the vocabulary size reported by the server, or
    else the highest token id in a text that uses many scripts."""
    meta = document.get("meta")
    for place in (document, meta if isinstance(meta, dict) else {}):
        for name in ("vocab_size", "n_vocab"):
            if isinstance(place.get(name), int) and place[name] > 0:
                return place[name], "from the server's list of models"
    body = json.dumps({"model": model, "prompt": _SAMPLE, "content": _SAMPLE}).encode()
    status, answer = await _ask(client, "POST", f"{client.target.prefix.removesuffix('/v1')}/tokenize", body)
    if status == 200:
        try:
            return max(json.loads(answer)["tokens"]) + 1, "from the server's tokenizer"
        except (ValueError, KeyError, TypeError):
            pass
    return _SAFE_VOCAB_SIZE, "a guess, because the server does not report it; set it with --vocab-size"


async def _try(client: Client, server: Server) -> None:
    """Send one request of the same shape as the run's requests, so that a problem is reported once, before
    the run starts."""
    load = Load(
        target=server.target,
        model=server.model,
        vocab_size=server.vocab_size,
        prompt_tokens=4,
        output_tokens=2,
        seed="try",
        requests=1,
    )
    exchange = TargetExchange(streamed=True)
    await client.send(load.body(0), exchange)
    kind, message = exchange.failure, exchange.message
    if not kind:
        return
    if kind in (http_failure(401), http_failure(403)):
        raise _unauthorised(server.target, exchange.status, message)
    remedy = ""
    if kind == http_failure(404):
        remedy = f" (check that the server has the model {server.model!r} and a completions route)"
    elif "token" in message.lower() and "id" in message.lower():
        remedy = f" (prompts are random token ids below {server.vocab_size}; see --vocab-size)"
    raise BenchError(
        f"a test request with two tokens to {server.target}/completions failed: {kind}: {message}{remedy}"
    )


def _unauthorised(target: Target, status: int, message: str) -> BenchError:
    remedy = "check --api-key" if target.api_key else "set a key with --api-key or $OPENAI_API_KEY"
    return BenchError(f"{target} rejected the key (status {status}: {message}): {remedy}")


async def _ask(client: Client, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    exchange = TargetExchange(streamed=False)
    await client.send(client.target.request(method, path, body), exchange)
    if exchange.failure == "connect":
        raise BenchError(
            f"cannot connect to {client.target} ({exchange.message}): check the address, and that the "
            "server is running"
        )
    if exchange.failure:
        raise BenchError(f"{method} {path} at {client.target} failed: {exchange.failure}: {exchange.message}")
    return exchange.status, bytes(exchange.body)
