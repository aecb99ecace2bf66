"""Switches vLLM's own drafts on and off in its scheduler, which says how long the next drafts are.

vLLM can draft by the size of the batch (`num_speculative_tokens_per_batch_size`): its scheduler looks the
length up at each step. The table is replaced here as the switch decides. At length 0 the model that drafts
still reads the step's tokens, so its KV cache is complete once drafts are made again.
"""

from typing import Any

from rollout.engines.draft_switch import DraftSwitch

STEPS_BEHIND = 3
"""Most steps after a decision whose drafts were made before it: the scheduler is a step ahead of the results,
and the drafts that are made at a step are verified in the next one."""


def make_scheduler(**arguments: Any) -> Any:
    """Make vLLM's scheduler with these arguments, as vLLM would, and switch its drafts."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    overlaps = arguments["vllm_config"].scheduler_config.async_scheduling
    scheduler = (AsyncScheduler if overlaps else Scheduler)(**arguments)
    switch_drafts(scheduler, DraftSwitch(skipped=STEPS_BEHIND))
    return scheduler


def switch_drafts(scheduler: Any, switch: DraftSwitch) -> None:
    """Have a scheduler ask for drafts only while `switch` wants them."""
    lengths, update = scheduler.dynamic_sd_lookup, scheduler.update_from_output
    none = [0] * len(lengths)

    def update_from_output(scheduled: Any, output: Any) -> Any:
        rows = output.sampled_token_ids
        if rows:
            wanted = switch.drafts(len(rows), sum(map(len, rows)))
            scheduler.dynamic_sd_lookup = lengths if wanted else none
        return update(scheduled, output)

    scheduler.update_from_output = update_from_output
