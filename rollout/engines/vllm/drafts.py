"""Drafts inside vLLM's model runner, which verifies them by rejection sampling.

vLLM makes `HistoryDrafts` by its speculative method `custom_class`, and asks it for drafts after every step.
"""

from collections.abc import Sequence
from typing import Any

import torch

from rollout.engines.draft_history import DraftedRequest, DraftHistory
from rollout.engines.draft_switch import DraftSwitch


class HistoryDrafts:
    """Drafts from the history of this engine, while they make its steps faster."""

    def __init__(self, vllm_config: Any) -> None:
        """Begin without history, as vLLM constructs its proposers."""
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len = vllm_config.model_config.max_model_len
        self._history = DraftHistory()
        self._wants_drafts = DraftSwitch().drafts
        self._running: dict[str, DraftedRequest] = {}
        self._drafted: dict[str, int] = {}
        """Request -> tokens of its last draft."""
        self._all_drafted = self._all_accepted = 0
        self.runner: Any = None
        """vLLM's model runner, whose batch has the ids and prompts of the requests."""
        if not torch.cuda.is_available():
            repair_rejection()

    @property
    def accepted(self) -> float | None:
        """Share of all drafted tokens that were accepted; None: there were no drafts."""
        return self._all_accepted / self._all_drafted if self._all_drafted else None

    def load_model(self, model: Any) -> None:
        """Load no model: drafts come from none."""

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: Any, token_ids: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return drafts for the next step.

        Args:
            sampled: [B], tokens that the step gave each request; none while its prompt is not complete.
            lengths: int [B], tokens of each request, with the sampled ones.
            token_ids: int [B, max_model_len], these tokens.
            slot_mappings: not used.

        Returns: [B], at most `num_speculative_tokens` tokens each.
        """
        batch = self.runner.input_batch
        names = batch.req_ids[: len(sampled)]
        self._end_others(names)
        for row, name in enumerate(names):
            if sampled[row]:
                self._follow(name, token_ids[row], int(batch.num_prompt_tokens[row]), int(lengths[row]))
                if name in self._drafted:
                    self._all_drafted += self._drafted[name]
                    self._all_accepted += len(sampled[row]) - 1
        self._drafted = {}
        if not self._wants_drafts(len(sampled), sum(map(len, sampled))):
            return [[] for _ in sampled]
        drafts = [
            self._running[name].draft(min(self._most, self._max_model_len - int(lengths[row])))
            if sampled[row]
            else []
            for row, name in enumerate(names)
        ]
        self._drafted = {name: len(draft) for name, draft in zip(names, drafts, strict=True) if draft}
        return drafts

    def _follow(self, name: str, tokens: Any, start: int, length: int) -> None:
        """Record the answer of a request, which lies between `start` and `length` of its tokens."""
        request = self._running.get(name)
        if request is None:
            request = self._running[name] = self._history.begin(tokens[:start].tolist())
        request.extend(tokens[start + len(request) : length].tolist())

    def _end_others(self, names: Sequence[str]) -> None:
        """End the requests that are in the batch no more; one that was preempted begins anew."""
        for name in self._running.keys() - set(names):
            self._running.pop(name).end()


class ConstantDrafts(HistoryDrafts):
    """Drafts from the history of this engine, also where they make its steps slower."""

    def __init__(self, vllm_config: Any) -> None:
        """Begin without history, as vLLM constructs its proposers."""
        super().__init__(vllm_config)
        self._wants_drafts = lambda running, tokens: True


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
