"""Returns completions from the data as samples, for supervised fine-tuning."""

from dataclasses import dataclass

from protocol.errors import SettingsError
from rollout.environments.base import Environment
from rollout.prompts.base import Prompt
from rollout.render import Renderer
from rollout.sample import Generate, Sample


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `given`."""

    field: str = "answer"
    """Metadata field with the completion text."""
    prefix: str = ""
    """Text prepended to each completion, such as " " if words begin with a space."""
    append_eos: bool = True
    """Append the end-of-sequence token to each completion."""
    max_tokens: int = 0
    """Maximum tokens of a completion; longer ones are truncated. 0: no limit."""


class Given(Environment):
    """Environment whose samples are completions from the data.

    The engine samples one token only to learn its weight version, which the sample gets. The
    log-probabilities are 0 and have no meaning, because the tokens were not sampled.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        options = self._options
        text = prompt.metadata.get(options.field)
        if not isinstance(text, str):
            has = ", ".join(sorted(map(str, prompt.metadata))) or "none"
            raise SettingsError(
                f"prompt {prompt.index}: environment given needs text in the field {options.field!r} of the "
                f"metadata, which has {has}: set prompts.answer_field, or its option field"
            )
        tokens = renderer.completion_tokens(options.prefix + text, append_eos=options.append_eos)
        answer_tokens = tokens[: options.max_tokens or len(tokens)]
        if not answer_tokens:
            raise SettingsError(f"prompt {prompt.index}: its completion has no tokens")
        version = (await generate(prompt_tokens, 1)).spans[-1][1]
        return Sample(
            tokens=answer_tokens,
            logprobs=(0.0,) * len(answer_tokens),
            loss_mask=(1,) * len(answer_tokens),
            spans=((len(answer_tokens), version),),
            finish_reason="stop" if len(answer_tokens) == len(tokens) else "length",
        )


make = Given
