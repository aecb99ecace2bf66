"""Creates vLLM's scheduler, extended to separate prefixes by version, record tokens, and switch drafts.

The `cache_salt` of a request is part of the hash of its first block, on which the hashes of all later blocks
depend. Versions may be committed while a request is queued. Its salt is therefore set to the live version
when the request starts or restarts after preemption, not when it is submitted. Commits pass through the
engine process in order with steps: steps scheduled before a commit run on old weights, later steps on new
ones.

vLLM can draft by batch size (`num_speculative_tokens_per_batch_size`): its scheduler looks up the draft
length at each step. The draft switch replaces this table. At length 0 the draft model still reads the step's
tokens, so its KV cache is complete when drafting resumes.
"""

import functools
from typing import Any

from rollout.engines.draft_switch import DraftSwitch
from rollout.engines.vllm.drafts.drafter import VerifiedDrafts
from rollout.engines.vllm.step_records import SampledTokens, StepResult

NULL_BLOCKS = 1
"""KV cache blocks that vLLM reserves as placeholders."""
STEPS_BEHIND = 3
"""Maximum steps after a decision that still verify older drafts: the scheduler runs one step ahead of the
results, and drafts of a step are verified in the next step."""


def make_scheduler(**arguments: Any) -> Any:
    """Create vLLM's scheduler with its own arguments; the engine process calls this once."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    overlaps = arguments["vllm_config"].scheduler_config.async_scheduling
    scheduler = (AsyncScheduler if overlaps else Scheduler)(**arguments)
    separate_prefixes(EngineCore, scheduler.kv_cache_manager)
    record_tokens(EngineCore, scheduler)
    if getattr(scheduler, "dynamic_sd_lookup", None) is not None:
        switch_drafts(scheduler, DraftSwitch(skipped=STEPS_BEHIND))
    return scheduler


def separate_prefixes(core: Any, manager: Any) -> None:
    """Let starting requests use only prefixes computed with the live weights.

    Args:
        core: vLLM's class EngineCore, which handles calls of the ranks and incoming requests.
        manager: vLLM's KVCacheManager, which is queried for the prefix of a request when it starts or
            restarts.
    """
    call, receive, find = core.collective_rpc, core.preprocess_add_request, manager.get_computed_blocks
    live = "0"

    @functools.wraps(call)
    def collective_rpc(
        core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        nonlocal live
        if method == "tether_call" and args[1] == "commit":
            live = str(int(live) + 1)
        return call(core, method, timeout, args, kwargs)

    @functools.wraps(receive)
    def preprocess_add_request(core: Any, request: Any) -> Any:
        request.cache_salt = live  # hashed in another thread; usually still valid at the start
        return receive(core, request)

    def get_computed_blocks(request: Any) -> Any:
        if request.cache_salt != live:
            request.cache_salt = live
            request.block_hashes.clear()
            request.update_block_hashes()
        return find(request)

    core.collective_rpc, core.preprocess_add_request = collective_rpc, preprocess_add_request
    manager.get_computed_blocks = get_computed_blocks


def record_tokens(core: Any, scheduler: Any) -> None:
    """Let the scheduler record accepted tokens, and let vLLM's engine process return the records.

    Args:
        core: vLLM's class EngineCore, whose methods the starting process can call.
        scheduler: vLLM's scheduler. If it logs statistics, every token is sent immediately, because the
            statistics count sent tokens.
    """
    from vllm.sampling_params import RequestOutputKind

    sampled, drafts = SampledTokens(), VerifiedDrafts()
    add, update = scheduler.add_request, scheduler.update_from_output
    manager = scheduler.kv_cache_manager

    def add_request(request: Any) -> None:
        is_final_only = request.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
        sampled.begin(request, waits=is_final_only and not scheduler.log_stats)
        add(request)

    def update_from_output(scheduled: Any, output: Any) -> Any:
        sampled.end(scheduled.finished_req_ids)
        drafts.add(output.req_ids, output.sampled_token_ids, scheduled.scheduled_spec_decode_tokens)
        found, result = update(scheduled, output), StepResult.of(output)
        for client, answers in list(found.items()):
            answers.outputs = sampled.add(result, output.req_id_to_index, answers.outputs)
            if not (answers.outputs or answers.finished_requests or answers.scheduler_stats):
                del found[client]
        return found

    def tether_sampled(core: Any, name: str) -> Any:
        return sampled.pop(name)

    def tether_occupancy(core: Any) -> tuple[int, float | None, float | None]:
        kv_use = manager.usage if manager.block_pool.num_gpu_blocks > NULL_BLOCKS else None
        return len(scheduler.running), kv_use, drafts.accepted

    scheduler.add_request, scheduler.update_from_output = add_request, update_from_output
    core.tether_sampled, core.tether_occupancy = tether_sampled, tether_occupancy


def switch_drafts(scheduler: Any, switch: DraftSwitch) -> None:
    """Let a scheduler request drafts only while `switch` allows them."""
    lengths, update = scheduler.dynamic_sd_lookup, scheduler.update_from_output
    none = [0] * len(lengths)

    def update_from_output(scheduled: Any, output: Any) -> Any:
        rows = output.sampled_token_ids
        if rows:
            wanted = switch.drafts(len(rows), sum(map(len, rows)))
            scheduler.dynamic_sd_lookup = lengths if wanted else none
        return update(scheduled, output)

    scheduler.update_from_output = update_from_output
