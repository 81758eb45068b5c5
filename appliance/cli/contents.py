"""Prints a request's stored prompts and answers."""

from __future__ import annotations

import msgspec

from appliance.cli.output import paint, printable
from appliance.cli.times import local
from appliance.protocol import Contents
from store.structs import KeptText


class _Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str
    name: str = ""


def print_contents(contents: Contents) -> None:
    """Print a request's stored prompts and answers."""
    goes = "forever" if contents.goes_at is None else f"until {local(contents.goes_at)}"
    print(f"{contents.request_id} of tenant {contents.tenant}, {local(contents.created_at)}; kept {goes}")
    for text in contents.texts:
        print()
        print(paint(f"{text.part} {text.number}: {_described(text)}", "dim"))
        if text.text is not None:
            print("\n".join(_lines(text.text)))


def _described(text: KeptText) -> str:
    parts = [f"{text.bytes:,} bytes, sha256 {text.sha256}"]
    if text.redactions:
        parts.append(f"{text.redactions} secret{'s' if text.redactions != 1 else ''} removed")
    if text.truncated:
        parts.append("truncated")
    return "; ".join(parts)


def _lines(text: str) -> list[str]:
    """Split a stored text into lines and remove terminal control characters. Each conversation message
    becomes a paragraph."""
    try:
        messages = msgspec.json.decode(text, type=list[_Message])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [*map(printable, text.split("\n"))]
    lines = []
    for message in messages:
        role = f"{message.role} ({message.name})" if message.name else message.role
        first, *rest = message.content.split("\n")
        lines += [f"[{printable(role)}] {printable(first)}", *map(printable, rest)]
    return lines
