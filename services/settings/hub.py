"""Pins every model and data set of the hub to one commit, from the first start of a run on.

RUN_DIR/hub.json records the commit of each branch or tag at the first start. RUN_DIR/settings.json names the
commits, so that all services on all hosts read the same bytes.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from protocol.device.checkpoint_shapes import tensor_shapes
from protocol.errors import SettingsError, error_text
from protocol.host.atomic_file import write_atomically
from protocol.host.hub import Kind, fetch, is_commit, is_hub_name, resolve_commit
from reward.classifiers.base import check_classifier
from rollout.prompts.base import source_settings
from rollout.prompts.named_source import SourceConfig
from services.settings.sections import Settings
from trainer.backends.plain_copy import write_plain
from trainer.roles.config import FROZEN_ROLES, REWARD_MODEL
from trainer.storage.checksums import MEMBER, sealed

log = logging.getLogger(__name__)

SourceConfigT = TypeVar("SourceConfigT", bound=SourceConfig)

FILE = "hub.json"
"""File in the run directory: "KIND OWNER/NAME REVISION" -> commit."""
RECORD_NAME = "commits the run uses"
SCORE_HEAD_TENSOR = "score.weight"
ROLES = (*FROZEN_ROLES, "critic")
"""Sections of models other than the policy."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A hub repository in the settings, with its branch, tag or commit."""

    kind: Kind
    path: str
    revision: str

    @property
    def key(self) -> str:
        return f"{self.kind} {self.path} {self.revision or 'main'}"


def pin_names(settings: Settings) -> Settings:
    """Return the settings with each hub repository pinned to a commit: the recorded or the current one.

    Writes no file.

    Raises:
        SettingsError: a name cannot be resolved.
    """
    commits = dict(read_record(settings.run_dir / FILE, RECORD_NAME))

    def commit(name: HubName | None) -> str:
        if name is None or is_commit(name.revision):
            return name.revision if name else ""
        if name.key not in commits:
            commits[name.key] = resolve_commit(name.kind, name.path, name.revision)
            log.info("hub.commit %s=%s commit=%s", name.kind, name.path, commits[name.key])
        return commits[name.key]

    model, prompts, *others = map(commit, hub_names(settings))
    mixture, sets = settings.prompts.mixture, settings.eval.sets
    roles = {
        role: replace(getattr(settings, role), revision=commit or getattr(settings, role).revision)
        for role, commit in zip(ROLES, others[-len(ROLES) :], strict=True)
    }
    mixture_commits, set_commits = others[: len(mixture)], others[len(mixture) : -len(ROLES)]
    return replace(
        settings,
        model=replace(settings.model, revision=model or settings.model.revision),
        prompts=replace(
            settings.prompts,
            revision=prompts or settings.prompts.revision,
            mixture=tuple(map(_pinned, mixture, mixture_commits)),
        ),
        eval=replace(settings.eval, sets=tuple(map(_pinned, sets, set_commits))),
        **roles,
    )


def record_pins(original: Settings, pinned: Settings) -> None:
    """Record in the run directory the commits of the branches and tags in the original settings.

    Args:
        original: settings as the user gave them.
        pinned: result of `pin_names` for these settings.
    """
    path = original.run_dir / FILE
    recorded = read_record(path, RECORD_NAME)
    commits = {
        name.key: pinned_name.revision
        for name, pinned_name in zip(hub_names(original), hub_names(pinned), strict=True)
        if name is not None and pinned_name is not None and not is_commit(name.revision)
    }
    if not commits.items() <= recorded.items():
        write_atomically(path, sealed(json.dumps({**recorded, **commits}, indent=2).encode()))


def fetch_model(settings: Settings) -> Path:
    """Return the directory of the initial model; a hub model is downloaded unless this host has it.

    Raises:
        SettingsError: the model cannot be downloaded, or there is no model.
    """
    directory = _fetch_plain(settings, "model") if settings.model.path else settings.model_dir
    if not (directory / "config.json").is_file():
        raise SettingsError(
            f"no model in {directory}: set model.path to a Hugging Face directory or a name on the hub, or "
            "fill in [model.scratch], of which `tether up` or `python -m services.prepare` makes one"
        )
    return directory


def fetch_frozen(settings: Settings) -> dict[str, Path]:
    """Return the directories of the models that are not trained, by section; downloads as `fetch_model`.

    Raises:
        SettingsError: a model cannot be downloaded, or its directory has no model.
    """
    return {role: fetch_role(settings, role) for role in FROZEN_ROLES if getattr(settings, role).path}


def fetch_critic(settings: Settings) -> Path:
    """Return the directory of the critic's initial model; downloads as `fetch_model`.

    Raises:
        SettingsError: the model cannot be downloaded, or its directory has no model.
    """
    return fetch_role(settings, "critic") if settings.critic.path else fetch_model(settings)


def fetch_role(settings: Settings, role: str) -> Path:
    """Return the model directory of a section other than `[model]`; downloads as `fetch_model`.

    Raises:
        SettingsError: the model cannot be downloaded, or its directory has no model.
    """
    directory = _fetch_plain(settings, role)
    if not (directory / "config.json").is_file():
        raise SettingsError(
            f"setting {role}.path: no config.json in {directory}; give a Hugging Face model directory, or "
            "the name of a model on the hub, such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    if role == REWARD_MODEL:
        _check_reward_model(directory)
    return directory


def _check_reward_model(directory: Path) -> None:
    """Check that a directory contains a classifier whose head has the name that trainers expect.

    Raises:
        SettingsError: there is no classifier, or its head has another name.
    """
    prefix = f"setting {REWARD_MODEL}.path:"
    check_classifier(directory, prefix)
    if SCORE_HEAD_TENSOR not in (shapes := tensor_shapes(directory)):
        raise SettingsError(
            f"{prefix} no tensor of the {len(shapes)} in {directory} is {SCORE_HEAD_TENSOR}, the head of a "
            "classifier that is made of a causal language model; score with another by the verifier "
            "reward_model"
        )


def _fetch_plain(settings: Settings, section: str) -> Path:
    """Download the model of a section, and dequantise a quantised one; return the directory to read."""
    config, source = getattr(settings, section), settings.source_dir(section)
    if is_hub_name(config.path):
        fetch(Kind.MODEL, config.path, config.revision)
        if not any(source.glob("*.safetensors")):
            raise SettingsError(f"setting {section}.path: {config.path} on the hub has no safetensors")
    directory = settings.model_dir if section == "model" else settings.role_dir(section)
    if directory != source:
        try:
            write_plain(source, directory)
        except (SettingsError, OSError) as error:
            raise SettingsError(f"setting {section}.path: {error}") from error
    return directory


def hub_names(settings: Settings) -> list[HubName | None]:
    """Return the hub repositories of model, prompts, mixture entries, eval sets and roles, in this order.

    Local paths are None.
    """
    model = settings.model
    sources = [
        settings.prompts,
        *(source_settings(settings.prompts, entry) for entry in settings.prompts.mixture),
        *(source_settings(settings.prompts, entry) for entry in settings.eval.sets),
    ]
    return [
        HubName(Kind.MODEL, model.path, model.revision) if is_hub_name(model.path) else None,
        *(
            HubName(Kind.DATASET, source.path, source.revision)
            if source.source == "hf" and not source.mixture and is_hub_name(source.path)
            else None
            for source in sources
        ),
        *(
            HubName(Kind.MODEL, config.path, config.revision) if is_hub_name(config.path) else None
            for config in (getattr(settings, role) for role in ROLES)
        ),
    ]


def _pinned(entry: SourceConfigT, commit: str) -> SourceConfigT:
    return replace(entry, revision=commit or entry.revision)


def read_record(path: Path, record_name: str) -> Mapping[str, str]:
    """Return the record of the first start from a file in the run directory; empty if there is no file.

    Args:
        path: path of the file, a JSON object of strings.
        record_name: name of the record, for the error.

    Raises:
        SettingsError: the file cannot be read.
    """
    try:
        commits = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        reason = error_text(error)
        raise SettingsError(
            f"{path}: {reason}; it records the {record_name}: restore it, or delete it to use the current "
            "ones"
        ) from None
    return {name: value for name, value in commits.items() if name != MEMBER}
