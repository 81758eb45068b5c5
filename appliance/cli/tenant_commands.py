"""The commands about tenants, keys and users of the box, and their options. What they do is in the modules
beside this one, loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.options import Json, RunDir, Yes

tenants = typer.Typer(help="Who pays for requests, and what they may use.", no_args_is_help=True)
keys = typer.Typer(help="The bearer keys that TCP needs: make, list, rotate, revoke.", no_args_is_help=True)
peers = typer.Typer(help="Users and groups of the box that need no key.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As `tenants list` shows it.", show_default=False)]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="As `keys list` shows it.", show_default=False)]
PeerName = Annotated[
    str,
    typer.Argument(
        metavar="PEER", help="As uid:1000, user:alice, gid:100 or group:staff.", show_default=False
    ),
]


def _limit(flag: str, what: str, metavar: str = "N") -> typer.models.OptionInfo:
    # Texts, because "none" lifts a limit.
    return typer.Option(flag, metavar=metavar, help=f"{what}; or none.", show_default=False)


RequestsPerMinute = Annotated[str | None, _limit("--requests-per-minute", "Requests a minute")]
TokensPerMinute = Annotated[str | None, _limit("--tokens-per-minute", "Prompt and output tokens a minute")]
TokensPerDay = Annotated[str | None, _limit("--tokens-per-day", "Prompt and output tokens a day")]
Burst = Annotated[
    str | None,
    typer.Option(
        "--burst",
        metavar="SPAN",
        help="So much of the limits a minute may be used at once (60s).",
        show_default=False,
    ),
]
Concurrent = Annotated[str | None, _limit("--concurrent", "Requests that run at once; more wait")]
Queued = Annotated[str | None, _limit("--queued", "Requests that wait; more are refused")]
Context = Annotated[str | None, _limit("--context", "Tokens of a request, prompt and output")]
KvShare = Annotated[
    str | None, _limit("--kv-share", "Part of a model's KV blocks that may be held, 0 to 1", "PART")
]

Weight = Annotated[
    str | None,
    typer.Option(
        metavar="N", help="Share of service against other tenants of a class (1).", show_default=False
    ),
]
HighestClass = Annotated[
    str | None,
    typer.Option(
        metavar="P0…P3",
        help="Best class: P0 real-time, P1 interactive, P2 batch, P3 background.",
        show_default=False,
    ),
]
DefaultClass = Annotated[
    str | None,
    typer.Option(metavar="P0…P3", help="Class of requests that ask for none.", show_default=False),
]
DefaultMaxTokens = Annotated[
    str | None, _limit("--default-max-tokens", "Output of a request that names no max_tokens")
]
CacheGroup = Annotated[
    str | None, _limit("--cache-group", "Share cached prefixes with the tenants of this group", "GROUP")
]
LogPolicy = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="Kept of prompts and answers: metadata (nothing), hashes or full.",
        show_default=False,
    ),
]
LogDays = Annotated[str | None, _limit("--log-days", "Days for which that is kept")]

Scopes = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Of inference, admin, read; as a,b (inference).", show_default=False),
]
Models = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="The only models that it opens, as a,b; or none.", show_default=False),
]
KeysClass = Annotated[
    str | None,
    typer.Option(
        "--highest-class", metavar="P0…P3", help="Best class; or none: the tenant's.", show_default=False
    ),
]
Cancel = Annotated[bool, typer.Option("--cancel", help="End its requests that run and wait, too.")]


@tenants.command("list")
def tenants_list(run_dir: RunDir = None, json: Json = False) -> None:
    """List all tenants."""
    from appliance.cli.tenants import list_tenants

    list_tenants(run_dir, as_json=json)


@tenants.command("show")
def tenants_show(name: Name, run_dir: RunDir = None, json: Json = False) -> None:
    """Show a tenant with all its limits."""
    from appliance.cli.tenants import show_tenant

    show_tenant(run_dir, name, as_json=json)


@tenants.command("create")
def tenants_create(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="What it is called, for good.", show_default=False)
    ],
    weight: Weight = None,
    highest_class: HighestClass = None,
    default_class: DefaultClass = None,
    default_max_tokens: DefaultMaxTokens = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    burst_s: Burst = None,
    concurrent_requests: Concurrent = None,
    queued_requests: Queued = None,
    context_tokens: Context = None,
    kv_share: KvShare = None,
    cache_group: CacheGroup = None,
    log_policy: LogPolicy = None,
    log_days: LogDays = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Make a tenant. What is not given is as for the built-in ones: no limits."""
    from appliance.cli.tenants import create_tenant

    create_tenant(run_dir, name, context.params, as_json=json)


@tenants.command("set")
def tenants_set(
    context: typer.Context,
    name: Name,
    weight: Weight = None,
    highest_class: HighestClass = None,
    default_class: DefaultClass = None,
    default_max_tokens: DefaultMaxTokens = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    burst_s: Burst = None,
    concurrent_requests: Concurrent = None,
    queued_requests: Queued = None,
    context_tokens: Context = None,
    kv_share: KvShare = None,
    cache_group: CacheGroup = None,
    log_policy: LogPolicy = None,
    log_days: LogDays = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Change a tenant, at once. What is not given stays; none lifts a limit."""
    from appliance.cli.tenants import set_tenant

    set_tenant(run_dir, name, context.params, as_json=json)


@tenants.command("suspend")
def tenants_suspend(
    name: Name, cancel: Cancel = False, yes: Yes = False, run_dir: RunDir = None, json: Json = False
) -> None:
    """Serve nothing of a tenant any more. What runs goes on, unless --cancel is given."""
    from appliance.actions import SuspendTenant
    from appliance.cli.actions import perform

    perform(run_dir, SuspendTenant(name=name, cancel=cancel), yes=yes, as_json=json)


@tenants.command("resume")
def tenants_resume(name: Name, run_dir: RunDir = None, json: Json = False) -> None:
    """Serve a suspended tenant again."""
    from appliance.actions import ResumeTenant
    from appliance.cli.actions import perform

    perform(run_dir, ResumeTenant(name=name), as_json=json)


@tenants.command("delete")
def tenants_delete(name: Name, yes: Yes = False, run_dir: RunDir = None, json: Json = False) -> None:
    """Remove a tenant that no valid key and no user of the box stands for."""
    from appliance.actions import DeleteTenant
    from appliance.cli.actions import perform

    perform(run_dir, DeleteTenant(name=name), yes=yes, as_json=json)


@keys.command("list")
def keys_list(
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Only this tenant's.")] = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """List all keys, revoked ones too, without their secrets."""
    from appliance.cli.keys import list_keys

    list_keys(run_dir, tenant, as_json=json)


@keys.command("create")
def keys_create(
    context: typer.Context,
    name: Annotated[
        # Said in full, as --status is: typer 0.27 takes a metavar of the same name for the option's.
        str,
        typer.Option("--name", metavar="NAME", help="What or whom it is for.", show_default=False),
    ],
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Who its requests are billed to.")] = "default",
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Worthless after this span (90d, 12h) or from this date on."),
    ] = None,
    scopes: Scopes = None,
    models: Models = None,
    highest_class: KeysClass = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    burst_s: Burst = None,
    concurrent_requests: Concurrent = None,
    queued_requests: Queued = None,
    context_tokens: Context = None,
    kv_share: KvShare = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Make a key. It is shown this once and kept nowhere. Its limits hold within its tenant's."""
    from appliance.cli.keys import create_key

    create_key(run_dir, name, tenant, expires, context.params, as_json=json)


@keys.command("set")
def keys_set(
    context: typer.Context,
    key_id: KeyId,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="What or whom it is for.", show_default=False),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Worthless after this span, or from this date on; or none."),
    ] = None,
    scopes: Scopes = None,
    models: Models = None,
    highest_class: KeysClass = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    burst_s: Burst = None,
    concurrent_requests: Concurrent = None,
    queued_requests: Queued = None,
    context_tokens: Context = None,
    kv_share: KvShare = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Change what a key opens, at once. What is not given stays; none lifts a limit."""
    from appliance.cli.keys import set_key

    set_key(run_dir, key_id, name, expires, context.params, as_json=json)


@keys.command("rotate")
def keys_rotate(
    key_id: KeyId,
    overlap_s: Annotated[
        str, typer.Option("--overlap", metavar="SPAN", help="For so long the old key goes on.")
    ] = "24h",
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="The new key is worthless after this span, or from this date on. "
            "Default: good for as long as the old one was made for.",
        ),
    ] = None,
    yes: Yes = False,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Make a key with the same rights in the place of one. It is shown this once and kept nowhere."""
    from appliance.cli.keys import rotate_key

    rotate_key(run_dir, key_id, overlap_s, expires, yes=yes, as_json=json)


@keys.command("revoke")
def keys_revoke(
    key_id: KeyId, cancel: Cancel = False, yes: Yes = False, run_dir: RunDir = None, json: Json = False
) -> None:
    """Make a key worthless, for good. What runs goes on, unless --cancel is given."""
    from appliance.actions import RevokeKey
    from appliance.cli.actions import perform

    perform(run_dir, RevokeKey(id=key_id, cancel=cancel), yes=yes, as_json=json)


@peers.command("list")
def peers_list(run_dir: RunDir = None, json: Json = False) -> None:
    """List the users and groups that need no key on api.sock."""
    from appliance.cli.peers import list_peers

    list_peers(run_dir, as_json=json)


@peers.command("map")
def peers_map(
    peer: PeerName,
    tenant: Annotated[
        str,
        typer.Option("--tenant", metavar="NAME", help="Who its requests are billed to.", show_default=False),
    ],
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Let a user or group use api.sock for a tenant. A user's own entry goes before those of its groups."""
    from appliance.cli.peers import map_peer

    map_peer(run_dir, peer, tenant, as_json=json)


@peers.command("unmap")
def peers_unmap(peer: PeerName, yes: Yes = False, run_dir: RunDir = None, json: Json = False) -> None:
    """Forget for whom a user or group stands."""
    from appliance.cli.peers import unmap_peer

    unmap_peer(run_dir, peer, yes=yes, as_json=json)
