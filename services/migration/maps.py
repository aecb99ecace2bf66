"""Maps names of settings in TRL, verl and slime to tether's settings.

Read in TRL 1.16.0 and verl 0.9.1 as installed, and in slime's quick start of 2026-11. A name is in
`CONVERSIONS` (with the conversion of its value), in `OMITTED` (with the reason; `*` is a wildcard), or
unknown.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

Settings = dict[str, Any]
Conversion = Callable[[Any], Settings]


def number(value: Any) -> float:
    """Convert a finite number or its text, such as 1e-6, which YAML reads as text."""
    if isinstance(value, bool) or not math.isfinite(found := float(value)):
        raise ValueError(f"{value} is not a finite number")
    return found


def integer(value: Any) -> int:
    """Convert a whole number or its text."""
    if (found := number(value)) != int(found):
        raise ValueError(f"{value} is not a whole number")
    return int(found)


def boolean(value: Any) -> bool:
    """Convert a truth value or its text."""
    if str(value).lower() not in ("true", "false"):
        raise ValueError(f"{value} is neither true nor false")
    return str(value).lower() == "true"


def text(value: Any) -> str:
    """Convert a name or a path; reject lists, mappings, truth values and null."""
    if value is None or isinstance(value, list | dict | bool):
        raise ValueError("one text is carried over, not a list, a mapping, a truth value or null")
    return str(value)


def file(value: Any) -> str:
    """Convert the path of a file or a list of one path; reject several."""
    files = value
    if isinstance(value, str) and value.startswith("["):  # of verl's overrides
        files = [name.strip(" '\"") for name in value.strip("[]").split(",")]
    if isinstance(files, list) and len(files) != 1:
        raise ValueError(f"{len(files)} files are not carried over; keep one, or see docs/data.md, Mixtures")
    return text(files[0] if isinstance(files, list) else files)


def copy_to(*settings: str, read: Callable[[Any], Any] = text) -> Conversion:
    """Return a conversion that gives all `settings` the value."""
    return lambda value: dict.fromkeys(settings, read(value))


def choice(setting: str, names: Mapping[str, str]) -> Conversion:
    """Return a conversion of a name; it rejects unknown names and lists the known ones."""

    def carry(value: Any) -> Settings:
        if str(value) not in names:
            raise ValueError(f"{value} is not carried over; known are {', '.join(names)}")
        return {setting: names[str(value)]}

    return carry


def positive(setting: str) -> Conversion:
    """Return a conversion of a number that is omitted if it is 0 or less."""
    return lambda value: {setting: integer(value)} if integer(value) > 0 else {}


def top_k(value: Any) -> Settings:
    """Convert a top-k, where a negative number means off."""
    return {"sampling.top_k": max(0, integer(value))}


def betas(value: Any) -> Settings:
    """Convert both Adam decays, from a list or its text."""
    first, second = value if isinstance(value, list) else str(value).strip("[]()").split(",")
    return {"optimizer.adam_beta1": number(first), "optimizer.adam_beta2": number(second)}


SAMPLES, TOKENS = "sampling.samples_per_prompt", "sampling.max_tokens"
CLIP_LOW, CLIP_HIGH = "algorithm.clip_low", "algorithm.clip_high"
PROMPTS = copy_to("prompts.path", read=file)
KL_COEF, KL_ON = copy_to("kl_loss_coef", read=number), copy_to("use_kl_loss", read=boolean)
"""Two settings in other trainers, one in tether: see `resolve_kl`."""
ALGORITHMS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gspo", "cispo")

CONVERSIONS: Mapping[str, Mapping[str, Conversion]] = {
    "trl": {
        "model_name_or_path": copy_to("model.path"),
        "model_revision": copy_to("model.revision"),
        "dataset_name": PROMPTS,
        "dataset_config": copy_to("prompts.subset"),
        "dataset_train_split": copy_to("prompts.split"),
        "num_generations": copy_to(SAMPLES, read=integer),
        "generation_batch_size": copy_to("generation_batch_size", read=integer),
        "max_completion_length": copy_to(TOKENS, read=integer),
        "vllm_max_model_length": copy_to("engine.max_model_len", read=integer),
        "vllm_tensor_parallel_size": copy_to("engine.tensor_parallel_size", read=integer),
        "temperature": copy_to("sampling.temperature", read=number),
        "top_p": copy_to("sampling.top_p", read=number),
        "top_k": top_k,
        "loss_type": choice("algorithm.name", {name: name for name in ("grpo", "dr_grpo", "dapo")}),
        "beta": copy_to("algorithm.kl_coef", read=number),
        "epsilon": copy_to(CLIP_LOW, CLIP_HIGH, read=number),
        "epsilon_high": copy_to(CLIP_HIGH, read=number),
        "entropy_coef": copy_to("algorithm.entropy_coef", read=number),
        "mask_truncated_completions": lambda value: {
            "algorithm.truncated": "mask" if boolean(value) else "train"
        },
        "num_iterations": copy_to("trainer.epochs_per_batch", read=integer),
        "learning_rate": copy_to("optimizer.lr", read=number),
        "weight_decay": copy_to("optimizer.weight_decay", read=number),
        "adam_beta1": copy_to("optimizer.adam_beta1", read=number),
        "adam_beta2": copy_to("optimizer.adam_beta2", read=number),
        "adam_epsilon": copy_to("optimizer.adam_eps", read=number),
        "max_grad_norm": copy_to("optimizer.clip_grad", read=number),
        "warmup_steps": copy_to("optimizer.lr_warmup_steps", read=integer),
        "max_steps": positive("run.steps"),
        "save_steps": positive("trainer.checkpoint_every"),
        "eval_steps": positive("eval_steps"),
        "eval_strategy": lambda value: {"eval_strategy": value},  # YAML's `no` is false
        "seed": copy_to("trainer.seed", "prompts.seed", read=integer),
        "shuffle_dataset": copy_to("prompts.shuffle", read=boolean),
        "max_staleness": copy_to("bound.max_staleness", read=integer),
    },
    "verl": {
        "actor_rollout_ref.model.path": copy_to("model.path"),
        "actor_rollout_ref.model.lora_rank": positive("lora.rank"),
        "actor_rollout_ref.model.lora_alpha": copy_to("lora.alpha", read=number),
        "data.train_files": PROMPTS,
        "data.val_files": copy_to("prompts.held_out_path", read=file),
        "data.prompt_key": copy_to("prompts.prompt_field"),
        "data.shuffle": copy_to("prompts.shuffle", read=boolean),
        "data.train_batch_size": copy_to("bound.groups_per_step", read=integer),
        "data.max_prompt_length": copy_to("render.max_prompt_tokens", read=integer),
        "data.max_response_length": copy_to(TOKENS, read=integer),
        "actor_rollout_ref.rollout.n": copy_to(SAMPLES, read=integer),
        "actor_rollout_ref.rollout.name": choice("engine.name", {n: n for n in ("vllm", "sglang", "hf")}),
        "actor_rollout_ref.rollout.temperature": copy_to("sampling.temperature", read=number),
        "actor_rollout_ref.rollout.top_p": copy_to("sampling.top_p", read=number),
        "actor_rollout_ref.rollout.top_k": top_k,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": copy_to(
            "engine.tensor_parallel_size", read=integer
        ),
        "actor_rollout_ref.rollout.gpu_memory_utilization": copy_to("engine.memory_fraction", read=number),
        "actor_rollout_ref.actor.strategy": choice(
            "trainer.backend", {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
        ),
        "actor_rollout_ref.actor.optim.lr": copy_to("optimizer.lr", read=number),
        "actor_rollout_ref.actor.optim.weight_decay": copy_to("optimizer.weight_decay", read=number),
        "actor_rollout_ref.actor.optim.betas": betas,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": positive("optimizer.lr_warmup_steps"),
        "actor_rollout_ref.actor.optim.clip_grad": copy_to("optimizer.clip_grad", read=number),
        "actor_rollout_ref.actor.grad_clip": copy_to("optimizer.clip_grad", read=number),
        "actor_rollout_ref.actor.clip_ratio": copy_to(CLIP_LOW, CLIP_HIGH, read=number),
        "actor_rollout_ref.actor.clip_ratio_low": copy_to(CLIP_LOW, read=number),
        "actor_rollout_ref.actor.clip_ratio_high": copy_to(CLIP_HIGH, read=number),
        "actor_rollout_ref.actor.ppo_mini_batch_size": copy_to("ppo_mini_batch_size", read=integer),
        "actor_rollout_ref.actor.ppo_epochs": copy_to("trainer.epochs_per_batch", read=integer),
        "actor_rollout_ref.actor.use_kl_loss": KL_ON,
        "actor_rollout_ref.actor.kl_loss_coef": KL_COEF,
        "actor_rollout_ref.actor.entropy_coeff": copy_to("algorithm.entropy_coef", read=number),
        "algorithm.adv_estimator": choice(
            "algorithm.name", {**{name: name for name in ALGORITHMS[:4]}, "gae": "ppo"}
        ),
        "trainer.total_training_steps": positive("run.steps"),
        "trainer.save_freq": positive("trainer.checkpoint_every"),
        "trainer.test_freq": positive("eval.every"),
    },
    "slime": {
        "hf-checkpoint": copy_to("model.path"),
        "prompt-data": PROMPTS,
        "input-key": copy_to("prompts.prompt_field"),
        "label-key": copy_to("prompts.answer_field"),
        "apply-chat-template": lambda value: {"render.chat_template": "on"},
        "rollout-shuffle": lambda value: {"prompts.shuffle": True},
        "rollout-batch-size": copy_to("bound.groups_per_step", read=integer),
        "n-samples-per-prompt": copy_to(SAMPLES, read=integer),
        "rollout-max-response-len": copy_to(TOKENS, read=integer),
        "rollout-temperature": copy_to("sampling.temperature", read=number),
        "rollout-top-p": copy_to("sampling.top_p", read=number),
        "num-rollout": copy_to("run.steps", read=integer),
        "num-steps-per-rollout": copy_to("trainer.num_mini_batches", read=integer),
        "save-interval": positive("trainer.checkpoint_every"),
        "eval-interval": positive("eval.every"),
        "rollout-num-gpus-per-engine": copy_to("engine.tensor_parallel_size", read=integer),
        "advantage-estimator": choice(
            "algorithm.name", {**{name: name for name in ALGORITHMS[:5]}, "ppo": "ppo"}
        ),
        "use-kl-loss": KL_ON,
        "kl-loss-coef": KL_COEF,
        "entropy-coef": copy_to("algorithm.entropy_coef", read=number),
        "eps-clip": copy_to(CLIP_LOW, CLIP_HIGH, read=number),
        "eps-clip-high": copy_to(CLIP_HIGH, read=number),
        "lr": copy_to("optimizer.lr", read=number),
        "weight-decay": copy_to("optimizer.weight_decay", read=number),
        "adam-beta1": copy_to("optimizer.adam_beta1", read=number),
        "adam-beta2": copy_to("optimizer.adam_beta2", read=number),
        "clip-grad": copy_to("optimizer.clip_grad", read=number),
        "seed": copy_to("trainer.seed", read=integer),
        **{
            name: copy_to(f"parallel.{name.replace('-', '_')}", read=integer)
            for name in (
                "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
                "expert-model-parallel-size", "expert-tensor-parallel-size",
            )
        },
        "sequence-parallel": lambda value: {"parallel.sequence_parallel": True},
    },
}  # fmt: skip


def resolve_kl(settings: Settings) -> tuple[Settings, list[str]]:
    """Set the KL coefficient if the KL loss is on; return the settings and notes about a missing part."""
    found = dict(settings)
    is_on, coefficient = found.pop("use_kl_loss", False), found.pop("kl_loss_coef", None)
    if is_on and coefficient is not None:
        return found | {"algorithm.kl_coef": coefficient}, []
    if is_on:
        return found, ["the KL loss, which is on without a coefficient: set algorithm.kl_coef"]
    return found, ["the coefficient of the KL loss: the loss is off there"] if coefficient else []


def resolve_evaluation(settings: Settings) -> tuple[Settings, list[str]]:
    """Set the steps between evaluations if TRL's strategy is `steps`, which it is not by default."""
    found = dict(settings)
    strategy, steps = found.pop("eval_strategy", "no"), found.pop("eval_steps", None)
    if steps is not None and strategy == "steps":
        return found | {"eval.every": steps}, []
    return found, ["eval_steps: eval_strategy is not `steps` there; set eval.every"] if steps else []


LAYOUT_REASON = "[trainer], [parallel] and [placement] divide work in another way"
LOGS_REASON = "see [tracking] and the page of the run"
REWARD_REASON = "[reward] verifiers names your own function (docs/own_code.md)"
MEMORY_REASON = "tether chooses by the memory there is (docs/trainer.md)"
ALGORITHM_REASON = "see [algorithm] (docs/algorithms.md)"
DATA_REASON = "see [prompts]"
OMITTED: Mapping[str, Mapping[str, str]] = {
    "trl": {
        "per_device_*_batch_size": "set bound.groups_per_step: prompts of one step",
        "gradient_accumulation_steps": "set bound.groups_per_step: prompts of one step",
        "max_prompt_length": "earlier releases cut prompts by it; render.max_prompt_tokens drops them",
        "steps_per_generation": "set bound.groups_per_step and trainer.num_mini_batches",
        "num_train_epochs": "set run.steps",
        "reward_funcs": REWARD_REASON,
        "reward_weights": REWARD_REASON,
        "use_vllm": "tether always has an engine of its own",
        "vllm_*": "[engine] has other names; bounds of importance weights are in [algorithm]",
        "scale_rewards": "the algorithm decides; dr_grpo divides by nothing",
        "lr_scheduler_*": "set optimizer.lr_decay_style and lr_decay_steps",
        "warmup_ratio": "set optimizer.lr_warmup_steps",
        "use_peft": "set [lora]",
        "lora_*": "set [lora]",
        **dict.fromkeys(
            ("logging_*", "log_*", "report_to", "run_name", "num_completions_to_print"), LOGS_REASON
        ),
        **dict.fromkeys(
            ("bf16", "fp16", "dtype", "gradient_checkpointing*", "use_liger_kernel", "attn_implementation"),
            MEMORY_REASON,
        ),
        **dict.fromkeys(
            ("output_dir", "save_strategy", "save_total_limit"), "run.dir and trainer.keep_checkpoints"
        ),
        **dict.fromkeys(("eval_*", "dataset_test_split", "do_*"), "set [eval] and prompts.held_out"),
        **dict.fromkeys(
            ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), "set [eval]"
        ),
        **dict.fromkeys(("include_for_metrics", "batch_eval_metrics", "prediction_loss_only"), "set [eval]"),
        **dict.fromkeys(("push_to_hub", "hub_*"), "set run.hub, or run `tether push`"),
        **dict.fromkeys(("optim", "optim_*"), "see [optimizer]: Adam is the default"),
        **dict.fromkeys(
            ("deepspeed", "fsdp", "fsdp_*", "ddp_*", "ds3_*", "accelerator_config", "parallelism_config"),
            LAYOUT_REASON,
        ),
        **dict.fromkeys(("local_rank", "use_cpu", "torch_compile*", "debug"), LAYOUT_REASON),
        **dict.fromkeys(
            ("auto_find_batch_size", "tf32", "*_full_eval", "torch_empty_cache_steps", "liger_kernel_config"),
            MEMORY_REASON,
        ),
        **dict.fromkeys(("pad_to_multiple_of", "use_cache", "cast_lm_head_to_fp32"), MEMORY_REASON),
        **dict.fromkeys(("model_init_kwargs", "trust_remote_code"), "see [model]"),
        **dict.fromkeys(("load_in_*", "bnb_*", "use_bnb_*"), "the policy is not trained in 4 or 8 bits"),
        **dict.fromkeys(("use_rslora", "use_dora"), "see [lora]"),
        **dict.fromkeys(
            ("min_p", "repetition_penalty", "generation_kwargs", "num_generations_eval"), "see [sampling]"
        ),
        **dict.fromkeys(("cache_implementation", "*transformers_*"), "see [engine]"),
        "chat_template_kwargs": "see [render]",
        "max_tool_calling_iterations": "set environment.max_turns",
        **dict.fromkeys(("sync_ref_model", "ref_model_*"), "see [reference]"),
        **dict.fromkeys(("disable_dropout", "neftune_noise_alpha"), "the policy is trained without dropout"),
        **dict.fromkeys(
            ("importance_sampling_level", "delta", "sapo_*", "vespo_*", "off_policy_mask_threshold"),
            ALGORITHM_REASON,
        ),
        **dict.fromkeys(
            ("top_entropy_quantile", "use_adaptive_entropy", "entropy_*", "use_bias_correction_kl"),
            ALGORITHM_REASON,
        ),
        **dict.fromkeys(
            ("router_aux_loss_coef", "multi_objective_aggregation", "label_smoothing_factor"),
            ALGORITHM_REASON,
        ),
        **dict.fromkeys(
            ("dataloader_*", "dataset_streaming", "data_seed", "label_names", "length_column_name"),
            DATA_REASON,
        ),
        **dict.fromkeys(
            ("remove_unused_columns", "train_sampling_strategy", "ignore_data_skip"), DATA_REASON
        ),
        **dict.fromkeys(
            ("resume_from_checkpoint", "save_*", "enable_jit_checkpoint", "restore_callback_*"),
            "run.dir; a run resumes by itself",
        ),
        "full_determinism": "set run.deterministic",
        **dict.fromkeys(
            ("project", "trackio_*", "disable_tqdm", "include_num_*", "skip_memory_metrics"), LOGS_REASON
        ),
        **dict.fromkeys(
            ("average_tokens_across_devices", "ignore_bias_buffers", "reward_model_name_or_path"),
            "tether has no such setting",
        ),
    },
    "verl": {
        "trainer.total_epochs": "set run.steps",
        **dict.fromkeys(("trainer.nnodes", "trainer.n_gpus_per_node"), LAYOUT_REASON),
        **dict.fromkeys(("trainer.logger", "trainer.project_name", "trainer.experiment_name"), LOGS_REASON),
        **dict.fromkeys(("trainer.default_*", "trainer.resume_*"), "run.dir; a run resumes by itself"),
        "trainer.val_*": "set [eval]",
        "trainer.*": "see [run], [trainer] and [tracking]",
        **dict.fromkeys(("ray_kwargs.*", "transfer_queue.*"), "tether has no Ray"),
        **dict.fromkeys(("global_profiler.*", "profiler.*"), "set trainer.profile_steps"),
        "trainer.critic_warmup": "set [critic]",
        "critic.*": "set [critic]",
        "reward_model.*": "set [reward_model], or the verifier reward_model (docs/rewards.md)",
        "reward*": REWARD_REASON,
        "custom_reward_function.*": REWARD_REASON,
        "data.*": "see [prompts] and [render]",
        "algorithm.*": "see [algorithm]",
        "actor_rollout_ref.ref.*": "[reference] and its place",
        "actor_rollout_ref.hybrid_engine": LAYOUT_REASON,
        "actor_rollout_ref.model.lora*": "see [lora]",
        **dict.fromkeys(
            ("actor_rollout_ref.model.target_*", "actor_rollout_ref.model.exclude_*"), "see [lora]"
        ),
        "actor_rollout_ref.model.*gradient_checkpointing*": MEMORY_REASON,
        "actor_rollout_ref.model.*": "see [model] and [trainer]",
        "actor_rollout_ref.actor.optim.*": "see [optimizer]",
        "actor_rollout_ref.actor.loss_agg_mode": "the algorithm decides how tokens are weighted: grpo as "
        "seq-mean-token-mean, dapo as token-mean; others: docs/algorithms.md",
        "actor_rollout_ref.actor.kl_loss_type": "set algorithm.kl_estimator: kl is k1, mse k2, low_var_kl k3",
        **dict.fromkeys(
            (
                "actor_rollout_ref.actor.*micro_batch_size*",
                "actor_rollout_ref.actor.use_dynamic_bsz",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            ),
            MEMORY_REASON,
        ),
        "actor_rollout_ref.actor.*": "see [algorithm], [trainer] and [parallel]",
        "actor_rollout_ref.rollout.*": "see [engine], [sampling] and [rollout]",
    },
    "slime": {
        **dict.fromkeys(("load", "ref-load", "save"), "run.dir; tether reads and writes Hugging Face models"),
        **dict.fromkeys(("rm-type", "custom-rm-path", "reward-key"), REWARD_REASON),
        "global-batch-size": "follows from rollout-batch-size and num-steps-per-rollout",
        **dict.fromkeys(("attention-dropout", "hidden-dropout"), "the policy is trained without dropout"),
        **dict.fromkeys(("accumulate-*-in-fp32", "attention-softmax-in-fp32"), "always so, by default"),
        "attention-backend": "set trainer.attention_backend",
        "balance-data": "tether always balances replicas",
        "kl-loss-type": "set algorithm.kl_estimator",
        **dict.fromkeys(("optimizer", "lr-decay-style"), "set [optimizer]"),
        **dict.fromkeys(("recompute-*", "use-dynamic-batch-size", "max-tokens-per-gpu"), MEMORY_REASON),
        **dict.fromkeys(("actor-num-*", "rollout-num-gpus", "colocate", "num-gpus-per-node"), LAYOUT_REASON),
        **dict.fromkeys(("*eval-*", "eval-*"), "set [eval]"),
        "sglang-*": "set [engine] arguments",
        "use-tis": "set trainer.recompute_logprobs and algorithm.importance_cap",
        "use-wandb": LOGS_REASON,
        "wandb-*": LOGS_REASON,
    },
}
