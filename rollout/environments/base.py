"""Defines the interface of environments, which turn one prompt into one sample."""

from abc import ABC, abstractmethod

from rollout.config import EnvironmentConfig
from rollout.engines.base import EngineConfig
from rollout.prompts.base import Prompt
from rollout.render import Renderer
from rollout.sample import Generate, Sample


class Environment(ABC):
    """Producer of samples.

    One instance serves all samples of a process concurrently; per-sample state belongs in `run`.
    """

    files_per_sample: int = 0
    """File descriptors per running sample in the worker, mostly connections."""
    has_calls = False
    """Whether model calls are recorded before they are answered."""

    @abstractmethod
    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        """Produce one sample.

        Cancelling the call cancels the generation in progress and releases all resources.

        Args:
            prompt_tokens: token ids of the prompt.
            generate: generates a continuation of tokens.
            renderer: tokenizes and detokenizes text.

        Raises:
            SettingsError: the prompt lacks required metadata; the group fails.
            EngineError: `generate` failed; the group fails.
            Exception: any other error, such as a time limit of `[environment]`, fails only this attempt.
        """

    def apply_config(self, config: EnvironmentConfig) -> None:  # noqa: B027  most need only their options
        """Store the `[environment]` section. Called before all other methods."""

    def apply_engine_config(self, engine: EngineConfig) -> None:  # noqa: B027  most ignore the engine
        """Store the settings of the engine that answers model calls. Called before the first sample."""

    def check(self, model_dir: str) -> None:  # noqa: B027  most do not depend on it
        """Check model-dependent options; may take seconds.

        Args:
            model_dir: model directory; empty if the model is not available yet.

        Raises:
            SettingsError: an option does not fit the model.
        """

    async def open(self) -> None:  # noqa: B027  most environments need no resources
        """Acquire resources, such as a port, before the first sample. Idempotent.

        Raises:
            SettingsError: a resource is unavailable.
        """

    async def close(self) -> None:  # noqa: B027  most environments have no resources to release
        """Release the environment's resources. Idempotent."""
