"""Defines the settings of the trainer, one class per section. Does not import torch."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval, Predicate

from protocol.choices import NameIn
from protocol.paths import FilePath, basic_setting

RecomputeGranularity = Literal["", "selective", "full"]
AttentionBackend = Literal["auto", "torch", "flash_attn", "flash_attn_3", "transformer_engine", "segments"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Section `[parallel]`: ranks of the trainer. Names as in Megatron-core."""

    tensor_model_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = basic_setting(1)
    """Ranks that share every layer."""
    pipeline_model_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Number of pipeline stages; each has consecutive layers."""
    data_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = basic_setting(1)
    """Replicas of the model, each with a part of the batch."""
    virtual_pipeline_model_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Model chunks per pipeline stage, interleaved with the other stages' chunks to reduce pipeline bubbles.
    Divides the layers of every stage; needs at least two stages."""
    num_layers_in_first_pipeline_stage: Annotated[int, Interval(ge=0, le=10**4)] = 0
    """Layers of the first stage, which also has the embedding. 0: an equal share."""
    num_layers_in_last_pipeline_stage: Annotated[int, Interval(ge=0, le=10**4)] = 0
    """Layers of the last stage, which also has the output layer. 0: an equal share."""
    context_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Ranks that share the tokens of each sample, for long samples."""
    expert_model_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Ranks that share the experts of a layer. They are among the ranks of the other sizes and do not add to
    them."""
    expert_tensor_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Ranks that share the matrices of an expert."""
    sequence_parallel: bool = False
    """Shard norms and dropout along the sequence over tensor-parallel ranks."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer's state over data-parallel and context-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks, bucket by bucket, during the backward pass. If a rank then
    runs out of memory, the trainer ends, because the other ranks are in a collective."""

    @property
    def world_size(self) -> int:
        return (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.pipeline_model_parallel_size
            * self.data_parallel_size
        )


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Section `[optimizer]`: updates of fp32 masters. Names as in Megatron-core."""

    name: Annotated[str, Predicate(NameIn("trainer.optimizers.registry:OPTIMIZERS"))] = "adamw"
    """adamw; reference only: muon (Muon on the matrices of hidden layers, AdamW on all other parameters, with
    the same lr), adamw_8bit (AdamW with 8-bit moments, of bitsandbytes), or `MODULE:NAME`, an optimizer of
    torch or of your own (docs/own_code.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own optimizer."""
    muon_momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.95
    """muon: decay of the Nesterov momentum."""
    lr: Annotated[float, Interval(ge=0, le=1e3)] = basic_setting(1e-5)
    """Learning rate after the warm-up."""
    lr_warmup_steps: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """Updates in which the learning rate rises linearly from 0. Skipped updates do not count. 0 is off. A
    step is one update, unless `trainer.epochs_per_batch` or `num_mini_batches` is above 1."""
    lr_decay_style: Annotated[str, Predicate(NameIn("trainer.functional.learning_rate:STYLES"))] = "constant"
    """Schedule of the learning rate from `lr` to `min_lr` after the warm-up: constant (no decay), linear,
    cosine, or WSD (constant, then linear decay in the last `lr_wsd_decay_steps`); or `MODULE:FUNCTION`, a
    schedule of your own (docs/own_code.md)."""
    lr_decay_steps: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """Update at which `lr` reaches `min_lr`, including the warm-up. Needed unless the style is constant."""
    lr_wsd_decay_steps: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """WSD: updates of the linear decay."""
    min_lr: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """Final learning rate, unless it is constant."""
    weight_decay: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """Decoupled weight decay."""
    adam_beta1: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Interval(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    adam_eps: Annotated[float, Interval(ge=0, le=1)] = 1e-8
    """Added to the denominator of an update."""
    clip_grad: Annotated[float, Interval(ge=0, le=1e9)] = 1.0
    """Maximum L2 norm of the gradient of all parameters. 0 is off."""
    grad_reduce_in_fp32: bool = True
    """megatron, bfloat16: accumulate gradients of micro-batches and ranks in float32. false: in the
    parameters' dtype, with half the memory and more rounding."""
    initial_loss_scale: Annotated[float, Interval(ge=1, le=2**32)] = 65536.0
    """megatron, float16: initial loss scale, a power of two. A step whose gradient overflows is repeated with
    half the scale. A resumed run uses the scale of its checkpoint."""
    loss_scale_window: Annotated[int, Interval(ge=1, le=10**9)] = 1000
    """megatron, float16: steps without overflow after which the loss scale is doubled."""
    cpu_offload: bool = False
    """megatron, fsdp: keep masters and moments in host memory, 12 bytes per parameter, and step them there.
    Gradients and new parameters are transferred while other parts step. Set `trainer.threads`."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Section `[trainer]`: the training backend, its device, and the kept files of a run."""

    backend: Annotated[str, Predicate(NameIn("trainer.registry:BACKENDS"))] = basic_setting("megatron")
    """Training backend: megatron, fsdp (any causal language model of transformers, sharded over data-parallel
    and tensor-parallel ranks), reference (the oracle, one rank) or scripted (dry runs without a model)."""
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Data type of parameters in forward and backward: float32, or bfloat16 or (megatron) float16 with fp32
    masters. float16 is for GPUs without bfloat16 and scales the loss, see `optimizer.initial_loss_scale`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto, cpu or cuda. auto: cuda if available."""
    attention_backend: AttentionBackend = "auto"
    """megatron, fsdp: attention kernels: torch (its fused kernel on a GPU in 16 bits, otherwise segments),
    flash_attn_3 (torch's operators, computed by flash-attn-3 on a Hopper GPU), flash_attn, transformer_engine
    (the library of that name, on a GPU in 16 bits; not run), or segments (slow on a GPU). auto: torch."""
    micro_batch_tokens: Annotated[int, Interval(ge=0, le=10**8)] = basic_setting(0)
    """Tokens in one forward pass on each rank, including prompts; samples are packed without padding. A
    longer sample is a pass of its own. Context-parallel ranks share a pass of
    `parallel.context_parallel_size` times as many. 0, or auto: by device and memory."""
    micro_batch_size: Annotated[int, Interval(ge=1, le=10**6)] = 4096
    """Maximum number of samples in one forward pass."""
    compile: bool = False
    """fsdp: compile each layer, except attention, with torch.compile. The first passes take longer."""
    fp8: Literal["off", "tensorwise", "rowwise"] = "off"
    """fsdp, bfloat16: FP8 matrix multiplications in the trained layers, by torchao, with a scale per tensor
    (tensorwise) or per row (rowwise). Set `compile`; needs a GPU of compute capability 8.9 or more."""
    offload_parameters: bool = False
    """fsdp: keep the shards of the trained model in host memory, too, with `optimizer.cpu_offload`. A pass
    copies each layer to the device, and its gradients back."""
    share_prefixes: Literal["auto", "off"] = "auto"
    """megatron, fsdp: whether a common prefix of a group's samples, such as the prompt or an agent's history,
    is computed once: auto (if faster) or off. Both give the same results, up to rounding. fsdp shares no
    prefixes if it does not pack samples."""
    recompute_granularity: RecomputeGranularity = ""
    """megatron, fsdp: activations that the backward pass recomputes: none (empty), full (whole layers) or,
    megatron only, selective (`recompute_modules` of each layer)."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """full: uniform (groups of `recompute_num_layers` layers; only each group's input is kept) or block (the
    first `recompute_num_layers` of each pipeline stage or chunk, one by one; others keep all activations)."""
    recompute_num_layers: Annotated[int, Interval(ge=1, le=10**4)] = 1
    """full: number of layers; see `recompute_method`."""
    recompute_modules: tuple[Literal["core_attn", "layernorm", "mlp"], ...] = ("layernorm", "mlp")
    """selective: core_attn, layernorm, mlp. core_attn saves little: no kernel used here keeps scores."""
    routing_replay: bool = False
    """megatron, mixtures of experts: use the experts that the engine chose for each token instead of the
    choice of the trainer's router; the router weights are the trainer's. Engines: hf, megatron, sglang, and
    vllm on a GPU."""
    moe_aux_loss_coeff: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """megatron, models with experts: weight of the load-balancing loss of each sample (Megatron's
    seq_aux_loss), mean over the samples of a step. 0 is off."""
    moe_z_loss_coeff: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """megatron, models with experts: weight of the z-loss, the square of the routers' log-sum-exp, which
    keeps their logits small; mean over the samples of a step. 0 is off."""
    moe_router_bias_update_rate: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """megatron, models whose routers choose by score and bias: amount by which a step raises the biases of
    experts with fewer tokens than the mean, and lowers the other biases. 0 is off."""
    threads: Annotated[int, Interval(ge=1, le=4096)] = 1
    """CPU threads per rank. auto: the cores that the engines leave, divided between the ranks."""
    checkpoint_every: Annotated[int, Interval(ge=1, le=10**9)] = basic_setting(20)
    """Steps between checkpoints. The last step always writes a checkpoint."""
    keep_checkpoints: Annotated[int, Interval(ge=1, le=10**6)] = 2
    """Number of newest checkpoints to keep."""
    archive_mb: Annotated[int, Interval(ge=0, le=10**9)] = 4096
    """Disk space for the records of checkpointed steps, for `tether replay`, MiB. The oldest are deleted
    first. 0 keeps none."""
    max_skipped_steps: Annotated[int, Interval(ge=1, le=10**6)] = 3
    """Consecutive skipped steps that halt the run; 1: the first one does. A step is skipped if its gradient
    is not finite, or if no token of its batch is within the bound; with several updates, if all are skipped.
    """
    epochs_per_batch: Annotated[int, Interval(ge=1, le=1000)] = 1
    """Times that a step trains each sample of its batch (PPO epochs). The step is one version in any case."""
    num_mini_batches: Annotated[int, Interval(ge=1, le=10**5)] = 1
    """Number of mini-batches of a step, each of whole samples, drawn by `trainer.seed` and the step. Each
    mini-batch is one optimizer update, with the loss weights of tokens as in a whole batch. At most the
    number of samples."""
    recompute_logprobs: bool = False
    """Decoupled objective: the proximal policy is the trainer's policy at the start of the step; the engine's
    policy enters only through the weight of `algorithm.importance_cap`. In a step of one update, the training
    pass computes its log-probabilities, so it is free; with more updates, it costs a forward pass."""
    mismatch_share: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """Share of the groups, selected by group number, whose trained tokens are used to compare the trainer's
    log-probabilities with the engine's. The training pass computes them, so comparing all groups costs
    little."""
    mismatch_limit: Annotated[float, Interval(ge=0, le=1e9)] = 1.05
    """Largest `token_mult_prob_error` (1: agreement) at lag 0 before `mismatch_action` applies. 0: off."""
    mismatch_action: Literal["warn", "stop"] = "warn"
    """Action above `mismatch_limit`: warn (terminal, log, page), or stop (halts the run with the reason)."""
    memory_gb: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """Peak GPU memory of training on each rank, GiB: `micro_batch_tokens` = auto uses this budget, and a
    colocated start is checked against it. 0: by `memory_fraction` and the expected peak."""
    memory_fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Share of a GPU's memory that training may use. auto: the rest of `engine.memory_fraction` if engines
    are on the same GPU, otherwise all."""
    profile_steps: tuple[Annotated[int, Interval(ge=0, le=10**9)], ...] = ()
    """First and last step to profile with torch.profiler on every rank, such as [10, 12]; the traces are
    RUN_DIR/profiles/step_K.rank_R.json.gz. Empty: none. A profiled step is slower."""
    process_group_timeout_s: Annotated[float, Interval(ge=1, le=10**6)] = 600.0
    """megatron, fsdp: timeout for the other ranks in a collective, after which the trainer ends, seconds."""
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
    """Seed of the trainer's random numbers; with `run.deterministic`, also of the samples."""
    publish_every: Annotated[int, Interval(ge=0, le=10**6)] = 1
    """Interval between published versions: engines generate with one version until the next is published.
    `bound.max_staleness` must be at least this number - 1. 0: never publish, so all samples come from the
    initial weights, for off-policy studies."""
    step_s: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """scripted: duration of a step, seconds."""

    def is_profiled(self, step: int) -> bool:
        """Return whether a step is among `profile_steps`."""
        return bool(self.profile_steps) and self.profile_steps[0] <= step <= self.profile_steps[-1]

    @property
    def updates(self) -> int:
        """Optimizer updates per step."""
        return self.epochs_per_batch * self.num_mini_batches


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Section `[algorithm]`: advantages and loss."""

    name: Annotated[str, Predicate(NameIn("trainer.algorithms.registry:ALGORITHMS"))] = basic_setting("grpo")
    """Algorithm, a module in `trainer/algorithms/`: grpo, dr_grpo, dapo, gspo, cispo, m2po, rloo,
    reinforce_plus_plus, reinforce_plus_plus_baseline, on_policy_distillation, sft or ppo; or `MODULE:NAME`,
    an algorithm of your own (docs/own_code.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own algorithm."""
    clip_low: Annotated[float, Interval(ge=0, lt=1)] = 0.2
    """PPO ratio clip: the lower edge of the ratio is 1 - clip_low."""
    clip_high: Annotated[float, Interval(ge=0, le=1e6)] = 0.2
    """PPO ratio clip: the upper edge of the ratio is 1 + clip_high."""
    importance_cap: Annotated[float, Interval(ge=0, le=1e9)] = 2.0
    """Truncated importance sampling: weight min(pi_proximal / pi_behaviour, cap), with
    `trainer.recompute_logprobs`. 0 is off."""
    importance_level: Literal["token", "sequence"] = "token"
    """Ratio that `importance_cap` truncates: of each token (token), or the product over a sample (sequence).
    """
    rejection_level: Literal["", "token", "sequence", "geometric"] = ""
    """Masked importance sampling: ratio to compare with `rejection_low` and `rejection_high`: of each token
    (token), the product over a sample (sequence) or its geometric mean (geometric). A token outside has no
    policy gradient; at the other levels, the whole sample has none. Empty: off."""
    rejection_low: Annotated[float, Interval(ge=0, le=1)] = 0.5
    """Smallest ratio that is trained, with `rejection_level`."""
    rejection_high: Annotated[float, Interval(ge=1, le=1e9)] = 2.0
    """Largest ratio that is trained, with `rejection_level`."""
    second_moment_threshold: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """m2po: second-moment trust region. Considers the tokens of an update's batch whose gradient moves the
    policy further from the engine's. If their mean of log(pi / pi_behaviour)^2 exceeds this threshold, the
    clip is tightened to meet it, but not below `clip_low` and `clip_high`. Costs a forward pass."""
    proximal_policy: Literal["start", "interpolated"] = "start"
    """With `trainer.recompute_logprobs`: start (the policy at the start of the step) or interpolated
    (log-linear mean of the engine's and the current policy, weighted by the token's lag: no forward pass,
    however many updates a step has)."""
    ess_scaling: Literal["", "sqrt", "linear"] = ""
    """Scales the learning rate of an update by the effective sample size of its samples' importance weights,
    as a share of the samples: its square root (sqrt, which suits Adam) or itself (linear). Empty: off."""
    entropy_coef: Annotated[float, Interval(ge=-1e6, le=1e6)] = 0.0
    """Coefficient of the entropy bonus, nats. 0 is off. With `entropy_target`: initial coefficient."""
    entropy_target: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """Target of the entropy, mean over trained tokens, nats. A step has the bonus if the entropy of the
    previous step was below the target, otherwise none. 0 is off."""
    entropy_coef_delta: Annotated[float, Interval(ge=0, le=1e6)] = 0.0001
    """With `entropy_target`: change of the coefficient per step, up if the entropy is too low, else down."""
    entropy_coef_max: Annotated[float, Interval(ge=0, le=1e6)] = 0.005
    """With `entropy_target`: maximum coefficient."""
    kl_coef: Annotated[float, Interval(ge=0, le=1e6)] = basic_setting(0.0)
    """Weight of the KL divergence to the initial model, or to the model of `[reference]`. 0: off, free."""
    use_kl_in_reward: bool = False
    """Whether the divergence, by k1, is subtracted from the reward instead of added to the loss, as in PPO
    and REINFORCE++: as a sum over a sample's tokens before advantages are computed. With ppo, each token gets
    its own term; with reinforce_plus_plus, each token gets its term and the later terms."""
    opd_kl_coef: Annotated[float, Interval(ge=0, le=1e6)] = 1.0
    """on_policy_distillation: factor of each token's reverse KL, log pi - log pi_teacher, in its advantage.
    """
    opd_reward_coef: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """on_policy_distillation: factor of the reward, minus its group mean, in the advantage. 0: ignore
    rewards."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of the divergence: k2 (its gradient equals the divergence's), k3 (never negative,
    lower variance) or k1 (its gradient is 0 on average: only to compare)."""
    advantage_eps: Annotated[float, Interval(ge=1e-8, le=1e6)] = 1e-4
    """Added to the standard deviation by which advantages are divided, if they are. Prevents 0 / 0 in a group
    of equal rewards."""
    length_normalizer: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """dr_grpo: divisor of each sample's sum, tokens, usually the generation limit. 0: the longest sample of
    the batch."""
    truncated: Literal["train", "mask", "shape"] = "train"
    """Treatment of samples that ended at the length limit (finish reason `length`): train (as other samples),
    mask (no gradient, but they count for the other samples of their group), or shape (DAPO's soft overlong
    punishment by length, for every sample, see `overlong_buffer`)."""
    overlong_buffer: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """shape: tokens before `overlong_length` over which the penalty grows from 0 to `overlong_penalty`."""
    overlong_length: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """shape: tokens of a sample, without its prompt, from which the full penalty applies. 0:
    `sampling.max_tokens`."""
    overlong_penalty: Annotated[float, Interval(ge=0, le=1e6)] = 1.0
    """shape: full penalty, subtracted from the reward."""
    filter_groups: bool = False
    """DAPO's dynamic sampling: drop groups with equal rewards before a step takes them, and generate groups
    of other prompts instead."""
    group_filter: str = ""
    """With `filter_groups`: `MODULE:FUNCTION`, your own function that selects the groups to keep, instead of
    comparing rewards (docs/own_code.md)."""
    max_filtered_batches: Annotated[int, Interval(ge=0, le=10**6)] = 10
    """The run halts when `filter_groups` has dropped this number of batches (of `bound.groups_per_step`
    groups) since the last step. 0: never."""
    gamma: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """ppo: discount of later rewards per token."""
    gae_lambda: Annotated[float, Interval(ge=0, le=1)] = 0.95
    """ppo: lambda of generalized advantage estimation: only the critic's values (0) to only rewards (1)."""
    whiten_advantages: bool = True
    """ppo: normalize the advantages of a batch's trained tokens to mean 0 and standard deviation 1."""


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Section `[weights]`: transfer of new weights to the engines."""

    transport: Annotated[str, Predicate(NameIn("trainer.weights.registry:TRANSPORTS"))] = "shm"
    """Transport: shm, disk, http, nccl, ipc or shared. docs/weights.md helps to choose."""
    directory: FilePath = ""
    """Directory of versions. Default: /dev/shm/tether-RUN-NONCE; disk and http: RUN_DIR/weights."""
    url: str = ""
    """http: URL, for fsspec, from which engines read: an object store or web server. Empty: the trainer's."""
    bucket_mb: Annotated[int, Interval(ge=1, le=10**5)] = 64
    """Size of a bucket, MiB. A larger tensor has a bucket to itself."""
    keep: Annotated[int, Interval(ge=1, le=10**6)] = 2
    """shm, disk and http: number of versions kept for late engines."""
    delta: bool = False
    """Publish only changed elements; shm, disk and http write every `anchor_every`-th version in full."""
    anchor_every: Annotated[int, Interval(ge=1, le=10**6)] = 16
    """With `delta`: interval between versions in full, which late engines read first."""
    host: str = "127.0.0.1"
    """nccl, ipc and http: address on which the trainer listens for engines."""
    backend: str = ""
    """nccl: "gloo" (CPU) or "nccl" (GPU); empty: for the trainer's device. ipc: "gloo" shares host memory."""
    timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 60.0
    """Timeout for one transfer, to `url` too, seconds; with shared also for the engine to serve a version."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Section `[cluster]`: hosts of the trainer's ranks, see docs/cluster.md."""

    nodes: Annotated[int, Interval(ge=0, le=4096)] = 0
    """Number of hosts, each of which runs `python -m services.trainer`. 0: Slurm's number
    (SLURM_STEP_NUM_NODES, SLURM_NNODES) if `rendezvous` is set, else 1."""
    node_rank: Annotated[int, Interval(ge=-1, le=4095)] = -1
    """Index of this host, from 0; host 0 has rank 0. -1: by SLURM_NODEID or JOB_COMPLETION_INDEX."""
    rendezvous: str = ""
    """HOST:PORT at which host 0 listens for the other hosts. Required with several hosts."""
    join_timeout_s: Annotated[float, Interval(ge=1, le=1e6)] = 600.0
    """Timeout for all hosts to join, seconds."""
    peer_timeout_s: Annotated[float, Interval(ge=5, le=1e6)] = 30.0
    """Timeout for a sign of life from a host, after which the trainer ends on all hosts, seconds."""


@dataclass(frozen=True, slots=True)
class ScratchConfig:
    """Section `[model.scratch]`: a small random model. Names as in Hugging Face configurations."""

    architecture: str = "qwen2"
    """qwen2, qwen3, llama, or qwen3_moe, which has experts in every layer."""
    hidden_size: Annotated[int, Interval(ge=1, le=10**6)] = 128
    """Width of the residual stream."""
    intermediate_size: Annotated[int, Interval(ge=1, le=10**7)] = 128
    """Width of the MLP."""
    num_hidden_layers: Annotated[int, Interval(ge=1, le=10**4)] = 2
    """Layers."""
    num_experts: Annotated[int, Interval(ge=1, le=10**4)] = 4
    """qwen3_moe: experts per layer."""
    num_experts_per_tok: Annotated[int, Interval(ge=1, le=10**4)] = 2
    """qwen3_moe: experts per token."""
    moe_intermediate_size: Annotated[int, Interval(ge=1, le=10**7)] = 64
    """qwen3_moe: width of an expert."""
    num_attention_heads: Annotated[int, Interval(ge=1, le=10**4)] = 4
    """Query heads per layer."""
    num_key_value_heads: Annotated[int, Interval(ge=1, le=10**4)] = 4
    """Key and value heads per layer; divides `num_attention_heads`."""
    head_dim: Annotated[int, Interval(ge=1, le=10**5)] = 32
    """Width of a head."""
    max_position_embeddings: Annotated[int, Interval(ge=1, le=10**8)] = 256
    """Maximum sequence length, tokens."""
    rope_theta: Annotated[float, Interval(gt=0, le=1e12)] = 10000.0
    """Base of the rotary frequencies."""
    tie_word_embeddings: bool = False
    """Whether input and output embeddings are tied."""
    initializer_range: Annotated[float, Interval(ge=0, le=1e3)] = 0.05
    """Standard deviation of the random weights."""
    vocabulary: str = "0123456789=+- "
    """Characters (printable ASCII, newline), one token each, after `<pad>` (0) and `<eos>` (1)."""
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
    """Seed of the random weights."""
