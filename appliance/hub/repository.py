"""Lists a hub repository's files and selects those that this product can read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx2
from huggingface_hub import HfApi, constants, errors, get_token

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_TIMEOUT_S = 30.0
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_REVISION = re.compile(r"[\w.+-]+(/[\w.+-]+)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# File names come from the server. Accept only names that stay inside the snapshot folder.
_CONFIGURATION = re.compile(
    r"[\w+-][\w.+-]*\.(json|jinja)|additional_chat_templates/[\w+-][\w.+-]*\.jinja|tokenizer\.model|merges\.txt",
    re.ASCII,
)
_OTHER_INDEX = re.compile(r".*\.index\.json")
_OTHER_FORMATS = (".gguf", ".bin", ".pth", ".pt", ".onnx", ".h5", ".msgpack")


class HubError(Exception):
    """Raised if a repository cannot be downloaded. The message gives the reason and the remedy."""


class Reference(NamedTuple):
    """A repository and its revision: a branch, a tag or a commit."""

    repository: str
    revision: str

    @property
    def name(self) -> str:
        """The last part of the repository's name."""
        return self.repository.partition("/")[2]


class Hub(NamedTuple):
    """A hub and its access token."""

    endpoint: str
    token: str | None

    def header_token(self) -> str | bool:
        """Return the token as huggingface_hub expects it. Return False if there is none, because the library
        would otherwise use the current user's token."""
        return self.token if self.token is not None else False


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a hub repository."""

    path: str
    size: int
    digest: str
    """The file's SHA-256 if it is in Git LFS, otherwise git's SHA-1. Hubs send this value as the ETag, and
    hub caches use it as the blob's name."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository's files at one commit."""

    reference: Reference
    commit: str
    files: dict[str, RemoteFile]


def hub_from_environment() -> Hub:
    """Return the hub named by $HF_ENDPOINT, with the token from $HF_TOKEN or the caller's token file."""
    return Hub(constants.ENDPOINT, get_token())


def parse_reference(text: str) -> Reference:
    """Parse a repository reference, ORG/NAME[@REVISION]. Raises HubError for any other format."""
    repository, at, revision = text.partition("@")
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise HubError(
            f"{text!r} is not a repository: write ORG/NAME or ORG/NAME@REVISION, such as Qwen/Qwen3-8B"
        )
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise HubError(f"{revision!r} is not a revision: write a branch, a tag or a commit after the @")
    return Reference(repository, revision if at else constants.DEFAULT_REVISION)


def list_files(hub: Hub, reference: Reference) -> Listing:
    """Return the list of a repository's files. Raises HubError if the hub does not provide one."""
    api = HfApi(endpoint=hub.endpoint, token=hub.header_token(), library_name="appliance")
    try:
        with hub_errors(hub, reference):
            info = api.model_info(
                reference.repository, revision=reference.revision, files_metadata=True, timeout=_TIMEOUT_S
            )
    except errors.HFValidationError as error:
        raise HubError(str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise HubError(
            f"{hub.endpoint} does not behave like a Hugging Face hub ({error!r:.200}): check $HF_ENDPOINT"
        ) from error
    if info.sha is None or not _COMMIT.fullmatch(info.sha):
        raise HubError(
            f"{hub.endpoint} returned {info.sha!r} as the commit of {reference.repository}, "
            "which is not a commit id: check $HF_ENDPOINT"
        )
    files = {}
    for sibling in info.siblings or []:
        path = sibling.rfilename
        digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
        size = sibling.lfs.size if sibling.lfs is not None else sibling.size
        files[path] = RemoteFile(path, -1 if size is None else size, digest or "")
    return Listing(reference, info.sha, files)


def configuration_files(listing: Listing) -> list[RemoteFile]:
    """Return the configuration and tokenizer files, including the weight index. Raises HubError if the
    weights or the tokenizer are in a format that this product cannot read."""
    name = listing.reference.repository
    if SINGLE not in listing.files and INDEX not in listing.files:
        raise HubError(_no_safetensors(name, listing.files))
    for needed, content in (("config.json", "the architecture"), ("tokenizer.json", "the tokenizer")):
        if needed not in listing.files:
            raise HubError(
                f"{name} has no {needed}, which describes {content}: choose a repository in the transformers "
                "format"
            )
    return [
        _checked(listing, file)
        for path, file in sorted(listing.files.items())
        if _CONFIGURATION.fullmatch(path) and (path == INDEX or not _OTHER_INDEX.fullmatch(path))
    ]


def weight_files(listing: Listing, snapshot: Path) -> list[RemoteFile]:
    """Return the safetensors files that contain the weights: those listed in the index, which must have been
    downloaded to `snapshot`, or a single file if there is no index. Raises HubError if the index is invalid
    or a file is missing."""
    if INDEX not in listing.files:
        return [_checked(listing, listing.files[SINGLE])]
    name = listing.reference.repository
    try:
        shards = set(json.loads((snapshot / INDEX).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{INDEX} of {name} is not a valid weight index ({error!r})") from error
    files = []
    for shard in sorted(map(str, shards)):
        if shard not in listing.files or Path(shard).name != shard:
            raise HubError(f"{INDEX} of {name} lists {shard!r:.200}, but the repository has no such file")
        files.append(_checked(listing, listing.files[shard]))
    return files


def _no_safetensors(name: str, paths: Iterable[str]) -> str:
    found = sorted({suffix for path in paths if (suffix := Path(path).suffix.lower()) in _OTHER_FORMATS})
    if any(path.endswith(".safetensors") for path in paths):
        return (
            f"{name} has safetensors files, but neither {SINGLE} nor {INDEX}: choose a repository in the "
            "transformers format"
        )
    if ".gguf" in found:
        return (
            f"{name} has its weights only in GGUF, the format of llama.cpp: choose the repository "
            "with safetensors files from which it was converted (see its model card)"
        )
    formats = f"; it has {', '.join(found)} files" if found else ""
    return f"{name} has no safetensors files{formats}: choose a repository with safetensors files"


def _checked(listing: Listing, file: RemoteFile) -> RemoteFile:
    if file.size < 0 or not _DIGEST.fullmatch(file.digest):
        raise HubError(
            f"the hub lists {file.path} of {listing.reference.repository} without a size or checksum: "
            "use another $HF_ENDPOINT"
        )
    return file


@contextmanager
def hub_errors(hub: Hub, reference: Reference) -> Iterator[None]:
    """Convert huggingface_hub and HTTP errors into HubErrors."""
    name, revision = reference
    page = f"{hub.endpoint}/{name}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"access to {name} is restricted: accept its terms on {page}, then set $HF_TOKEN or run 'hf auth "
            "login'"
            if hub.token is None
            else f"the token has no access to {name}: accept its terms on {page} with the token's account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        login = (
            "set $HF_TOKEN or run 'hf auth login'"
            if hub.token is None
            else "use the token of a user who has access"
        )
        raise HubError(
            f"{hub.endpoint} has no repository {name}, or it is private: check the name; for a private "
            f"repository, {login}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{name} has no revision {revision!r}: see the branches, tags and commits on {page}"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise HubError("$HF_HUB_OFFLINE forbids network access: unset it") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise HubError(
                f"{hub.endpoint} does not accept the token: create a new one, and set $HF_TOKEN or run 'hf "
                "auth login'"
            ) from error
        reason = error.server_message or error.response.reason_phrase
        raise HubError(f"{hub.endpoint} refused {name}: HTTP status {status} ({reason[:200]})") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise HubError(
            f"{hub.endpoint} cannot be reached ({error or type(error).__name__}): check the network and the "
            "proxy, or set $HF_ENDPOINT to a mirror. A folder that was downloaded elsewhere can be added "
            "with: appliance models add NAME=FOLDER"
        ) from error
