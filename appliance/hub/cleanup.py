"""Deletes downloaded models from a hub cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from huggingface_hub import scan_cache_dir

from appliance.hub.cache import RepositoryCache, as_owner
from appliance.hub.repository import HubError

_FOLDER = "models--"


def in_hub_cache(folder: Path) -> bool:
    """Return whether `folder` is a commit's snapshot folder in a hub cache."""
    return folder.parent.name == "snapshots" and folder.parent.parent.name.startswith(_FOLDER)


def delete_snapshot(folder: Path) -> int:
    """Delete a commit's folder from its hub cache, along with files that no other commit uses. Return the
    number of bytes freed. Raises HubError if `folder` is not in a hub cache or cannot be deleted."""
    if not in_hub_cache(folder):
        raise HubError(
            f"{folder} was not downloaded with models pull, so its files are kept: delete them yourself"
        )
    repository = folder.parent.parent
    cache = RepositoryCache(repository.parent, repository.name.removeprefix(_FOLDER).replace("--", "/"))
    with as_owner(cache.root), cache.lock():
        # Another repository can contain the same commit, so delete the commit only in this repository.
        scanned = scan_cache_dir(cache.root)
        own = frozenset(one for one in scanned.repos if one.repo_path.name == repository.name)
        strategy = replace(scanned, repos=own).delete_revisions(folder.name)
        strategy.execute()
        if folder.exists():
            raise HubError(
                f"{folder} cannot be deleted: run the command as root or as the owner of the files"
            )
    return strategy.expected_freed_size
