"""Tests that secrets are removed from stored text."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.channel.front_settings import KeepRules, SecretKind
from appliance.text.redaction import Redactor

KEY = "ak-42Wz8WexrvPVbzgyANeDeA367WMYIg4REgNL5PcR8Ik"
PRIVATE = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVPmB92K27uhbUJU1p1r"

SECRETS = [
    (f"my key is {KEY}, use it", KEY, "my key is [key redacted], use it"),
    ("AWS_KEY AKIAIOSFODNN7EXAMPLE!", "AKIAIOSFODNN7EXAMPLE", "AWS_KEY [key redacted]!"),
    (f"cookie {JWT}", JWT, "cookie [key redacted]"),
    ("Authorization: Bearer abcDEF123456==", "abcDEF123456", "Authorization: Bearer [token redacted]"),
    ("password: hunter2hunter2", "hunter2", "password: [password redacted]"),
    ("Server=db;Uid=me;Pwd=hunter2hunter2;", "hunter2", "Server=db;Uid=me;Pwd=[password redacted];"),
    ("DB_PWD=hunter2hunter2", "hunter2", "DB_PWD=[password redacted]"),
    ('{"api_key": "0123456789ab"}', "0123456789ab", '{"api_key": "[password redacted]"}'),
    ("postgres://me:s3cret-pw@db/x", "s3cret-pw", "postgres://me:[password redacted]@db/x"),
    (f"see\n{PRIVATE}\nend", "MIIEow", "see\n[private key redacted]\nend"),
    ("-----BEGIN PRIVATE KEY-----\nMIIEow", "MIIEow", "[private key redacted]"),
    # JSON inside other text
    (rf'{{"log": "line\n{KEY}"}}', KEY, r'{"log": "line\n[key redacted]"}'),
    (r"a\nBearer abcDEF123456", "abcDEF", r"a\nBearer [token redacted]"),
    (r"{\"password\": \"hunter2hunter2\"}", "hunter2", r"{\"password\": \"[password redacted]\"}"),
    (r'{"password": "ab\"cdefg12"}', "cdefg12", '{"password": "[password redacted]"}'),
    # secrets in prose, in settings, and in unusual places
    (f"it is...{KEY}", KEY, "it is...[key redacted]"),
    (f"_{KEY}_ is mine", KEY, "_[key redacted] is mine"),
    (f"It is {JWT}.", JWT, "It is [key redacted]"),
    ("token: Bearer abcDEF123456", "abcDEF", "token: Bearer [token redacted]"),
    ('SECRET_KEY = "django-insecure"', "django", 'SECRET_KEY = "[password redacted]"'),
    ("password = 'my old dog', user = 'me'", "old dog", "password = '[password redacted]', user = 'me'"),
    ("token=" + "a1B2" * 300, "a1B2", "token=[password redacted]"),
    ("https://me:p@ss@host/", "ss", "https://me:[password redacted]@host/"),
]


ALL: tuple[SecretKind, ...] = get_args(SecretKind)


def redact(
    text: str, kinds: tuple[SecretKind, ...] = KeepRules().redact, prefixes: tuple[str, ...] = ()
) -> tuple[str, int]:
    """Return the text without its secrets, and the number of secrets removed."""
    pieces = list(Redactor(kinds, prefixes).pieces(text))
    return "".join(piece.text for piece in pieces), sum(piece.secrets for piece in pieces)


@pytest.mark.parametrize(("text", "secret", "shown"), SECRETS)
def test_secrets_are_redacted_and_the_rest_is_kept(text: str, secret: str, shown: str) -> None:
    assert secret in text
    assert redact(text) == (shown, 1)


@pytest.mark.parametrize(
    "text",
    ["The token of my love: roses", "pass the salt", "task-force", "eyJ", "see bearer bonds", "a@b", "sk-8"],
)
def test_ordinary_text_is_not_redacted(text: str) -> None:
    assert redact(text, ALL) == (text, 0)


def test_other_kinds_of_secrets_and_configured_prefixes_are_redacted() -> None:
    text = "ann@example.org pays with 4111 1111 1111 1111, not 4111 1111 1111 1112; acme_12345"
    assert redact(text) == (text, 0)
    shown = "[e-mail redacted] pays with [card number redacted], not 4111 1111 1111 1112; [secret redacted]"
    assert redact(text, ALL, ("acme_",)) == (shown, 3)


@given(st.text("ab \n:=@-", max_size=30), st.text("ab \n", max_size=30), st.integers(0, 3))
def test_a_key_is_found_anywhere_in_a_text(before: str, after: str, lines: int) -> None:
    """The key must also be found if the text is redacted piece by piece."""
    filling = "some words of a long text\n" * (lines * 100)
    found, secrets = redact(f"{filling}{before} {KEY} {after}{filling}")
    assert KEY not in found and secrets >= 1
