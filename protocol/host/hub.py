"""Fetches models and data sets from the Hugging Face hub, each at one commit, and uploads models.

The client is huggingface_hub, which reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. It is imported
only when a hub name is used.
"""

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.paths import HUB_NAME

log = logging.getLogger(__name__)

UPLOAD_TIMEOUT_S = 120.0
"""Timeout for a silent hub during an upload, seconds; the client has no timeout of its own."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Kind(StrEnum):
    """Kind of a repository on the hub."""

    MODEL = "model"
    DATASET = "dataset"


FILES: Mapping[Kind, Sequence[str]] = {
    Kind.MODEL: (
        "*.safetensors",
        "*.json",
        "*.jinja",
        "*.model",
        "*.tiktoken",
        "merges.txt",
        "vocab.txt",
        "*.py",
    ),
    Kind.DATASET: ("*.parquet", "*.json", "*.jsonl", "*.json.gz", "*.jsonl.gz", "*.csv", "README.md"),
}
"""Kind -> patterns of the files to fetch."""
SKIPPED_FILES: Mapping[Kind, Sequence[str]] = {
    Kind.MODEL: ("*/*", "consolidated*.safetensors"),
    Kind.DATASET: (),
}
"""Kind -> patterns of files to skip: other formats of the same weights."""


def is_hub_name(text: str) -> bool:
    """Return whether `text` looks like OWNER/NAME on the hub and is not a file in the working directory."""
    is_name = re.fullmatch(HUB_NAME, text) and ".." not in text and "--" not in text
    return bool(is_name) and not Path(text).exists()


def is_commit(revision: str) -> bool:
    """Return whether a revision is a full commit hash."""
    return bool(_COMMIT.fullmatch(revision))


def snapshot_dir(kind: Kind, name: str, commit: str) -> Path:
    """Return the path of a repository's commit in this host's cache, whether cached or not."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name, repo_type=kind)
    return Path(constants.HF_HUB_CACHE).expanduser().absolute() / folder / "snapshots" / commit


def resolve_commit(kind: Kind, name: str, revision: str) -> str:
    """Return the current commit of a branch or tag; a commit is returned unchanged.

    If the hub is unreachable, return the commit that this host last fetched for the branch or tag, and log a
    warning.

    Args:
        revision: branch, tag or commit. Empty: the branch main.

    Raises:
        SettingsError: the hub does not have the revision; or the hub is unreachable and the cache does not
            have the revision.
    """
    if is_commit(revision):
        return revision
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        info = HfApi().repo_info(
            name, repo_type=kind, revision=revision or None, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        return str(info.sha)
    except Exception as error:  # the client's own errors, its HTTP library's errors, and OSError
        if not _is_unreachable(error):
            raise _refusal(kind, name, revision, error) from error
        cause = error
    try:
        snapshot = snapshot_download(
            name, repo_type=kind, revision=revision or None, local_files_only=True, **_patterns(kind)
        )
    except OSError:
        raise _refusal(kind, name, revision, cause) from cause
    log.warning("hub.cached %s=%s commit=%s cause=%s", kind, name, Path(snapshot).name, type(cause).__name__)
    return Path(snapshot).name


def fetch(kind: Kind, name: str, commit: str, files: Sequence[str] = ()) -> Path:
    """Return the directory with a repository's files at a commit; fetch files that the cache lacks.

    Several processes may fetch the same files concurrently. After an interruption, complete files stay in the
    cache and the next call resumes.

    Args:
        files: patterns of the files to fetch; empty: `FILES`.

    Raises:
        SettingsError: a file is neither in the cache nor can be fetched.
    """
    from huggingface_hub import snapshot_download

    _hide_progress_without_terminal()
    try:
        return Path(snapshot_download(name, repo_type=kind, revision=commit, **_patterns(kind, files)))
    except Exception as error:
        raise _refusal(kind, name, commit, error) from error


def upload_model(directory: Path, name: str, revision: str, message: str, private: bool) -> str:
    """Upload a directory as one commit to a model on the hub; create the model if it does not exist.

    Args:
        directory: files of the model. Files that exist only on the hub stay there.
        revision: branch, created if it does not exist. Empty: main.
        private: whether a newly created model is private.

    Returns:
        The URL of the commit.

    Raises:
        SettingsError: the hub refuses the upload or is unreachable.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    _hide_progress_without_terminal()
    _set_client_timeout()
    hub = HfApi()
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        if revision:
            hub.create_branch(name, branch=revision, exist_ok=True)
        files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        # `upload_folder` splits large models into several commits
        commit = hub.create_commit(
            name,
            [CommitOperationAdd(path.relative_to(directory).as_posix(), path) for path in files],
            commit_message=message,
            revision=revision or None,
        )
        return str(commit.commit_url)
    except Exception as error:  # the client's own errors, its HTTP library's errors, and OSError
        login = "log in by `hf auth login`, or set HF_TOKEN, with an account that may write there"
        remedy = "try again once it answers" if _is_unreachable(error) else login
        raise SettingsError(
            f"{directory.name} was not uploaded to {constants.ENDPOINT}/{name}: {_line(error)}; {remedy}"
        ) from error


def check_upload(name: str, setting: str) -> None:
    """Check the requirements of an upload on this host, without a request to the hub.

    Args:
        setting: name of the setting that contains `name`.

    Raises:
        SettingsError: `name` is not OWNER/NAME, the client is offline, or there is no token.
    """
    from huggingface_hub import constants, get_token

    if not re.fullmatch(HUB_NAME, name):
        raise SettingsError(f"setting {setting} = {name!r}: that is not OWNER/NAME, a model on the hub")
    if constants.HF_HUB_OFFLINE:
        raise SettingsError(f"setting {setting}: HF_HUB_OFFLINE is set, so nothing is uploaded; unset it")
    if not get_token():
        raise SettingsError(f"setting {setting}: there is no token; `hf auth login`, or set HF_TOKEN")


@cache
def _set_client_timeout() -> None:
    """Set a timeout on every session of the client, which replaces its session after an error."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def limited() -> Any:
        session = default_client_factory()
        session.timeout = UPLOAD_TIMEOUT_S  # type: ignore[assignment]  # the setter takes seconds
        return session

    set_client_factory(limited)


def _hide_progress_without_terminal() -> None:
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()


def _patterns(kind: Kind, files: Sequence[str] = ()) -> dict[str, Any]:
    return {"allow_patterns": list(files or FILES[kind]), "ignore_patterns": list(SKIPPED_FILES[kind])}


def _is_unreachable(error: Exception) -> bool:
    """Return whether the hub was unreachable or failed, so the error is not about the repository."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status >= 500


def _refusal(kind: Kind, name: str, revision: str, error: Exception) -> SettingsError:
    """Return the SettingsError for a client's error, with the request, the cause and the remedy."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    what = f"{kind} {name!r} (revision {revision or 'main'})"
    if isinstance(error, GatedRepoError):
        return SettingsError(
            f"{what}: its terms must be accepted: do that on {constants.ENDPOINT}/{name}, then "
            "`hf auth login`, or set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return SettingsError(
            f"{what}: there is no such directory here, and {constants.ENDPOINT} has no such {kind} that you "
            "may read: check the name; for a private one `hf auth login`, or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return SettingsError(f"{what}: {constants.ENDPOINT} has no such branch, tag or commit of it")
    if not _is_unreachable(error):
        return SettingsError(f"{what}: {constants.ENDPOINT} refused it: {_line(error)}")
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT}: {_line(error)}"
    option = "" if kind is Kind.MODEL else f" --repo-type {kind}"
    return SettingsError(
        f"{what}: there is no such directory here, it is not (completely) in {constants.HF_HUB_CACHE}, and "
        f"cannot be fetched ({why}); run this where the hub can be reached, or `hf download {name}{option}` "
        "there and copy the cache, or give a directory"
    )


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
