"""Defines `tether import-config`, which converts settings of TRL, verl or slime to a settings file."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from protocol.errors import SettingsError, error_text
from services.migration.maps import CONVERSIONS, OMITTED, resolve_evaluation, resolve_kl
from services.migration.sources import detect_source, nearest, read
from services.settings.sources import to_toml

SYNCHRONOUS = {"bound.max_staleness": 0}
"""Default of the other trainers, which alternate generation and training."""
ALWAYS_OMITTED = (
    "the reward: [reward] verifiers (docs/own_code.md)",
    "settings that the file does not name: tether's own defaults hold, not those of {source}",
)


def import_config(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="TRL's YAML; verl's YAML or overrides; slime's arguments")
    ],
) -> None:
    """Print the settings of TRL, verl or slime as a settings file, with a list of omitted settings."""
    print(convert(file), end="")


def convert(file: Path) -> str:
    """Convert a file of TRL, verl or slime to the text of a settings file.

    Raises:
        SettingsError: the file cannot be read, has unknown names, or a value without a counterpart. The
            message has the file and lists all unknown names.
    """
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error_text(error)
        raise SettingsError(f"{file} cannot be read: {reason}") from None
    try:
        return _convert_text(text, file.name if file.name.isprintable() else ascii(file.name))
    except SettingsError as error:
        raise SettingsError(f"{file}: {error}") from None
    except RecursionError:  # of YAML, by an alias within its own anchor
        raise SettingsError(f"{file}: a value contains itself") from None


def _convert_text(text: str, title: str) -> str:
    """Convert the text of a file called `title` to the text of a settings file. Raises SettingsError."""
    source = detect_source(text)
    source_settings = read(text, source)
    if hostile := [name for name in source_settings if not name.isprintable()]:
        raise SettingsError(f"the name {hostile[0]!a} has characters that cannot be printed")
    conversions, omitted = CONVERSIONS[source], OMITTED[source]
    reasons = {name: _reason(name, omitted) for name in source_settings if name not in conversions}
    if unknown := [name for name, reason in reasons.items() if reason is None]:
        listed = "; ".join(f"{name}{nearest(name, conversions)}" for name in unknown)
        raise SettingsError(f"not known of {source}: {listed}; take these out of the file")
    settings, notes = _convert_settings(source, source_settings)
    notes += [f"{name}: {reason}" for name, reason in reasons.items()]
    notes += [note.format(source=source) for note in ALWAYS_OMITTED]
    return _render(f"From {title} of {source}.", _resolve_dependent(settings), notes)


def _convert_settings(source: str, source_settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of names with a counterpart, and notes on names without a value."""
    settings, notes = dict[str, Any](SYNCHRONOUS), []
    for name in CONVERSIONS[source]:  # in the order of the table: later names override earlier ones
        if name not in source_settings:
            continue
        found = {} if source_settings[name] is None else _convert_value(source, name, source_settings[name])
        if not found:
            state = "null" if source_settings[name] is None else "off"
            notes.append(f"{name}: {state} there; tether's default holds")
        settings |= found
    for resolve in (resolve_kl, resolve_evaluation):
        settings, more = resolve(settings)
        notes += more
    return settings, notes


def _convert_value(source: str, name: str, value: Any) -> dict[str, Any]:
    if "$" in str(value):
        raise SettingsError(f"{name} is {value}: write the variable's value instead")
    try:
        return CONVERSIONS[source][name](value)
    except (ValueError, TypeError, OverflowError) as error:
        raise SettingsError(f"{name} = {value!r}: {error}") from None


def _reason(name: str, omitted: Mapping[str, str]) -> str | None:
    return next((reason for pattern, reason in omitted.items() if fnmatchcase(name, pattern)), None)


def _resolve_dependent(settings: dict[str, Any]) -> dict[str, Any]:
    """Resolve settings that depend on each other."""
    found = dict(settings)
    samples = found.pop("generation_batch_size", None)
    if samples is not None:
        found["bound.groups_per_step"] = _divide(
            "generation_batch_size", samples, "num_generations", found.get("sampling.samples_per_prompt", 8)
        )
    mini_batch = found.pop("ppo_mini_batch_size", None)
    if mini_batch is not None and "bound.groups_per_step" in found:
        found["trainer.num_mini_batches"] = _divide(
            "train_batch_size", found["bound.groups_per_step"], "ppo_mini_batch_size", mini_batch
        )
    if found.get("algorithm.name") == "dr_grpo" and "sampling.max_tokens" in found:
        found["algorithm.length_normalizer"] = found["sampling.max_tokens"]  # a constant there
    if "lora.rank" not in found:  # verl has a value for alpha without adapters
        found.pop("lora.alpha", None)
    lengths = (found.get("render.max_prompt_tokens"), found.get("sampling.max_tokens"))
    if all(lengths) and "engine.max_model_len" not in found:
        found["engine.max_model_len"] = sum(length or 0 for length in lengths)
    if "prompts.path" in found:
        path = str(found["prompts.path"])
        found["prompts.source"] = "jsonl" if path.endswith(".jsonl") else "hf"
    return found


def _divide(name: str, value: int, divisor_name: str, divisor: int) -> int:
    if divisor <= 0 or value % divisor:
        raise SettingsError(f"{name} = {value} is not a multiple of {divisor_name} = {divisor}")
    return value // divisor


def _render(title: str, settings: Mapping[str, Any], notes: list[str]) -> str:
    lines = [f"# {title}", "# Not carried over:", *(f"#   {note}" for note in notes)]
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    for section, values in sections.items():
        lines += ["", f"[{section}]", *(f"{key} = {to_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"
