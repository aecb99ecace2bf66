"""Lists the arguments of SGLang's server that `[engine.arguments]` refuses, with reasons.

SGLang is not imported, because it may be installed in another interpreter.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from protocol.errors import EngineSettingsError
from rollout.engines import arguments as shared
from rollout.engines.base import EngineConfig

OTHER_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Environment variable that makes SGLang return log-probabilities at temperature 1 for any sampling
temperature."""

BOUND = "attn_logit_softcapping"
"""Field of config.json that caps attention scores (Gemma 2)."""

_SAMPLER = "tether's plug-in applies top-k and top-p before SGLang's own sampler, which it knows"
_QUANTISED = (
    "versions are published in engine.dtype and quantised by SGLang's own processing of a layer alone "
    "(quantization), not by a file's scales or by another library"
)
_OTHER_LOOP = "commits fall between the steps of SGLang's plain and overlapping loops, which tether knows"
_SEVERAL = (
    "a step would give a request several tokens, and the draft model would stay at its first version: "
    "versions are recorded and committed for one model and one token a step"
)
_SPLIT = "a request's tokens would come from two servers, and a version is committed on one"
_DATA_PARALLEL = (
    "tether connects to the ranks of one tensor-parallel group, and a version must be committed on all "
    "ranks between the same two steps; start one rollout worker for each replica (services.rollouts)"
)
_ONE_HOST = (
    "tether commands each rank over a socket of the worker's host, so an engine has one host; start a "
    "rollout worker on each"
)
_LOOPBACK = "the server is this worker's own, on loopback, with a key of its own"
_START = "tether starts the server and waits for it"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("model_path", "revision", "tokenizer_path", "is_embedding"), shared.MODEL),
    **dict.fromkeys(
        ("json_model_override_args", "dllm_algorithm", "dllm_algorithm_config"), shared.OTHER_MODEL
    ),
    **dict.fromkeys(("load_format", "custom_weight_loader", "startup_weight_load_mode"), shared.FILES),
    "skip_tokenizer_init": "an engine takes and returns tokens; text is rendered by [render]",
    "dtype": "set engine.dtype: weights are published in it",
    **dict.fromkeys(
        (
            "sampling_defaults",
            "preferred_sampling_params",
            "enable_watermark",
            "watermark_config",
            "watermark_default_enabled",
            "watermark_enforce_all",
        ),
        shared.SAMPLED,
    ),
    "sampling_backend": _SAMPLER,
    "random_seed": "it is made of the engine's name: engines with one seed would sample the same completions",
    **dict.fromkeys(("quantization_param_path", "modelopt_quant", "quantize_and_serve"), _QUANTISED),
    **dict.fromkeys(("enable_two_batch_overlap", "num_continuous_decode_steps"), _OTHER_LOOP),
    **dict.fromkeys(
        ("speculative_algorithm", "speculative_draft_model_path", "enable_multi_layer_eagle"), _SEVERAL
    ),
    **dict.fromkeys(("disaggregation_mode", "enable_pdmux", "enable_pd_role_switch"), _SPLIT),
    **dict.fromkeys(
        (
            "enable_lora",
            "max_lora_rank",
            "lora_target_modules",
            "lora_paths",
            "max_loaded_loras",
            "max_loras_per_batch",
            "enable_lora_overlap_loading",
        ),
        shared.ADAPTER,
    ),
    "tp_size": "set engine.tensor_parallel_size",
    **dict.fromkeys(
        ("dp_size", "attn_dp_size", "enable_dp_attention", "moe_dp_size", "dwdp_size"), _DATA_PARALLEL
    ),
    "pp_size": shared.RANKS,
    **dict.fromkeys(("base_gpu_id", "gpu_id_step"), "set services.rollout_gpus"),
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr", "use_ray"), _ONE_HOST),
    **dict.fromkeys(
        ("enable_eplb", "elastic_ep_backend", "enable_elastic_expert_backup", "enable_paged_experts"),
        shared.MOVED,
    ),
    **dict.fromkeys(
        ("cpu_offload_gb", "offload_group_size", "offload_num_in_group", "offload_prefetch_step"),
        shared.OFFLOADED,
    ),
    **dict.fromkeys(
        (
            "enable_hierarchical_cache",
            "hicache_storage_backend",
            "enable_lmcache",
            "enable_flexkv",
            "enable_hisparse",
            "radix_cache_backend",
            "enable_unified_cache_external_linker",
        ),
        shared.OTHER_KV,
    ),
    **dict.fromkeys(
        ("checkpoint_engine_wait_weights_before_ready", "weight_version", "weight_cache_mode"),
        shared.OTHER_UPDATES,
    ),
    **dict.fromkeys(
        (
            "host",
            "port",
            "api_key",
            "admin_api_key",
            "ssl_keyfile",
            "ssl_certfile",
            "grpc_mode",
            "smg_grpc_mode",
        ),
        _LOOPBACK,
    ),
    **dict.fromkeys(("skip_server_warmup", "gated_launch_port", "device"), _START),
    "context_length": "set engine.max_model_len",
    "trust_remote_code": "set model.trust_remote_code",
    "max_running_requests": "set engine.max_running",
    "mem_fraction_static": "set engine.memory_fraction",
    "attention_backend": "set engine.attention_backend",
    "disable_cuda_graph": "set engine.enforce_eager",
    "enable_memory_saver": "set engine.enable_sleep_mode",
    "enable_weights_cpu_backup": "set engine.enable_sleep_mode",
    "enable_return_routed_experts": "set trainer.routing_replay",
    "stream_interval": "requests are answered once, at their end",
}
"""Argument -> reason of the refusal. All other arguments are passed unchanged."""
CHANGEABLE = frozenset(
    {"cuda_graph_max_bs_decode", "log_level", "lora_backend", "max_total_tokens", "sleep_on_idle"}
)
"""Arguments that the engine sets by default and that users may override."""
FIND = "import importlib.util as u; s = u.find_spec('sglang'); print(s.submodule_search_locations[0])"
FIND_S = 30.0
"""Timeout for locating SGLang in an interpreter, seconds."""


def argument_names(config: EngineConfig) -> list[str]:
    """Return the argument names of the SGLang in `engine.python`; empty if not installed on this host."""
    place = _package(config.python or sys.executable)
    if place is None:
        return []
    arguments = place / "srt/server_args.py"
    fields = sorted(place.glob("srt/arg_groups/fields/*.py"))  # since 0.5.2x the fields are split into groups
    return [*shared.annotated_fields([arguments], ("ServerArgs",)), *shared.annotated_fields(fields)]


def option_words(arguments: Mapping[str, Any]) -> list[str]:
    """Return the command-line words for the server's arguments.

    true becomes `--OPTION`; false becomes `--no-OPTION`, which SGLang supports for some options. Array
    elements follow the option as separate words. Tables become JSON.
    """
    words: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, list | tuple):
            words += [option, *map(str, value)]
        else:
            words.append(f"{option}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


@cache
def _package(python: str) -> Path | None:
    """Return the directory of an interpreter's SGLang without importing it; None if not installed."""
    try:
        found = subprocess.run(
            [python, "-c", FIND], capture_output=True, text=True, timeout=FIND_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return Path(found.stdout.strip())


def check_environment(config: EngineConfig) -> None:
    """Check the environment variables of the server's process.

    Raises:
        EngineSettingsError: a variable makes SGLang return log-probabilities of another distribution.
    """
    if OTHER_LOGPROBS in config.environment:
        raise EngineSettingsError(
            f"setting engine.environment: with {OTHER_LOGPROBS} SGLang returns log-probabilities of another "
            "distribution than it samples from; remove the variable"
        )


def check_bounded_scores(model: Mapping[str, Any], model_dir: Path) -> None:
    """Check that a model can be served on CPU.

    Args:
        model: parsed config.json.

    Raises:
        EngineSettingsError: the model caps attention scores (Gemma 2).
    """
    if model.get(BOUND):
        raise EngineSettingsError(
            f"engine.name 'sglang' ignores {BOUND} of {model_dir} on a CPU: its attention in torch does not "
            "bound scores; use vllm or hf"
        )
