"""Says which layouts of Megatron can repeat passes that ran out of memory."""

from collections.abc import Callable

from trainer.megatron.parallel import Position
from trainer.memory.oom_retry import OomRetry


def retry_of(position: Position, tokens: int, reset: Callable[[], None]) -> OomRetry:
    """Return the budget of a rank and how it shrinks; arguments as in `OomRetry`.

    With tensor, pipeline or context parallelism, or experts on several ranks, they wait for each other
    within a pass, and with `overlap_grad_reduce` gradients are added up within it.
    """
    parallel = position.config
    replicas = parallel.data_parallel_size
    experts = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    within = len(position.replicas()[0]) == 1 and experts == 1
    is_whole = within and not (replicas > 1 and parallel.overlap_grad_reduce)
    return OomRetry(position.device, tokens, reset, replicas=replicas, is_whole=is_whole)
