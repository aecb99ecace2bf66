"""Answers each prompt with a completion that comes with the data, for supervised fine-tuning."""

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
    """Field of the metadata with the completion, as text."""
    prefix: str = ""
    """Text before each completion, such as " " where words begin with a space."""
    append_eos: bool = True
    """End each completion with the end-of-sequence token."""
    max_tokens: int = 0
    """Tokens of a completion, at most: a longer one is cut. 0: no limit."""


class Given(Environment):
    """Has the completion's tokens in the place of sampled ones.

    The engine samples one token, which only says which version it serves: that is the version of the sample.
    Nobody sampled the tokens, so their log-probabilities are 0, and mean nothing.
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
        kept = tokens[: options.max_tokens or len(tokens)]
        if not kept:
            raise SettingsError(f"prompt {prompt.index}: its completion has no tokens")
        version = (await generate(prompt_tokens, 1)).spans[-1][1]
        return Sample(
            tokens=kept,
            logprobs=(0.0,) * len(kept),
            loss_mask=(1,) * len(kept),
            spans=((len(kept), version),),
            finish_reason="stop" if len(kept) == len(tokens) else "length",
        )


make = Given
