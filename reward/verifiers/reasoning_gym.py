"""The score that a reasoning-gym family gives; wrong answers may get a part."""

import re
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
    """Take the answer from the last <tag>...</tag>; a response without it scores 0. Empty: the whole
    response."""
    strip: bool = True
    strict: bool = False
    """Fail on responses that the family's scorer cannot read, instead of scoring them 0."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Score with the family's own scorer. Some raise on garbage: that is a wrong answer if they can read the
    right one.

    Raises:
        RewardError: if the metadata is not that of the prompt source `reasoning_gym`, or the scorer does
            not work on this prompt.
    """
    family, params = str(required(metadata, "family")), metadata.get("params") or {}
    # a family may have no answer of its own, only a rule
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
    except Exception as error:  # whatever a family's scorer does
        problem = f"{family}: {type(error).__name__}: {error}"
        try:
            scorer.score_answer(entry["answer"], entry)
        except Exception:
            raise RewardError(f"the scorer fails on the right answer too: {problem}") from error
        if options.strict:
            raise RewardError(problem) from error
        return 0.0


def untagged(value: Any) -> Any:
    """The inverse of the prompt source's encoding: `{"__tuple__": [...]}` is a tuple."""
    if isinstance(value, Mapping):
        if value.keys() == {"__tuple__"}:
            return tuple(untagged(item) for item in value["__tuple__"])
        return {key: untagged(item) for key, item in value.items()}
    return [untagged(item) for item in value] if isinstance(value, list) else value


def _extract(response: str, options: Options) -> str | None:
    if options.tag:
        tag = re.escape(options.tag)
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", response, re.DOTALL)
        if not found:
            return None
        response = found[-1]
    return response.strip() if options.strip else response


@lru_cache(maxsize=256)
def _scorer(family: str, params: bytes) -> Any:
    try:
        return reasoning_gym.create_dataset(family, size=1, seed=0, **msgspec.json.decode(params))
    except Exception as error:
        raise RewardError(f"family {family}: {type(error).__name__}: {error}") from error
