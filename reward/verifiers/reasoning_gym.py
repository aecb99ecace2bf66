"""Scores with the scorer of a reasoning-gym family, which may give partial credit."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import reasoning_gym

from protocol.errors import RewardError
from reward.verifiers.registry import required


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `reasoning_gym`."""

    tag: str = ""
    """Tag around the answer: the last <tag>...</tag> counts, and a response without the tag scores 0. Empty:
    the whole response is the answer."""
    strip: bool = True
    """Ignore white space around the answer."""
    strict: bool = False
    """Raise on responses that the family's scorer cannot parse, instead of scoring 0."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Return the score of the family's own scorer.

    Some scorers raise on malformed answers. Such answers score 0 if the scorer accepts the right answer.

    Raises:
        RewardError: the metadata is not from the prompt source `reasoning_gym`, or the scorer fails on this
            prompt.
    """
    family, params = str(required(metadata, "family")), metadata.get("params") or {}
    # Some families have only a rule, without an answer.
    entry = {
        "question": prompt_text,
        "answer": untagged(metadata.get("answer")),
        "metadata": untagged(required(metadata, "entry")),
    }
    scorer = _scorer(family, msgspec.json.encode(params, order="sorted"))
    answer = _extract(response, options)
    if answer is None:
        return 0.0
    try:
        return float(scorer.score_answer(answer, entry))
    except Exception as error:  # a family's scorer may raise anything
        problem = f"{family}: {type(error).__name__}: {error}"
        try:
            scorer.score_answer(entry["answer"], entry)
        except Exception:
            raise RewardError(f"the scorer fails on the right answer too: {problem}") from error
        if options.strict:
            raise RewardError(problem) from error
        return 0.0


def untagged(value: Any) -> Any:
    """Undo the prompt source's encoding of tuples as `{"__tuple__": [...]}`."""
    if isinstance(value, Mapping):
        if value.keys() == {"__tuple__"}:
            return tuple(untagged(item) for item in value["__tuple__"])
        return {key: untagged(item) for key, item in value.items()}
    return [untagged(item) for item in value] if isinstance(value, list) else value


def _extract(response: str, options: Options) -> str | None:
    if options.tag:
        inside = _last_inside(response, f"<{options.tag}>", f"</{options.tag}>")
        if inside is None:
            return None
        response = inside
    return response.strip() if options.strip else response


def _last_inside(text: str, opening: str, closing: str) -> str | None:
    """Return the text between the last pair of tags. A regular expression would need quadratic time."""
    inside, place = None, 0
    while (start := text.find(opening, place)) >= 0:
        end = text.find(closing, start)
        if end < 0:
            break
        inside, place = text[start + len(opening) : end], end + len(closing)
    return inside


@lru_cache(maxsize=256)
def _scorer(family: str, params: bytes) -> Any:
    try:
        return reasoning_gym.create_dataset(family, size=1, seed=0, **msgspec.json.decode(params))
    except Exception as error:
        raise RewardError(f"family {family}: {type(error).__name__}: {error}") from error
