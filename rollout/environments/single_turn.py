"""Generates one answer per prompt; verifiers compute the reward."""

from dataclasses import dataclass

from rollout.environments.base import Environment
from rollout.prompts.base import Prompt
from rollout.render import Renderer
from rollout.sample import Generate, Sample, SampleBuilder


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `single_turn`: none."""


class SingleTurn(Environment):
    """Environment with one generation per sample."""

    def __init__(self, options: Options) -> None:
        del options

    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        completion = await generate(prompt_tokens, None)
        sample = SampleBuilder()
        sample.sampled(completion)
        return sample.finish(completion.finish_reason)


make = SingleTurn
