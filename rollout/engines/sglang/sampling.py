"""Extends SGLang's sampler with log-probabilities as sampled, and the weight version of every token."""

from collections.abc import Callable
from typing import Any

import torch

from rollout.engines.sampling import kept_tokens

VERSIONS = "tether_versions"
"""Key in meta_info of the response: list of each token's version."""
CARRIER = "sglang.srt.layers.logits_processor.LogitsProcessorOutput.customized_info"
"""Field of SGLang's sampler output whose values SGLang copies to meta_info."""


def sample_with_dropped_tokens_masked(
    forward: Callable[..., Any], sampler: Any, output: Any, info: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run SGLang's sampler with log-probabilities after top-k and top-p, which SGLang itself ignores.

    Tokens dropped by top-k and top-p are masked in the logits first, so SGLang samples from the rest and
    reports its log-probabilities. Greedy rows (top_k 1 in SGLang) then have a single token; their
    log-probabilities in the full distribution are filled in afterwards.

    Args:
        forward: SGLang's `Sampler.forward`.
        sampler: SGLang's `Sampler`.
        output: LogitsProcessorOutput with `next_token_logits` [B, V].
        info: SamplingBatchInfo.
        args, kwargs: further arguments of `forward`.

    Returns: token ids [B].
    """
    if info.is_all_greedy or not (info.need_top_k_sampling or info.need_top_p_sampling):
        return forward(sampler, output, info, *args, **kwargs)
    logits = output.next_token_logits
    scores = logits.float() / info.temperatures  # 1 for greedy rows
    kept = kept_tokens(scores, info.top_ks, info.top_ps)
    greedy = info.top_ks == 1
    # exactly one token, even if several share the highest logit
    best = torch.zeros_like(kept).scatter(-1, logits.argmax(-1, keepdim=True), True)
    output.next_token_logits = logits.masked_fill(~torch.where(greedy[:, None], best, kept), -torch.inf)
    requested = info.need_top_k_sampling, info.need_top_p_sampling
    info.need_top_k_sampling = info.need_top_p_sampling = False
    try:
        tokens = forward(sampler, output, info, *args, **kwargs)
    finally:
        info.need_top_k_sampling, info.need_top_p_sampling = requested
    if output.next_token_logprobs is not None:
        full = scores.gather(-1, tokens[:, None].long())[:, 0] - scores.logsumexp(-1)
        output.next_token_logprobs = torch.where(greedy, full, output.next_token_logprobs)
    return tokens


def record_version(output: Any, version: int) -> None:
    """Record the version with the sampled tokens; SGLang keeps both together on retraction and abort.

    Args:
        output: SGLang's LogitsProcessorOutput.
    """
    rows = len(output.next_token_logits)
    output.customized_info = {**(output.customized_info or {}), VERSIONS: [version] * rows}
