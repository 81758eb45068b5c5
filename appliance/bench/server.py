"""The server before the run: where it is, which model, which token ids, and whether it answers at all."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from appliance.bench.bodies import completion, head
from appliance.bench.client import Client, Exchange, Plain, Streamed, refusal_text
from appliance.bench.messages import Prompting, Target
from appliance.bench.workers import BenchError

_ANSWER_S = 30.0
_SAFE_VOCABULARY = 1000
"""Every model that people serve has at least so many tokens; where nobody says how many, ids stay below."""
_SAMPLE = "".join(chr(code) for code in (*range(32, 127), *range(0xA1, 0x17F), *range(0x391, 0x3CA))) + (
    " The quick brown fox jumps over the lazy dog; international organisations nevertheless reconsidered "
    "their responsibilities. def __init__(self, parameters): return [] # 1234567890 пример 例文 مثال उदाहरण"
)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    target: Target
    model: str
    vocabulary: int
    """Prompts are made of ids below."""
    vocabulary_from: str
    """Who said so, in words."""
    max_model_len: int | None
    """Longest prompt and output together; None where the server does not say."""

    def prompting(
        self, prompt_tokens: int, output_tokens: int, seed: str, temperature: float, top_p: float
    ) -> Prompting:
        """Requests of one shape. Raises BenchError where the model is too short for them."""
        wanted = prompt_tokens + output_tokens
        if self.max_model_len is not None and wanted > self.max_model_len:
            raise BenchError(
                f"{prompt_tokens} prompt tokens and {output_tokens} output tokens are {wanted}, but "
                f"{self.model!r} takes {self.max_model_len} in all: ask for less, or serve it longer"
            )
        return Prompting(
            model=self.model,
            vocabulary=self.vocabulary,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
        )


def target_of(base_url: str | None, socket: str | None, api_key: str | None) -> Target:
    """The target that options name: one of an URL, as the `openai` client takes it (`/v1` is added where it
    has no path), or a Unix socket. Raises BenchError."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise BenchError("--api-key has characters that no header can carry: check what was pasted")
    if socket is not None:
        # The path as the operator wrote it: a relative one may be what fits into a socket's 107 bytes.
        if len(socket.encode()) > 107:
            raise BenchError(f"--socket {socket!r} is longer than a socket's path can be (107 bytes)")
        return Target(socket=socket, api_key=api_key or "")
    url = urlsplit(base_url or "")
    try:
        port = url.port
    except ValueError:
        port = 0
    if url.scheme not in ("http", "https") or not url.hostname or port == 0 or url.query or url.fragment:
        raise BenchError(
            f"--base-url {base_url!r} is not the address of an API: write for example http://127.0.0.1:8080/v1"
        )
    is_tls = url.scheme == "https"
    return Target(
        host=url.hostname,
        port=port or (443 if is_tls else 80),
        tls_name=url.hostname if is_tls else "",
        authority=url.netloc.rpartition("@")[2],
        prefix=url.path.rstrip("/") or "/v1",
        api_key=api_key or "",
    )


async def find_server(target: Target, model: str | None, vocabulary: int | None) -> Server:
    """Ask the server what it has, and for two tokens. Raises BenchError, in words for the operator."""
    target = await _resolved(target)
    client = Client(target, _ANSWER_S)
    try:
        served = await _models(client, target)
        chosen = _choose(served, model, target)
        if vocabulary is None:
            vocabulary, source = await _vocabulary(client, target, served.get(chosen, {}), chosen)
        else:
            source = "--vocab-size"
        length = served.get(chosen, {}).get("max_model_len")
        server = Server(target, chosen, vocabulary, source, length if isinstance(length, int) else None)
        await _try(client, server)
    finally:
        client.close()
    return server


def name_of(target: Target) -> str:
    """The target for people."""
    if target.socket:
        return target.socket
    return f"{'https' if target.tls_name else 'http'}://{target.authority}{target.prefix}"


async def _resolved(target: Target) -> Target:
    """The target with an address that answers instead of its host's name, so that no request of the run waits
    for a resolver. Raises BenchError when nobody is there."""
    if target.socket and not Path(target.socket).exists():
        raise BenchError(f"there is no socket {target.socket}: is the server running?")
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if target.tls_name else None
    try:
        async with asyncio.timeout(_ANSWER_S):
            if target.socket:
                transport, _ = await loop.create_unix_connection(asyncio.Protocol, target.socket)
            else:
                transport, _ = await loop.create_connection(
                    asyncio.Protocol,
                    target.host,
                    target.port,
                    ssl=context,
                    server_hostname=target.tls_name or None,
                )
    except TimeoutError:
        raise BenchError(f"{name_of(target)} did not take a connection within {_ANSWER_S:g} s") from None
    except ssl.SSLError as error:
        raise BenchError(f"{name_of(target)} does not speak TLS that can be trusted: {error}") from None
    except PermissionError:
        raise BenchError(
            f"{name_of(target)} may not be opened by this user: use the service's user, or root"
        ) from None
    except OSError as error:
        raise BenchError(
            f"nobody answers at {name_of(target)} ({error.strerror or error}): is the server running, and is "
            f"this its address?"
        ) from None
    peer = transport.get_extra_info("peername")
    transport.abort()
    if target.socket:
        return target
    return msgspec.structs.replace(target, host=peer[0])


async def _models(client: Client, target: Target) -> dict[str, dict[str, Any]]:
    """What /v1/models lists, by id; empty where there is no such route."""
    status, body = await _ask(client, "GET", f"{target.prefix}/models")
    if status == 404:
        return {}
    if status in (401, 403):
        raise BenchError(_unauthorised(target, status, body))
    if status != 200:
        raise BenchError(f"{name_of(target)}/models answers {status}: {refusal_text(body)}")
    try:
        return {str(model["id"]): model for model in json.loads(body)["data"]}
    except (ValueError, KeyError, TypeError):
        raise BenchError(
            f"{name_of(target)} is not an OpenAI-compatible API: it has no list of models"
        ) from None


def _choose(served: dict[str, dict[str, Any]], model: str | None, target: Target) -> str:
    if model is not None:
        if served and model not in served:
            raise BenchError(f"--model {model!r} is not served: there are {', '.join(sorted(served))}")
        return model
    if not served:
        raise BenchError(
            f"{name_of(target)}/models lists no model: check the address (most end in /v1), or say which "
            f"with --model"
        )
    return next(iter(served))


async def _vocabulary(
    client: Client, target: Target, document: dict[str, Any], model: str
) -> tuple[int, str]:
    """Ids that the model surely has: what the server tells, or the highest id of a text of many scripts."""
    meta = document.get("meta")
    for place in (document, meta if isinstance(meta, dict) else {}):
        for name in ("vocab_size", "n_vocab"):
            if isinstance(place.get(name), int) and place[name] > 0:
                return place[name], "the server's list of models"
    body = json.dumps({"model": model, "prompt": _SAMPLE, "content": _SAMPLE}).encode()
    root = target.prefix.removesuffix("/v1")
    status, answer = await _ask(client, "POST", f"{root}/tokenize", body)
    if status == 200:
        try:
            return max(json.loads(answer)["tokens"]) + 1, "the server's tokenizer"
        except (ValueError, KeyError, TypeError):
            pass
    return _SAFE_VOCABULARY, "a guess, as the server does not say: see --vocab-size"


async def _try(client: Client, server: Server) -> None:
    """Ask for two tokens as the run will, so that what is wrong is said once and before it starts."""
    streamed = Streamed()
    request = completion(server.target, server.prompting(4, 2, "try", 0.0, 1.0), 0)
    await client.send(request, streamed)
    if not streamed.failure:
        return
    kind, message = streamed.failure, streamed.message
    where = f"{name_of(server.target)}/completions"
    if kind in ("http 401", "http 403"):
        raise BenchError(_unauthorised(server.target, int(kind[5:]), message.encode()))
    remedy = ""
    if kind == "http 404":
        remedy = f" (is there a model {server.model!r}, and a completions route?)"
    elif "token" in message.lower() and "id" in message.lower():
        remedy = f" (prompts are token ids below {server.vocabulary}: see --vocab-size)"
    raise BenchError(f"{where} does not answer a request of two tokens: {kind}: {message}{remedy}")


def _unauthorised(target: Target, status: int, body: bytes) -> str:
    how = "check --api-key" if target.api_key else "give a key with --api-key, or $OPENAI_API_KEY"
    return f"{name_of(target)} wants another key (status {status}: {refusal_text(body)}): {how}"


async def _ask(client: Client, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    exchange = Plain()
    await client.send(head(client.target, method, path, len(body)) + body, exchange)
    _raise_failure(exchange, f"{name_of(client.target)}: {method} {path}")
    return exchange.status, bytes(exchange.body)


def _raise_failure(exchange: Exchange, what: str) -> None:
    if exchange.failure:
        raise BenchError(f"{what} got no answer ({exchange.failure}: {exchange.message})")
