"""Downloads a model into a hub cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from appliance.hub.cache import RepositoryCache, as_owner
from appliance.hub.download import Download, DownloadProgress
from appliance.hub.repository import Hub, Reference, configuration_files, list_files, weight_files


class Pulled(msgspec.Struct, kw_only=True):
    """A downloaded model."""

    repository: str
    revision: str
    commit: str
    folder: str
    files: int
    bytes: int
    """Total size of the model's files, in bytes."""
    received_bytes: int
    """Bytes received by this pull. All other bytes were already in the cache."""


def pull_model(
    hub: Hub, reference: Reference, root: Path, progress: DownloadProgress, check: Callable[[Path], None]
) -> Pulled:
    """Download the safetensors, tokenizer and configuration files of a repository into the hub cache `root`,
    which must exist. Raises HubError if the download fails.

    The small files are downloaded first, because they include the index of weight files, whose total size
    must be known before the free disk space can be checked. `check` is called with the folder that contains
    the small files, and raises HubError if the weights should not be downloaded.
    """
    cache = RepositoryCache(root, reference.repository)
    with as_owner(root), cache.lock():
        listing = list_files(hub, reference)
        files = configuration_files(listing)
        cache.prepare()
        download = Download(hub, listing, cache)
        download.run(files, progress)
        cache.link(listing.commit, files)
        check(cache.snapshot(listing.commit))
        weights = weight_files(listing, cache.snapshot(listing.commit))
        cache.check_space(sum(file.size for file in weights) - cache.received_bytes(weights))
        download.run(weights, progress)
        cache.link(listing.commit, weights)
        cache.record(reference.revision, listing.commit)
    return Pulled(
        repository=reference.repository,
        revision=reference.revision,
        commit=listing.commit,
        folder=str(cache.snapshot(listing.commit)),
        files=len(files) + len(weights),
        bytes=sum(file.size for file in (*files, *weights)),
        received_bytes=download.received_bytes,
    )
