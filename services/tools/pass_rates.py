"""Writes the pass rates observed by a run to a data file, for a curriculum: `tether pass-rates`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import SettingsError
from protocol.host.atomic_file import check_absent, write_atomically
from rollout.prompts.base import Prompt, PromptConfig, PromptSource
from rollout.prompts.registry import make_source
from rollout.prompts.rows import encoded_prompt
from services.run_record.log_queries import observed_rates, prompt_fingerprint
from services.runtime.prompt_stream import check_fingerprint
from services.runtime.user_modules import add_user_modules
from services.settings.sections import Settings

FIELD = "pass_rate"
QUESTION_FIELDS = ("prompt", "question", "prompt_text", "rendered_prompt")
"""Candidate names of the question field; the first name that is not in any prompt's metadata is used."""
Facts = dict[str, Any]


def write_pass_rates(settings: Settings, path: Path) -> Facts:
    """Write the prompts of a run with their last observed pass rates, one JSON object per line.

    Prompts without an observation have no rate. From mixtures and infinite streams only observed prompts are
    written. Held-out prompts of the run come last.

    Args:
        settings: settings of the run.
        path: file to write; must not exist.

    Returns:
        `path`, `prompts`, `observed`, `mean` (of the observed rates), and `settings`: lines of `[prompts]`
        that read the file.

    Raises:
        SettingsError: no prompt was observed, the prompts are not the run's, the file exists, or it cannot be
            written.
    """
    check_absent(path)
    rates = observed_rates(settings.run_dir)
    if not rates:
        raise SettingsError(f"no group of {settings.run_dir} was scored yet, so no pass rate is known")
    source = _source_of_run(settings)
    prompts_with_rates: dict[bytes, tuple[Prompt, float | None]] = {
        encoded_prompt(prompt): (prompt, None) for prompt in _one_pass(settings.prompts)
    }
    for group, rate in rates.items():
        prompt = source.at(group)
        prompts_with_rates[encoded_prompt(prompt)] = (prompt, rate)
    observed = [rate for _, rate in prompts_with_rates.values() if rate is not None]
    held_out = [] if settings.prompts.held_out_path else list(source.held_out())
    question, rows = _rows([*prompts_with_rates.values(), *((prompt, None) for prompt in held_out)])
    try:
        write_atomically(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    return {
        "path": str(path),
        "prompts": len(prompts_with_rates),
        "observed": len(observed),
        "mean": sum(observed) / len(observed),
        "settings": {
            "source": "jsonl",
            "path": str(path.absolute()),
            "prompt_field": question,
            "answer_field": "answer" if all("answer" in row for row in rows) else "",
            "held_out": len(held_out),
        },
    }


def _source_of_run(settings: Settings) -> PromptSource:
    """Return the run's prompt stream, in which prompt g is group g.

    Raises:
        SettingsError: the prompts differ from those of the run's creation.
    """
    add_user_modules(settings)
    source = make_source(settings.prompts)
    remedy = f"put back the prompts that the run in {settings.run_dir} was started with"
    if recorded := prompt_fingerprint(settings.run_dir):
        check_fingerprint(settings.prompts, source.fingerprint, recorded, remedy)
    return source


def _one_pass(config: PromptConfig) -> Sequence[Prompt]:
    """Return the prompts of one pass; none for a mixture or an infinite stream."""
    if config.mixture:
        return ()
    source: PromptSource = make_source(replace(config, passes=1))
    return [source.at(index) for index in range(source.size or 0)]


def _rows(prompts: Sequence[tuple[Prompt, float | None]]) -> tuple[str, list[Facts]]:
    """Return the name of the question field, and the rows."""
    taken = {name for prompt, _ in prompts for name in prompt.metadata}
    free = [name for name in QUESTION_FIELDS if name not in taken]
    if not free:
        raise SettingsError(
            f"rows have fields with all of the names {', '.join(QUESTION_FIELDS)}; rename one in the data"
        )
    return free[0], [_row(prompt, rate, free[0]) for prompt, rate in prompts]


def _row(prompt: Prompt, rate: float | None, question: str) -> Facts:
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    row: Facts = {question: messages or prompt.text, **prompt.metadata}
    return row if rate is None else {**row, FIELD: rate}


def render_pass_rates(facts: Mapping[str, Any]) -> str:
    """Format what was written, and the settings that read the file."""
    settings = [
        f"{name} = {msgspec.json.encode(value).decode()}" for name, value in facts["settings"].items()
    ]
    return "\n".join(
        (
            f"wrote {facts['path']}: {facts['prompts']} prompts, {facts['observed']} of them with a pass "
            f"rate, {facts['mean']:.3f} on average; a new run reads it by",
            "[prompts]",
            *settings,
        )
    )
