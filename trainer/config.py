"""The settings of the trainer, a section each. No torch here: every process reads settings."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval, Predicate

from protocol.choices import NameIn
from protocol.paths import FilePath, set_first

RecomputeGranularity = Literal["", "selective", "full"]
AttentionBackend = Literal["auto", "torch", "flash_attn", "flash_attn_3", "transformer_engine", "segments"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Section `[parallel]`: ranks of the trainer. Names as in Megatron-core."""

    tensor_model_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = set_first(1)
    """Ranks that share every layer."""
    pipeline_model_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Groups of ranks that have the layers one after the other."""
    data_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = set_first(1)
    """Copies of the model, each with its part of the batch."""
    virtual_pipeline_model_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Parts of the model that each pipeline stage has, interleaved with the other stages' parts, so that
    stages wait less for each other. Divides the layers of every stage; needs at least two stages."""
    num_layers_in_first_pipeline_stage: Annotated[int, Interval(ge=0, le=10**4)] = 0
    """Layers of the first stage, which also has the embedding. 0: as many as the other stages with 0."""
    num_layers_in_last_pipeline_stage: Annotated[int, Interval(ge=0, le=10**4)] = 0
    """Layers of the last stage, which also has the output layer. 0: as many as the other stages with 0."""
    context_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Ranks that share the tokens of a micro-batch, for long samples: each computes its part of every one."""
    expert_model_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Ranks that share the experts of a layer. They are ranks of the sizes above and below: no more are
    needed."""
    expert_tensor_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Ranks that share the matrices of an expert."""
    sequence_parallel: bool = False
    """Divide norms and dropout along the sequence between tensor-parallel ranks."""
    use_distributed_optimizer: bool = True
    """Divide the optimizer's state between data-parallel ranks, and between context-parallel ones."""
    overlap_grad_reduce: bool = False
    """Add up gradients over data-parallel ranks, bucket by bucket, during the backward pass. A rank that runs
    out of memory then ends the trainer, because the others are in the middle of a sum."""

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
    """Section `[optimizer]`: steps of fp32 masters. Names as in Megatron-core."""

    name: Annotated[str, Predicate(NameIn("trainer.optimizers.registry:OPTIMIZERS"))] = "adamw"
    """adamw; reference only: muon (Muon on the matrices of hidden layers, AdamW on everything else, with the
    same lr), adamw_8bit (AdamW with moments of 8 bits, of bitsandbytes), or `MODULE:NAME`, an optimizer of
    torch or of your own (docs/own_code.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own optimizer."""
    muon_momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.95
    """muon: decay of the momentum, which is Nesterov's."""
    lr: Annotated[float, Interval(ge=0, le=1e3)] = set_first(1e-5)
    """Learning rate after the warm-up."""
    lr_warmup_steps: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """Updates in which the learning rate rises linearly from 0. Skipped ones do not count. 0 is off. A
    step is one update, unless `trainer.epochs_per_batch` or `num_mini_batches` is above 1."""
    lr_decay_style: Annotated[str, Predicate(NameIn("trainer.functional.learning_rate:STYLES"))] = "constant"
    """How the learning rate goes from `lr` to `min_lr` after the warm-up: constant (it stays), linear,
    cosine, or WSD (it stays, and falls linearly in the last `lr_wsd_decay_steps`); or `MODULE:FUNCTION`, a
    schedule of your own (docs/own_code.md)."""
    lr_decay_steps: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """Update at which it has reached `min_lr`, warm-up included. Needed unless it is constant."""
    lr_wsd_decay_steps: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """WSD: updates in which it falls."""
    min_lr: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """Learning rate at the end, unless it is constant."""
    weight_decay: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """Decoupled weight decay."""
    adam_beta1: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Interval(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    adam_eps: Annotated[float, Interval(ge=0, le=1)] = 1e-8
    """Added to the denominator of an update."""
    clip_grad: Annotated[float, Interval(ge=0, le=1e9)] = 1.0
    """Largest L2 norm of the gradient of all parameters. 0 is off."""
    grad_reduce_in_fp32: bool = True
    """megatron, bfloat16: add up gradients of micro-batches and ranks in float32. false: in the parameters'
    type, which takes half the memory and rounds more."""
    initial_loss_scale: Annotated[float, Interval(ge=1, le=2**32)] = 65536.0
    """megatron, float16: factor of the loss at the start, a power of two. A step whose gradient overflows is
    made again under half of it; a resumed run has the factor of its checkpoint."""
    loss_scale_window: Annotated[int, Interval(ge=1, le=10**9)] = 1000
    """megatron, float16: steps without overflow after which the factor is doubled."""
    cpu_offload: bool = False
    """megatron, fsdp: keep masters and moments in host memory, 12 bytes a parameter, and step them there.
    Gradients and new parameters are transferred while other parts step. Wants `trainer.threads`."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Section `[trainer]`: the training backend, its device, and the kept files of a run."""

    backend: Annotated[str, Predicate(NameIn("trainer.registry:BACKENDS"))] = set_first("megatron")
    """What trains: megatron, fsdp (any causal language model of transformers, sharded over data-parallel and
    tensor-parallel ranks), reference (the oracle, one rank) or scripted (dry runs without a model)."""
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Data type of parameters in forward and backward: float32, or bfloat16 or (megatron) float16 with fp32
    masters. float16 is for GPUs without bfloat16: it scales the loss, see `optimizer.initial_loss_scale`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto, cpu or cuda. auto: cuda where there is one."""
    attention_backend: AttentionBackend = "auto"
    """megatron, fsdp: the kernel of attention: torch (its fused one on a GPU in 16 bits, segments elsewhere),
    flash_attn_3 (torch's operators, computed by flash-attn-3 on a Hopper GPU), flash_attn, transformer_engine
    (the library of that name, on a GPU in 16 bits; not run), or segments (slow on a GPU). auto: torch."""
    micro_batch_tokens: Annotated[int, Interval(ge=0, le=10**8)] = set_first(0)
    """Tokens in one forward pass on each rank, prompts included; samples are packed into it without padding.
    A longer sample is a pass of its own. With `parallel.context_parallel_size` a pass has so many times as
    many, over all ranks that share it. 0, or auto: what suits the device and its memory."""
    micro_batch_size: Annotated[int, Interval(ge=1, le=10**6)] = 4096
    """Samples in one forward pass, at most."""
    compile: bool = False
    """fsdp: compile each layer with torch.compile, attention apart. The first passes take longer."""
    fp8: Literal["off", "tensorwise", "rowwise"] = "off"
    """fsdp, bfloat16: multiply matrices of the trained layers in FP8, by torchao, with a scale for a tensor
    (tensorwise) or for each row (rowwise); wants `compile`, and a GPU of compute capability 8.9 or more."""
    offload_parameters: bool = False
    """fsdp: keep the shards of the trained model in host memory, too, with `optimizer.cpu_offload`. A pass
    copies a layer's to the device, and its gradients back."""
    share_prefixes: Literal["auto", "off"] = "auto"
    """megatron, fsdp: whether tokens that samples of a group begin with alike, such as the prompt or an
    agent's history, are computed once for all of them: auto (where that saves more than it costs) or off.
    Both give the same, up to rounding. fsdp shares none where it does not pack samples."""
    recompute_granularity: RecomputeGranularity = ""
    """megatron, fsdp: activations that the backward pass computes again instead of keeping them: none
    (empty), full (whole layers) or, megatron only, selective (`recompute_modules` of each layer)."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """full: uniform (layers in pieces of `recompute_num_layers`; only each piece's input is kept) or block
    (the first `recompute_num_layers` of each pipeline stage or chunk, one by one; the others keep all)."""
    recompute_num_layers: Annotated[int, Interval(ge=1, le=10**4)] = 1
    """full: layers; see `recompute_method`."""
    recompute_modules: tuple[Literal["core_attn", "layernorm", "mlp"], ...] = ("layernorm", "mlp")
    """selective: core_attn, layernorm, mlp. core_attn saves little: no kernel used here keeps scores."""
    routing_replay: bool = False
    """megatron, mixtures of experts: use the experts that the engine chose for each token, instead of those
    that the trainer's router would choose; its weights of them are the trainer's. Engines: hf, megatron,
    sglang, and vllm on a GPU."""
    moe_aux_loss_coeff: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """megatron, models with experts: weight of the loss that keeps each sample's tokens spread over them
    (Megatron's seq_aux_loss), the mean over the samples of a step. 0 is off."""
    moe_z_loss_coeff: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """megatron, models with experts: weight of the square of the routers' log-sum-exp, which keeps their
    logits small, the mean over the samples of a step. 0 is off."""
    moe_router_bias_update_rate: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """megatron, models whose routers choose by score and bias: by how much a step raises the biases of
    experts with fewer tokens than the mean, and lowers the others' biases. 0 is off."""
    threads: Annotated[int, Interval(ge=1, le=4096)] = 1
    """CPU threads of each rank. auto: the cores that the engines leave, divided between the ranks."""
    checkpoint_every: Annotated[int, Interval(ge=1, le=10**9)] = set_first(20)
    """Steps between checkpoints. The last step always makes one."""
    keep_checkpoints: Annotated[int, Interval(ge=1, le=10**6)] = 2
    """Newest checkpoints that are kept."""
    archive_mb: Annotated[int, Interval(ge=0, le=10**9)] = 4096
    """Room for the records of steps that checkpoints cover, for `tether replay`, MiB. The oldest are deleted
    first. 0 keeps none."""
    max_skipped_steps: Annotated[int, Interval(ge=1, le=10**6)] = 3
    """Skipped steps in a row that halt the run; 1: the first one does. A step is skipped if its gradient is
    not finite, or if no token of its batch is within the bound; with several updates, if all of them are."""
    epochs_per_batch: Annotated[int, Interval(ge=1, le=1000)] = 1
    """Times that a step trains each sample of its batch (PPO epochs). It is one version all the same."""
    num_mini_batches: Annotated[int, Interval(ge=1, le=10**5)] = 1
    """Parts that a step divides its batch into, each of whole samples, drawn by `trainer.seed` and the step.
    Each is an optimizer update, with the weights of tokens in the loss that it would have as a whole batch.
    At most as many as there are samples."""
    recompute_logprobs: bool = False
    """Decoupled objective: the proximal policy is the trainer's at the start of the step, and the engine's
    enters by the weight of `algorithm.importance_cap` alone. In a step of one update its log-probabilities
    are the training pass's own, so it is free; with more they take a forward pass."""
    mismatch_share: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """Share of the groups on whose trained tokens the trainer's log-probabilities are compared with the
    engine's; a group is in it or not by its number. They come from the training pass, so all of them cost
    little."""
    mismatch_limit: Annotated[float, Interval(ge=0, le=1e9)] = 1.05
    """Largest `token_mult_prob_error` (1: agreement) at lag 0 before `mismatch_action` is taken. 0: off."""
    mismatch_action: Literal["warn", "stop"] = "warn"
    """What happens above `mismatch_limit`: warn (terminal, log, page), or stop (the run halts, and why)."""
    memory_gb: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """GPU memory that training takes on each rank at its peak, GiB: `micro_batch_tokens` = auto is chosen for
    it, and a colocated start is checked with it. 0: by `memory_fraction` and the expected peak."""
    memory_fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Share of a GPU's memory that training may take. auto: what `engine.memory_fraction` leaves where
    engines are on the same GPU, else all of it."""
    profile_steps: tuple[Annotated[int, Interval(ge=0, le=10**9)], ...] = ()
    """First and last step that torch.profiler watches on every rank, such as [10, 12]; the traces are
    RUN_DIR/profiles/step_K.rank_R.json.gz. Empty: none. A watched step is slower."""
    process_group_timeout_s: Annotated[float, Interval(ge=1, le=10**6)] = 600.0
    """megatron, fsdp: seconds that a rank waits for the others in a collective before the trainer ends."""
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
    """Seed of the trainer's random numbers; with `run.deterministic` of the samples', too."""
    publish_every: Annotated[int, Interval(ge=0, le=10**6)] = 1
    """Versions from one that engines get to the next: they generate with it until then, and
    `bound.max_staleness` has to be at least one less. 0: never, so that all samples are of the initial
    weights, for studies off policy."""
    step_s: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """scripted: seconds that a step sleeps."""

    def is_profiled(self, step: int) -> bool:
        """Return whether a step is among `profile_steps`."""
        return bool(self.profile_steps) and self.profile_steps[0] <= step <= self.profile_steps[-1]

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.epochs_per_batch * self.num_mini_batches


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Section `[algorithm]`: advantages and loss."""

    name: Annotated[str, Predicate(NameIn("trainer.algorithms.registry:ALGORITHMS"))] = set_first("grpo")
    """The algorithm, a module in `trainer/algorithms/`: grpo, dr_grpo, dapo, gspo, cispo, m2po, rloo,
    reinforce_plus_plus, reinforce_plus_plus_baseline, on_policy_distillation, sft or ppo; or `MODULE:NAME`,
    one of your own (docs/own_code.md)."""
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
    """What `importance_cap` compares: the ratio of each token (token), or the product of a sample's ratios
    (sequence)."""
    rejection_level: Literal["", "token", "sequence", "geometric"] = ""
    """Masked importance sampling: value that is compared with `rejection_low` and `rejection_high`, the ratio
    of each token (token), the product of a sample's ratios (sequence) or their geometric mean (geometric). A
    token outside has no policy gradient, at the other levels its whole sample. Empty: off."""
    rejection_low: Annotated[float, Interval(ge=0, le=1)] = 0.5
    """Smallest ratio that is trained, with `rejection_level`."""
    rejection_high: Annotated[float, Interval(ge=1, le=1e9)] = 2.0
    """Largest ratio that is trained, with `rejection_level`."""
    second_moment_threshold: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """m2po: second-moment trust region. Of the tokens whose gradient moves the policy further from the
    engine's, the mean of log(pi / pi_behaviour)^2 over an update's batch is capped to this: where it is more,
    the cap sets the clip, at least `clip_low` and `clip_high`. It costs a forward pass."""
    proximal_policy: Literal["start", "interpolated"] = "start"
    """With `trainer.recompute_logprobs`: start (the policy at the start of the step) or interpolated (a mean
    of the logarithms of the engine's policy and the present one, by the token's lag: no forward pass, however
    many updates a step makes)."""
    ess_scaling: Literal["", "sqrt", "linear"] = ""
    """Multiplies the learning rate of an update by the effective sample size of its samples' importance
    weights, as a share of the samples: by its root (sqrt, which suits Adam) or by itself (linear). Empty:
    off."""
    entropy_coef: Annotated[float, Interval(ge=-1e6, le=1e6)] = 0.0
    """Bonus for entropy, in nats. 0 is off. With `entropy_target` the one that the run starts with."""
    entropy_target: Annotated[float, Interval(ge=0, le=1e3)] = 0.0
    """Entropy, mean over trained tokens, nats, that a bonus is to hold: a step after one with less has the
    bonus, others have none. 0 is off."""
    entropy_coef_delta: Annotated[float, Interval(ge=0, le=1e6)] = 0.0001
    """With `entropy_target`: by how much the bonus rises after a step with less entropy, and falls else."""
    entropy_coef_max: Annotated[float, Interval(ge=0, le=1e6)] = 0.005
    """With `entropy_target`: largest bonus."""
    kl_coef: Annotated[float, Interval(ge=0, le=1e6)] = set_first(0.0)
    """Weight of the KL divergence to the initial model, or to the model of `[reference]`. 0: off, free."""
    use_kl_in_reward: bool = False
    """Whether that divergence, by k1, is subtracted from the reward instead of added to the loss, as in PPO
    and REINFORCE++: the sum over a sample's tokens before advantages are computed from the rewards; with ppo
    each token's term, with reinforce_plus_plus each token's term and the later ones'."""
    opd_kl_coef: Annotated[float, Interval(ge=0, le=1e6)] = 1.0
    """on_policy_distillation: factor of the reverse KL of each token, log pi - log pi_teacher, in its
    advantage."""
    opd_reward_coef: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """on_policy_distillation: factor of the reward, less the mean of its group, in the advantage. 0: rewards
    are ignored."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence from one token: k2 (its gradient equals the divergence's), k3 (never
    negative, lower variance) or k1 (its gradient is 0 on average: only to compare)."""
    advantage_eps: Annotated[float, Interval(ge=1e-8, le=1e6)] = 1e-4
    """Added to the standard deviation that advantages are divided by, where they are. Without it a group of
    equal rewards would have the advantage 0 / 0."""
    length_normalizer: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """dr_grpo: tokens that each sample's sum is divided by, usually the generation limit. 0: the longest
    sample of the batch."""
    truncated: Literal["train", "mask", "shape"] = "train"
    """Treatment of samples that ended at the length limit (finish reason `length`): train (as others), mask
    (they carry no gradient, but count for the other samples of their group), or shape (DAPO's soft overlong
    punishment of every sample's length, see `overlong_buffer`)."""
    overlong_buffer: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """shape: tokens before `overlong_length` in which the punishment grows from 0 to `overlong_penalty`."""
    overlong_length: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """shape: tokens of a sample, without its prompt, from which it is punished in full. 0:
    `sampling.max_tokens`."""
    overlong_penalty: Annotated[float, Interval(ge=0, le=1e6)] = 1.0
    """shape: penalty subtracted from the reward of a sample at `overlong_length`."""
    filter_groups: bool = False
    """DAPO's dynamic sampling: drop groups whose rewards are all equal before a step takes them, and generate
    groups of other prompts in their place."""
    group_filter: str = ""
    """With `filter_groups`: `MODULE:FUNCTION`, your own function that says which groups are kept, in place of
    the comparison of rewards (docs/own_code.md)."""
    max_filtered_batches: Annotated[int, Interval(ge=0, le=10**6)] = 10
    """The run halts when `filter_groups` has dropped so many batches (of `bound.groups_per_step` groups)
    since the last step. 0: it never does."""
    gamma: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """ppo: discount of later tokens' rewards, for each token between."""
    gae_lambda: Annotated[float, Interval(ge=0, le=1)] = 0.95
    """ppo: how far advantages trust rewards (1) instead of the critic's values (0)."""
    whiten_advantages: bool = True
    """ppo: shift and scale the advantages of the trained tokens of a batch to mean 0 and deviation 1."""


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Section `[weights]`: how new weights reach the engines."""

    transport: Annotated[str, Predicate(NameIn("trainer.weights.registry:TRANSPORTS"))] = "shm"
    """The transport: shm, disk, http, nccl, ipc or shared. docs/weights.md says which one to choose."""
    directory: FilePath = ""
    """Where versions are written. By default /dev/shm/tether-RUN-NONCE; disk and http: RUN_DIR/weights."""
    url: str = ""
    """http: where engines read them, by fsspec: an object store, or a web server. Empty: the trainer's."""
    bucket_mb: Annotated[int, Interval(ge=1, le=10**5)] = 64
    """Size of one bucket, MiB. A tensor that is larger has a bucket to itself."""
    keep: Annotated[int, Interval(ge=1, le=10**6)] = 2
    """shm, disk and http: versions that are kept for engines that are late."""
    delta: bool = False
    """Publish the changed elements alone; shm, disk and http write every `anchor_every`-th version whole."""
    anchor_every: Annotated[int, Interval(ge=1, le=10**6)] = 16
    """With `delta`: versions from a file of all bytes, which late engines read first, to the next."""
    host: str = "127.0.0.1"
    """nccl, ipc and http: address on which the trainer listens for engines."""
    backend: str = ""
    """nccl: "gloo" (CPU) or "nccl" (GPU); empty: for the trainer's device. ipc: "gloo" shares host memory."""
    timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 60.0
    """Limit for one transfer, to `url` too, seconds; with shared also for the engine to serve a version."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Section `[cluster]`: hosts that the trainer's ranks are divided between. docs/cluster.md says how."""

    nodes: Annotated[int, Interval(ge=0, le=4096)] = 0
    """Hosts of the trainer, each of which runs `python -m services.trainer`. 0: Slurm's number
    (SLURM_STEP_NUM_NODES, SLURM_NNODES) where `rendezvous` is set, else 1."""
    node_rank: Annotated[int, Interval(ge=-1, le=4095)] = -1
    """Number of this host, from 0, which has rank 0. -1: by SLURM_NODEID or JOB_COMPLETION_INDEX."""
    rendezvous: str = ""
    """HOST:PORT at which host 0 listens and the others find it. Needed with more than one host."""
    join_timeout_s: Annotated[float, Interval(ge=1, le=1e6)] = 600.0
    """Seconds that a host waits until all others have come."""
    peer_timeout_s: Annotated[float, Interval(ge=5, le=1e6)] = 30.0
    """Seconds without a sign of life from a host after which the trainer ends on all of them."""


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
    """qwen3_moe: experts of a layer."""
    num_experts_per_tok: Annotated[int, Interval(ge=1, le=10**4)] = 2
    """qwen3_moe: experts that a token passes through."""
    moe_intermediate_size: Annotated[int, Interval(ge=1, le=10**7)] = 64
    """qwen3_moe: width of an expert."""
    num_attention_heads: Annotated[int, Interval(ge=1, le=10**4)] = 4
    """Query heads of a layer."""
    num_key_value_heads: Annotated[int, Interval(ge=1, le=10**4)] = 4
    """Key and value heads of a layer; divides `num_attention_heads`."""
    head_dim: Annotated[int, Interval(ge=1, le=10**5)] = 32
    """Width of one head."""
    max_position_embeddings: Annotated[int, Interval(ge=1, le=10**8)] = 256
    """Longest sequence, tokens."""
    rope_theta: Annotated[float, Interval(gt=0, le=1e12)] = 10000.0
    """Base of the rotary frequencies."""
    tie_word_embeddings: bool = False
    """Whether input and output embedding are one tensor."""
    initializer_range: Annotated[float, Interval(ge=0, le=1e3)] = 0.05
    """Standard deviation of the random weights."""
    vocabulary: str = "0123456789=+- "
    """Characters (printable ASCII, newline), one token each. `<pad>` (0) and `<eos>` (1) come before them."""
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
    """Seed of the random weights."""
