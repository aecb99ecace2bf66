"""Lists the arguments of vLLM's AsyncEngineArgs that `[engine.arguments]` refuses, with reasons.

vLLM is not imported.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from rollout.engines import arguments as shared
from rollout.engines.base import EngineConfig

_LOGPROBS = "log-probabilities must be those of the distribution that a token was drawn from"
_DRAFTS = "drafts are switched and verified by settings of their own: engine.drafts, engine.draft_model"
_SCHEDULER = "commits and the record of token versions rest on vLLM's own scheduler and worker"
_DATA_PARALLEL = (
    "vLLM answers a call to all replicas with the first one's answer, so the others' commits would not be "
    "known, and they come at other steps of theirs; with experts, which replicas share, tokens would then be "
    "of two versions; start one rollout worker for each replica (services.rollouts)"
)
_ONE_HOST = (
    "each rank is asked to stage over a socket of the worker's host, so an engine has one host; start a "
    "rollout worker on each"
)

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "model",
            "model_weights",
            "hf_config_path",
            "revision",
            "code_revision",
            "hf_token",
            "tokenizer",
            "tokenizer_revision",
        ),
        shared.MODEL,
    ),
    **dict.fromkeys(("hf_overrides", "model_class_overrides", "diffusion_config"), shared.OTHER_MODEL),
    **dict.fromkeys(("runner", "convert"), "the engine generates: it has no other task"),
    "skip_tokenizer_init": "an engine takes and returns tokens; text is rendered by [render]",
    "load_format": shared.FILES,
    "dtype": "set engine.dtype: weights are published in it",
    **dict.fromkeys(
        (
            "generation_config",
            "override_generation_config",
            "logits_processors",
            "watermark_config",
            "enable_trace_replay",
        ),
        shared.SAMPLED,
    ),
    "logprobs_mode": _LOGPROBS,
    "seed": "it is made of the engine's name: engines with one seed would sample the same completions",
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _DRAFTS),
    **dict.fromkeys(("scheduler_cls", "worker_cls", "worker_extension_cls"), _SCHEDULER),
    **dict.fromkeys(
        (
            "enable_lora",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "lora_dtype",
            "lora_target_modules",
            "default_mm_loras",
        ),
        shared.ADAPTER,
    ),
    "tensor_parallel_size": "set engine.tensor_parallel_size",
    **dict.fromkeys(
        (
            "data_parallel_size",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
            "data_parallel_multi_port_external_lb",
            "data_parallel_backend",
        ),
        _DATA_PARALLEL,
    ),
    **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size"), shared.RANKS),
    "device_ids": "set services.rollout_gpus",
    **dict.fromkeys(
        ("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port"), _ONE_HOST
    ),
    **dict.fromkeys(
        ("enable_eplb", "eplb_config", "enable_elastic_ep", "elastic_ep_max_dp_size"), shared.MOVED
    ),
    **dict.fromkeys(
        (
            "offload_backend",
            "cpu_offload_gb",
            "cpu_offload_params",
            "offload_group_size",
            "offload_num_in_group",
            "offload_prefetch_step",
            "offload_params",
        ),
        shared.OFFLOADED,
    ),
    **dict.fromkeys(
        ("kv_transfer_config", "ec_transfer_config", "kv_offloading_size", "kv_offloading_backend"),
        shared.OTHER_KV,
    ),
    **dict.fromkeys(
        ("weight_transfer_config", "enable_fault_tolerance", "fault_tolerance_config"), shared.OTHER_UPDATES
    ),
    "trust_remote_code": "set model.trust_remote_code",
    "max_model_len": "set engine.max_model_len",
    "max_num_seqs": "set engine.max_running",
    "gpu_memory_utilization": "set engine.memory_fraction",
    "enforce_eager": "set engine.enforce_eager",
    "attention_backend": "set engine.attention_backend",
    "enable_sleep_mode": "set engine.enable_sleep_mode",
    "enable_return_routed_experts": "set trainer.routing_replay",
}
"""Argument -> reason of the refusal. All other arguments are passed unchanged."""
CHANGEABLE = frozenset(
    {"disable_log_stats", "enable_prefix_caching", "kv_cache_memory_bytes", "max_cudagraph_capture_size"}
)
"""Arguments that the engine sets by default and that users may override."""


def argument_names(config: EngineConfig | None = None) -> list[str]:
    """Return the argument names of the installed vLLM, without importing it; empty if not installed."""
    spec = find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    paths = [Path(place) / "engine/arg_utils.py" for place in places or ()]
    return shared.annotated_fields(paths, ("EngineArgs", "AsyncEngineArgs"))
