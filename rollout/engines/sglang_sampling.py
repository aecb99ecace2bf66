"""Log-probabilities as sampled in SGLang, which leaves top-k and top-p out of its own."""

from collections.abc import Callable
from typing import Any

import torch

from rollout.engines.sampling import kept_tokens


def as_sampled(forward: Callable[..., Any], sampler: Any, output: Any, info: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the sampler, where top-k or top-p is asked for: SGLang's log-probabilities would leave both out.

    The tokens that cannot be sampled are taken out of the logits first, and what SGLang samples from and reports is the rest. Greedy rows
    (top_k 1 in SGLang) keep the log-probabilities of the whole distribution.
    """
    if info.is_all_greedy or not (info.need_top_k_sampling or info.need_top_p_sampling):
        return forward(sampler, output, info, *args, **kwargs)
    logits = output.next_token_logits
    greedy = (info.top_ks == 1).unsqueeze(-1)
    kept = kept_tokens(logits.float() / info.temperatures, info.top_ks, info.top_ps)
    kept = torch.where(greedy, torch.zeros_like(kept).scatter(-1, logits.argmax(-1, keepdim=True), True), kept)
    output.next_token_logits = logits.masked_fill(~kept, -torch.inf)
    wanted = torch.where(greedy, logits, output.next_token_logits)
    asked = info.need_top_k_sampling, info.need_top_p_sampling
    info.need_top_k_sampling = info.need_top_p_sampling = False
    try:
        return forward(sampler, output, info, *args, logprob_logits=wanted, **kwargs)
    finally:
        info.need_top_k_sampling, info.need_top_p_sampling = asked
