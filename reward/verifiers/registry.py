"""Creates verifiers by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.choices import Entry, Registry, load
from protocol.errors import RewardError, SettingsError
from protocol.user_code import located, mutable_copy, returned_number
from protocol.validation import validated
from reward.group import ResponseGroup, Verdict
from reward.verifiers.base import AwaitedVerifier, LoadedVerifier


@dataclass(frozen=True, slots=True)
class VerifierEntry(Entry):
    """Module of a verifier with a dataclass `Options`.

    Only the worker processes that run the verifier import it.
    """

    factory: str = ""
    """Function of the module that creates the verifier from its options; empty: the module defines
    `score`."""


VERIFIERS = Registry(
    {
        "constant": VerifierEntry("reward.verifiers.constant"),
        "exact_match": VerifierEntry("reward.verifiers.exact_match"),
        "function": VerifierEntry("reward.verifiers.function", "load_function"),
        "json_schema": VerifierEntry("reward.verifiers.json_schema"),
        "judge": VerifierEntry("reward.judge.verifier", "Judge"),
        "last_integer": VerifierEntry("reward.verifiers.last_integer"),
        "math": VerifierEntry("reward.verifiers.math"),
        "positions": VerifierEntry("reward.verifiers.positions"),
        "python_tests": VerifierEntry("reward.verifiers.python_tests"),
        "reasoning_gym": VerifierEntry("reward.verifiers.reasoning_gym"),
        "reward_model": VerifierEntry("reward.verifiers.reward_model", "RewardModel"),
    }
)

Score = Callable[[str, str, Mapping[str, Any]], float]
"""(prompt_text, response, metadata) -> score."""


class EachResponse(LoadedVerifier):
    """Verifier that scores one response at a time."""

    def __init__(self, function: Score, file: str = "") -> None:
        self._function, self.file = function, file

    def score(self, group: ResponseGroup, samples: Sequence[int]) -> Sequence[Verdict]:
        """Return the scores of `samples`."""
        return [self._function(group.prompt, group.responses[i], group.metadata) for i in samples]


def find_verifier(name: str) -> VerifierEntry:
    """Return the entry of a verifier. A name with a dot is a user's module.

    Raises:
        SettingsError: the name is unknown (the message suggests the nearest name), or is MODULE:NAME.
    """
    if ":" in name:
        raise SettingsError(
            f"setting reward.verifiers: verifier {name!r} is not a module; for a function use "
            f'name = "function" with options = {{ path = "{name}" }}'
        )
    if "." in name:
        return VerifierEntry(name)
    return VERIFIERS.find(name, "setting reward.verifiers: verifier")


def make_verifier(name: str, options: Mapping[str, Any]) -> LoadedVerifier | AwaitedVerifier:
    """Create a verifier with its options.

    Args:
        name: name of a built-in verifier, or a user's module.
        options: options from the settings.

    Raises:
        SettingsError: the name or an option is unknown (the message suggests the nearest), or the import of
            the module or function fails.
    """
    entry = find_verifier(name)
    try:
        module = load(entry.path)
    except ImportError as error:
        raise SettingsError(f"verifier {name} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:  # a user's module may raise anything, or be a script
        raise SettingsError(f"verifier {name} cannot be imported: {located(error)}") from None
    for part in ("Options", entry.factory or "score"):
        if not hasattr(module, part):
            raise SettingsError(f"verifier {name}: {module.__file__} has no {part!r}; see docs/rewards.md")
    bound = validated(module.Options, options, f"verifier {name}: option ")
    if entry.factory:
        verifier: LoadedVerifier | AwaitedVerifier = getattr(module, entry.factory)(bound)
        return verifier

    is_own = "." in name

    def score(prompt_text: str, response: str, metadata: Mapping[str, Any]) -> float:
        if not is_own:
            return float(module.score(prompt_text, response, metadata, bound))
        returned = module.score(prompt_text, response, mutable_copy(metadata), bound)
        try:
            return returned_number(returned)
        except ValueError as shown:
            raise RewardError(
                f"score() returned {shown} ({module.__file__}); a score is a finite float, int or bool"
            ) from None

    return EachResponse(score, str(module.__file__) if is_own else "")


def required(metadata: Mapping[str, Any], field: str) -> Any:
    """Return a required metadata field.

    Raises:
        RewardError: the field is missing. The message names the existing fields.
    """
    if metadata.get(field) is None:
        fields = sorted(str(name) for name, value in metadata.items() if value is not None)
        raise RewardError(f"the metadata has no field {field!r}, but {', '.join(fields) or 'none'}")
    return metadata[field]


def required_text(metadata: Mapping[str, Any], field: str) -> str:
    """Return a required metadata field as text.

    Raises:
        RewardError: the field is missing, or neither text nor a number.
    """
    value = required(metadata, field)
    if not isinstance(value, str | int | float):
        raise RewardError(
            f"the field {field!r} is {type(value).__name__}, not text or a number: {str(value)[:80]}"
        )
    return str(value)
