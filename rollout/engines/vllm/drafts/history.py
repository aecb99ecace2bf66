"""Drafts from history inside vLLM's model runner, which verifies drafts by rejection sampling.

vLLM creates `HistoryDrafts` through its speculative method `custom_class`, and requests drafts after every
step.
"""

from collections.abc import Sequence
from typing import Any

from rollout.engines.draft_history import DraftedRequest, DraftHistory
from rollout.engines.draft_switch import DraftSwitch


class HistoryDrafts:
    """Proposer of drafts from the engine's history, active while drafts make its steps faster."""

    def __init__(self, vllm_config: Any) -> None:
        """Start without history; vLLM calls this as for its own proposers."""
        self._max_drafts = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len = vllm_config.model_config.max_model_len
        self._history = DraftHistory()
        self._wants_drafts = DraftSwitch().drafts
        self._running: dict[str, DraftedRequest] = {}
        self.runner: Any = None
        """vLLM's model runner, whose batch contains the requests' ids and prompts."""

    def load_model(self, model: Any) -> None:
        """Load no model."""

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: Any, token_ids: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return drafts for the next step.

        Args:
            sampled: [B] tokens sampled for each request; empty while its prompt is being prefilled.
            lengths: int [B], number of tokens of each request, including the sampled ones.
            token_ids: int [B, max_model_len], tokens of each request.
            slot_mappings: unused.

        Returns: [B] drafts of at most `num_speculative_tokens` tokens.
        """
        batch = self.runner.input_batch
        names = batch.req_ids[: len(sampled)]
        self._end_others(names)
        for row, name in enumerate(names):
            if sampled[row]:
                self._follow(name, token_ids[row], int(batch.num_prompt_tokens[row]), int(lengths[row]))
        if not self._wants_drafts(len(sampled), sum(map(len, sampled))):
            return [[] for _ in sampled]
        return [
            self._running[name].draft(min(self._max_drafts, self._max_model_len - int(lengths[row])))
            if sampled[row]
            else []
            for row, name in enumerate(names)
        ]

    def _follow(self, name: str, tokens: Any, start: int, length: int) -> None:
        """Record the answer of a request: its tokens from `start` to `length`."""
        request = self._running.get(name)
        if request is None:
            request = self._running[name] = self._history.begin(tokens[:start].tolist())
        request.extend(tokens[start + len(request) : length].tolist())

    def _end_others(self, names: Sequence[str]) -> None:
        """End the requests that have left the batch; preempted requests start again later."""
        for name in self._running.keys() - set(names):
            self._running.pop(name).end()


class ConstantDrafts(HistoryDrafts):
    """Proposer of drafts from the engine's history, always active."""

    def __init__(self, vllm_config: Any) -> None:
        """Start without history; vLLM calls this as for its own proposers."""
        super().__init__(vllm_config)
        self._wants_drafts = lambda running, tokens: True
