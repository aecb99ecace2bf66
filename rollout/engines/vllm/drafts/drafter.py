"""Prepares drafting in vLLM's model runner, finds the draft tensors, and counts verified drafts.

A draft head or MTP layers share embeddings and output layer with the target model; one commit updates both.
Versions contain the other tensors of a trained head. All other draft tensors stay as loaded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from protocol.errors import EngineSettingsError
from protocol.weights.draft_head import PREFIX
from rollout.engines.vllm.drafts.history import HistoryDrafts
from rollout.staging.staging import storage_key

OWNERS = ("drafter", "speculator")
"""Attributes of vLLM's older and newer model runner that hold the draft model."""
SHARED_WITH_TARGET = ("embed_tokens.weight", "head.weight")
"""Name suffixes of the tensors that MTP layers share with the target."""


class VerifiedDrafts:
    """Counters of drafted and accepted tokens over all steps."""

    def __init__(self) -> None:
        self._drafted = self._accepted = 0

    @property
    def accepted(self) -> float | None:
        """Fraction of drafted tokens that were accepted; None: no drafts yet."""
        return self._accepted / self._drafted if self._drafted else None

    def add(
        self,
        request_ids: Iterable[str],
        tokens: Iterable[Sequence[int]],
        drafts: Mapping[str, Sequence[int]],
    ) -> None:
        """Count the result of a step.

        Args:
            request_ids: [B] requests of the step.
            tokens: [B] sampled tokens of each request: the accepted draft tokens plus one; empty for ended
                requests.
            drafts: request id -> draft verified by the step, for requests with a draft.
        """
        if not drafts:
            return
        for name, row in zip(request_ids, tokens, strict=False):
            if row and (draft := drafts.get(name)):
                self._drafted += len(draft)
                self._accepted += len(row) - 1


def prepare_drafts(runner: Any) -> None:
    """Fix the verification of drafts on CPU, and set the model runner of this project's proposers."""
    if runner.speculative_config is not None and not torch.cuda.is_available():
        repair_rejection()
    drafter = getattr(runner, "drafter", None)
    if isinstance(drafter, HistoryDrafts):
        drafter.runner = runner


class HeadedModel(torch.nn.Module):
    """Target model and trained head, combined into one model whose tensors versions update together."""

    def __init__(self, runner: Any) -> None:
        """Combine the models of vLLM's model runner."""
        super().__init__()
        self.target, self.head = runner.get_model(), _draft_model(runner)
        self._own = own_tensors(runner).keys()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the head's tensors (prefix `PREFIX`) and the target's, each with its own loader."""
        given = list(weights)
        self.target.load_weights((name, it) for name, it in given if not name.startswith(PREFIX))
        head = ((name.removeprefix(PREFIX), it) for name, it in given if name.startswith(PREFIX))
        self.head.load_weights(head)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the target's parameters and the head's unshared parameters."""
        yield from self.target.named_parameters(*args, **kwargs)
        for name, parameter in self.head.named_parameters(*args, **kwargs):
            if name in self._own:
                yield PREFIX + name, parameter


def _draft_model(runner: Any) -> Any:
    """Return the draft model; None if there is none."""
    models = (getattr(getattr(runner, owner, None), "model", None) for owner in OWNERS)
    return next((model for model in models if model is not None), None)


def own_tensors(runner: Any) -> dict[str, torch.Tensor]:
    """Return the draft model's tensors that are not shared with the target.

    Raises:
        EngineSettingsError: MTP layers have a copy of a tensor that versions update, so the copy would become
            stale.
    """
    model = _draft_model(runner)
    if model is None:
        return {}
    shared = {storage_key(tensor) for tensor in runner.get_model().parameters()}
    own = {name: it.detach() for name, it in model.named_parameters() if storage_key(it) not in shared}
    copies = [name for name in own if name.endswith(SHARED_WITH_TARGET)]
    if copies and runner.speculative_config.method == "mtp":
        raise EngineSettingsError(
            f"the layers that predict further tokens have a {copies[0]} of their own in this vLLM, which no "
            "version would reach"
        )
    return own


def repair_rejection() -> None:
    """Fix the expansion of request parameters to draft tokens in vLLM on CPU, and top-k of no tokens.

    The kernel of vLLM 0.32 writes the result to a temporary copy. Temperatures are then read from
    uninitialized memory, and unlikely drafts are accepted. In a step in which no request has drafts, its
    top-k without top-p takes the maximum of no values, which ends the engine.
    """
    from vllm.v1.sample import rejection_sampler

    filter_logits = rejection_sampler.apply_top_k_top_p

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

    def filter_drafts(
        logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
    ) -> torch.Tensor:
        return filter_logits(logits, top_k, top_p) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_top_k_top_p = filter_drafts
