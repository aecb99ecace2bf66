"""Makes verifiers by name."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.choices import checked_name, checked_options
from protocol.errors import RewardError, SettingsError
from reward.group import ResponseGroup, Verdict
from reward.verifiers.awaited import AwaitedVerifier
from reward.verifiers.location import locate

VERIFIERS = (
    "constant",
    "exact_match",
    "function",
    "json_schema",
    "judge",
    "last_integer",
    "math",
    "positions",
    "python_tests",
    "reasoning_gym",
    "reward_model",
)
"""Modules in `reward/verifiers/`, and `judge`; only the worker processes that run one import it."""
ELSEWHERE = {"judge": "reward.judge.verifier"}
"""Verifier -> its module, where that is in another package."""
FACTORIES = {"function": "load_function", "judge": "load_judge", "reward_model": "RewardModel"}
"""Verifier -> the function of its module that makes it of its options; the others have a function `score`."""

Score = Callable[[str, str, Mapping[str, Any]], float]
"""(prompt_text, response, metadata) -> score."""


class LoadedVerifier(Protocol):
    """Scores the responses of a group."""

    @property
    def at_once(self) -> bool:
        """Whether one call takes all samples of a group, instead of one sample."""

    @property
    def by_turn(self) -> bool:
        """Whether it scores each turn of a sample."""

    @property
    def file(self) -> str:
        """File of the user that it comes from; empty for a verifier of tether."""

    @property
    def maps_device_memory(self) -> bool:
        """Whether its library maps more address space than any limit allows."""

    def load(self) -> None:
        """Load what scoring needs; a worker process does so once, before its first score.

        Raises:
            SettingsError: it cannot be loaded.
        """

    def score(self, group: ResponseGroup, samples: Sequence[int]) -> Sequence[Verdict]:
        """Return the scores of these samples. May raise anything."""


@dataclass(frozen=True, slots=True)
class EachResponse:
    """Verifier that scores one response at a time."""

    function: Score
    file: str = ""
    at_once: bool = False
    by_turn: bool = False
    maps_device_memory: bool = False

    def load(self) -> None:
        """Return at once: its module is imported."""

    def score(self, group: ResponseGroup, samples: Sequence[int]) -> Sequence[Verdict]:
        """Return the scores of these samples."""
        return [self.function(group.prompt, group.responses[i], group.metadata) for i in samples]


def checked_verifier(name: str) -> str:
    """Return the module of a verifier; a name with a dot is a module of the user.

    Raises:
        SettingsError: the name has no dot and is unknown; suggests the nearest one.
    """
    if "." in name:
        return name
    known = checked_name(name, VERIFIERS, "setting reward.verifiers: verifier")
    return ELSEWHERE.get(known, f"reward.verifiers.{known}")


def make_verifier(name: str, options: Mapping[str, Any]) -> LoadedVerifier | AwaitedVerifier:
    """Return a verifier with its options.

    Args:
        name: of a verifier of tether, or a module of the user.
        options: as in the settings.

    Raises:
        SettingsError: the name or an option is unknown (suggests the nearest one), or the module or function
            cannot be imported.
    """
    path = checked_verifier(name)
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise SettingsError(f"verifier {name} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:  # a module of the user may raise anything, or be a script
        text = f"{locate(error)}: {type(error).__name__}: {error}"
        raise SettingsError(f"verifier {name} cannot be imported: {text}") from None
    for part in ("Options", FACTORIES.get(name, "score")):
        if not hasattr(module, part):
            raise SettingsError(f"verifier {name}: {module.__file__} has no {part!r}; see docs/rewards.md")
    bound = checked_options(module.Options, options, f"verifier {name}")
    if name in FACTORIES:
        made: LoadedVerifier | AwaitedVerifier = getattr(module, FACTORIES[name])(bound)
        return made

    def score(prompt_text: str, response: str, metadata: Mapping[str, Any]) -> float:
        return float(module.score(prompt_text, response, metadata, bound))

    return EachResponse(score, str(module.__file__) if "." in name else "")


def required(metadata: Mapping[str, Any], field: str) -> Any:
    """Return a field of the metadata that a verifier needs.

    Raises:
        RewardError: it is missing; names the fields that exist.
    """
    if metadata.get(field) is None:
        raise RewardError(
            f"the metadata has no field {field!r}, but {', '.join(sorted(map(str, metadata))) or 'none'}"
        )
    return metadata[field]
