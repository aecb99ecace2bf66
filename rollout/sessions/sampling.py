"""Decides whether sampling parameters of a request are refused, ignored or applied.

Parameters that equal the run's values, or have no effect, are always accepted. `environment.sampling` selects
the handling of other parameters. A call generated with its own parameters becomes context. Its distribution
differs from the trainer's, so none of its tokens may be trained.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollout.config import MIN_TEMPERATURE, SamplingMode
from rollout.engines.base import Sampling
from rollout.seeds import seed_within
from rollout.sessions.refusal import RequestRefused, invalid

UNCHANGED: Mapping[str, tuple[Any, ...]] = {
    "temperature": (), "top_p": (), "top_k": (0, -1), "seed": (), "stop": ([], ""), "n": (1,), "min_p": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "best_of": (1,), "response_format": ({"type": "text"},),
}  # fmt: skip
"""Sampling parameter -> values, besides null, that have no effect in any run."""
MAX_ANSWERS = 128
"""Maximum answers to one request (`n`)."""
MAX_STOPS, MAX_STOP = 16, 256
"""Maximum stop strings of a request, and maximum characters of each."""
REFUSED = (
    "would change the distribution that is trained on, which [sampling] decides; remove the parameter, give "
    "the run's value, or set environment.sampling to \"run\" (the run's value applies)"
)
OR_CONTEXT = ' or "context" (the answer is generated as asked, and not trained)'
"""Suffix of `REFUSED` for parameters that engines can apply."""
NO_SEEDS = "cannot be applied: this engine has no seeds of single requests; remove the parameter"


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """Sampling parameters of one request that differ from the run's. None: use the run's value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Stop strings in addition to the run's. An answer ends at the token that completes one."""
    n: int = 1
    """Number of answers; each becomes its own call."""

    def applied(self, own: Sampling) -> Sampling:
        """Return the run's parameters, overridden by the request's."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "seed")}
        return replace(own, **{name: value for name, value in given.items() if value is not None})

    def answers(self) -> list["RequestSampling"]:
        """Return the parameters of the `n` answers, each with its own seed if the request has a seed."""
        return [self, *(replace(self, seed=seed_within(self.seed, i)) for i in range(1, self.n))]

    def as_json(self) -> str:
        """Return the differing parameters as JSON, for the journal."""
        default = RequestSampling()
        given = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({name: value for name, value in given.items() if value != getattr(default, name)})


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """Sampling parameters of a run, and the handling of requests with other parameters."""

    mode: SamplingMode = "refuse"
    own: Sampling = Sampling(max_tokens=1)  # noqa: RUF009  it is frozen
    """Sampling parameters of the run."""
    stop: tuple[str, ...] = ()
    """Stop strings of the run."""
    seeds: bool = False
    """Whether the engine supports per-request seeds."""

    def read(self, body: Mapping[str, Any]) -> tuple[RequestSampling | None, tuple[str, ...]]:
        """Return (parameters to apply, names of ignored parameters) of a request.

        Args:
            body: parsed request; only sampling parameters are read.

        Raises:
            RequestRefused: a parameter is refused; the message names it.
        """
        others = {
            name: body[name]
            for name in UNCHANGED
            if body.get(name) is not None and not self._is_own(name, body[name])
        }
        if not others:
            return None, ()
        name = next(iter(others))
        if self.mode == "run":
            return None, tuple(sorted(others))
        if self.mode == "refuse":
            is_applied = name in APPLIED and (name != "seed" or self.seeds)
            raise _refused(name, others[name], REFUSED + OR_CONTEXT * is_applied, "unsupported_parameter")
        return self._validated_sampling(others), ()

    def _is_own(self, name: str, value: Any) -> bool:
        """Return whether a value equals the run's or has no effect."""
        if isinstance(value, bool):
            return False
        own: tuple[Any, ...] = ()
        if name in ("temperature", "top_p", "top_k"):
            own = (getattr(self.own, name),)
        elif name == "stop":
            value = sorted(map(str, value)) if isinstance(value, list) else value
            own = (sorted(self.stop), *self.stop[: len(self.stop) == 1])
        off = () if name == "top_k" and self.own.top_k else UNCHANGED[name]
        return any(value == same for same in (*off, *own))

    def _validated_sampling(self, others: Mapping[str, Any]) -> RequestSampling:
        """Validate the parameters and convert them for the engine."""
        values: dict[str, Any] = {}
        for name, value in others.items():
            if name not in APPLIED:
                raise _refused(name, value, NOT_GENERATED)
            if name == "seed" and not self.seeds:
                raise _refused(name, value, NO_SEEDS)
            is_valid, meaning = APPLIED[name]
            if isinstance(value, bool) or not is_valid(value):
                raise _refused(name, value, f"must be {meaning}", "invalid_value")
            values[name] = value
        if "top_k" in values:
            values["top_k"] = max(0, values["top_k"])
        if "stop" in values:
            values["stop"] = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
        return RequestSampling(**values)


def _refused(name: str, value: object, why: str, code: str = "unsupported_value") -> RequestRefused:
    return invalid(f"{name} = {json.dumps(value)[:80]} {why}", name, code)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list)
        and 0 < len(texts) <= MAX_STOPS
        and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP for text in texts)
    )


APPLIED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (
        lambda value: _is_number(value) and (value == 0 or MIN_TEMPERATURE <= value <= 100),
        f"0, which is greedy, or {MIN_TEMPERATURE} to 100",
    ),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "above 0 and at most 1"),
    "top_k": (lambda value: type(value) is int and -1 <= value < 2**31, "a whole number of at least -1"),
    "seed": (lambda value: type(value) is int and 0 <= value < 2**31, "a whole number from 0 to 2^31 - 1"),
    "stop": (_is_stop, f"a text or a list of at most {MAX_STOPS}, of 1 to {MAX_STOP} characters each"),
    "n": (lambda value: type(value) is int and 1 <= value <= MAX_ANSWERS, f"1 to {MAX_ANSWERS}"),
}
"""Parameter that engines can apply -> (validator, description of valid values)."""
NOT_GENERATED = (
    f"cannot be applied: engines generate a request by {', '.join(APPLIED)} alone; remove the parameter"
)
