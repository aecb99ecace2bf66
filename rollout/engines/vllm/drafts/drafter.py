"""Prepares drafts inside vLLM's model runner, finds the tensors that make them, and counts the verified ones.

A head, or layers that predict further tokens, share the embeddings and the output layer with the target: they
are one memory, which a commit fills for both. Versions have the other tensors of a head that is trained;
everything else that drafts stays as it was loaded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from protocol.errors import EngineSettingsError
from protocol.weights.draft_head import PREFIX
from rollout.engines.vllm.drafts.history import HistoryDrafts
from rollout.staging.staging import storage_key

OWNERS = ("drafter", "speculator")
"""Attributes of vLLM's older and newer model runner that hold what drafts."""
OF_THE_TARGET = ("embed_tokens.weight", "head.weight")
"""Ends of the names of the tensors that layers which predict further tokens take from the target."""


class VerifiedDrafts:
    """Drafted tokens of all steps, and how many of them were accepted."""

    def __init__(self) -> None:
        self._drafted = self._accepted = 0

    @property
    def accepted(self) -> float | None:
        """Share of all drafted tokens that were accepted; None: there were no drafts."""
        return self._accepted / self._drafted if self._drafted else None

    def add(
        self,
        request_ids: Iterable[str],
        tokens: Iterable[Sequence[int]],
        drafts: Mapping[str, Sequence[int]],
    ) -> None:
        """Count the result of a step.

        Args:
            request_ids: [B], the step's requests.
            tokens: [B], the tokens of each request: the accepted ones and one more, none of an ended one.
            drafts: request id -> the draft that the step verified; nothing for requests without one.
        """
        if not drafts:
            return
        for name, row in zip(request_ids, tokens, strict=False):
            if row and (draft := drafts.get(name)):
                self._drafted += len(draft)
                self._accepted += len(row) - 1


def prepare_drafts(runner: Any) -> None:
    """Repair the verification of drafts, if there are any, and give a proposer of ours its model runner."""
    if runner.speculative_config is not None and not torch.cuda.is_available():
        repair_rejection()
    drafter = getattr(runner, "drafter", None)
    if isinstance(drafter, HistoryDrafts):
        drafter.runner = runner


class HeadedModel(torch.nn.Module):
    """A target and its trained head as one model to be loaded, whose tensors versions change together."""

    def __init__(self, runner: Any) -> None:
        """Join the models of vLLM's model runner."""
        super().__init__()
        self.target, self.head = runner.get_model(), _draft_model(runner)
        self._own = own_tensors(runner).keys()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the head's tensors, which have `PREFIX`, and the target's, each by its own loader."""
        given = list(weights)
        self.target.load_weights((name, it) for name, it in given if not name.startswith(PREFIX))
        head = ((name.removeprefix(PREFIX), it) for name, it in given if name.startswith(PREFIX))
        self.head.load_weights(head)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the target's parameters, and the head's own."""
        yield from self.target.named_parameters(*args, **kwargs)
        for name, parameter in self.head.named_parameters(*args, **kwargs):
            if name in self._own:
                yield PREFIX + name, parameter


def _draft_model(runner: Any) -> Any:
    """Return the model that drafts; None: there is none."""
    models = (getattr(getattr(runner, owner, None), "model", None) for owner in OWNERS)
    return next((model for model in models if model is not None), None)


def own_tensors(runner: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the model that drafts which are not the target's.

    Raises:
        EngineSettingsError: layers of the target's own checkpoint have a copy of a tensor that versions
            change, which would stay behind.
    """
    model = _draft_model(runner)
    if model is None:
        return {}
    shared = {storage_key(tensor) for tensor in runner.get_model().parameters()}
    own = {name: it.detach() for name, it in model.named_parameters() if storage_key(it) not in shared}
    copies = [name for name in own if name.endswith(OF_THE_TARGET)]
    if copies and runner.speculative_config.method == "mtp":
        raise EngineSettingsError(
            f"the layers that predict further tokens have a {copies[0]} of their own in this vLLM, which no "
            "version would reach"
        )
    return own


def repair_rejection() -> None:
    """Have vLLM on a CPU expand parameters of requests to their drafts.

    The kernel of vLLM 0.32 writes them into a copy and loses it. Temperatures are then read from memory that
    was never written, and unlikely drafts are accepted.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(
        values: torch.Tensor,
        ends: torch.Tensor,
        num_tokens: int,
        replace_from: float = 0,
        replace_to: float = 0,
    ) -> torch.Tensor:
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        replaced = torch.where(
            values == replace_from, torch.as_tensor(replace_to, dtype=values.dtype), values
        )
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand
