"""What our part adds to SGLang's sampler: log-probabilities as sampled, and with every token the version it
was sampled under."""

from collections.abc import Callable
from typing import Any

import torch

from rollout.engines.sampling import kept_tokens

VERSIONS = "tether_versions"
"""Key of the answer's meta_info: a version for every token."""
CARRIER = "sglang.srt.layers.logits_processor.LogitsProcessorOutput.customized_info"
"""What SGLang takes there."""


def as_sampled(
    forward: Callable[..., Any], sampler: Any, output: Any, info: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around the sampler, where top-k or top-p is asked for: SGLang's log-probabilities would leave both out.

    The tokens that cannot be sampled are taken out of the logits first, and what SGLang samples from and
    reports is the rest. Greedy rows (top_k 1 in SGLang) then have one token left: their log-probabilities in
    the whole distribution are put in afterwards.
    """
    if info.is_all_greedy or not (info.need_top_k_sampling or info.need_top_p_sampling):
        return forward(sampler, output, info, *args, **kwargs)
    logits = output.next_token_logits
    scores = logits.float() / info.temperatures  # SGLang has greedy rows at 1
    kept = kept_tokens(scores, info.top_ks, info.top_ps)
    greedy = info.top_ks == 1
    best = torch.zeros_like(kept).scatter(
        -1, logits.argmax(-1, keepdim=True), True
    )  # one, where several are equal
    output.next_token_logits = logits.masked_fill(~torch.where(greedy[:, None], best, kept), -torch.inf)
    asked = info.need_top_k_sampling, info.need_top_p_sampling
    info.need_top_k_sampling = info.need_top_p_sampling = False
    try:
        tokens = forward(sampler, output, info, *args, **kwargs)
    finally:
        info.need_top_k_sampling, info.need_top_p_sampling = asked
    if output.next_token_logprobs is not None:
        whole = scores.gather(-1, tokens[:, None].long())[:, 0] - scores.logsumexp(-1)
        output.next_token_logprobs = torch.where(greedy, whole, output.next_token_logprobs)
    return tokens


def with_version(output: Any, version: int) -> None:
    """Put the version beside the tokens that were sampled: SGLang keeps both together, through retraction and
    abort.

    Args:
        output: SGLang's LogitsProcessorOutput.
        version: of the live weights.
    """
    rows = len(output.next_token_logits)
    output.customized_info = {**(output.customized_info or {}), VERSIONS: [version] * rows}
