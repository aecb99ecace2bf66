"""Defines the interface of environments, which turn one prompt into one sample by one or more generations."""

from abc import ABC, abstractmethod

from rollout.config import EnvironmentConfig
from rollout.engines.base import EngineConfig
from rollout.prompts.base import Prompt
from rollout.render import Renderer
from rollout.sample import Generate, Sample


class Environment(ABC):
    """Produces samples. One instance serves all samples of a process concurrently: state belongs in `run`."""

    files_per_sample: int = 0
    """File descriptors that a sample has open in the worker while it runs, most of them connections."""
    has_calls = False
    """Whether calls of the model are recorded before they are answered."""

    @abstractmethod
    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        """Produce one sample.

        Cancelling the call cancels the generation in progress and releases all resources.

        Args:
            prompt: the prompt.
            prompt_tokens: its tokens.
            generate: continues tokens.
            renderer: tokenizes and detokenizes text.

        Raises:
            SettingsError: the prompt lacks metadata that the environment needs; the group fails.
            EngineError: `generate` raised it; the group fails.
            Exception: any other error fails this attempt alone, and so does a time limit of
                `[environment]`.
        """

    def configured(self, config: EnvironmentConfig) -> None:  # noqa: B027  most need only their options
        """Learn the section that named it, before anything else."""

    def answered_by(self, engine: EngineConfig) -> None:  # noqa: B027  most need not know
        """Learn which engine answers, before the first sample."""

    def check(self, model_dir: str) -> None:  # noqa: B027  most have nothing to check
        """Check what depends on the model, which may take seconds; an empty directory: none is there yet.

        Raises:
            SettingsError: an option does not fit.
        """

    async def open(self) -> None:  # noqa: B027  most need no resources
        """Take resources that may be missing, such as a port, before the first sample. Idempotent.

        Raises:
            SettingsError: one is.
        """

    async def close(self) -> None:  # noqa: B027  most environments have nothing to close
        """Release the environment's own resources. Idempotent."""
