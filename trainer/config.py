"""The settings of the trainer, a section each. No torch here: every process reads settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Section `[parallel]`. Names as in Megatron-core."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    data_parallel_size: int = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True

    @property
    def world_size(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Section `[optimizer]`. AdamW on fp32 masters. Names as in Megatron-core."""

    lr: float = 1e-5
    lr_warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Section `[trainer]`."""

    backend: str = "megatron"
    """megatron, reference or scripted."""
    dtype: str = "float32"
    """Of parameters in forward and backward: float32 or bfloat16 (with fp32 masters)."""
    device: str = "auto"
    """auto, cpu or cuda."""
    micro_batch_size: int = 16
    """Samples in one forward pass."""
    threads: int = 1
    """CPU threads of each rank."""
    checkpoint_every: int = 20
    """Steps between checkpoints; the last step always makes one."""
    keep_checkpoints: int = 2
    archive_mb: int = 4096
    """Room for the records of steps that checkpoints cover, for `tether replay`; the oldest go first. 0 keeps
    none."""
    recompute_logprobs: bool = False
    """Compute the proximal log-probabilities with the trainer before each step (decoupled objective)."""
    memory_gb: float = 0.0
    """colocated only: GPU memory that training takes on each rank at its peak, GiB, for the check before the
    start; 0: reckoned from the model's size, without activations."""
    seed: int = 0
    step_s: float = 0.0
    """scripted only: seconds that a step sleeps."""


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Section `[algorithm]`."""

    name: str = "grpo"
    """Module in `trainer/algorithms/`: grpo, dr_grpo."""
    clip_low: float = 0.2
    """PPO ratio clip: the ratio's lower edge is 1 - clip_low."""
    clip_high: float = 0.2
    importance_cap: float = 2.0
    """Truncated importance sampling: weight min(pi_proximal / pi_behaviour, cap) where proximal
    log-probabilities are recomputed; 0 is off."""
    entropy_coef: float = 0.0
    """Bonus for entropy, nats."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial model (k3 estimator); 0 is off and costs nothing."""
    advantage_eps: float = 1e-4
    length_normalizer: int = 0
    """dr_grpo: tokens that each sample's sum is divided by, usually the generation limit; 0 takes the longest
    sample of the batch."""


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Section `[weights]`."""

    transport: str = "shm"
    """Module in `trainer/weights/` and `rollout/weights/`: shm, disk, nccl, ipc, shared."""
    directory: str = ""
    """shm and disk: where versions are written; by default /dev/shm/tether-RUN-NONCE and RUN_DIR/weights."""
    bucket_mb: int = 64
    keep: int = 2
    """Versions kept for engines that are late; the newest is always kept."""
    host: str = "127.0.0.1"
    """nccl and ipc: address on which the trainer listens for engines."""
    backend: str = ""
    """nccl: process group backend, "gloo" (CPU) or "nccl" (GPU); empty: what the trainer's device takes."""
    timeout_s: float = 60.0
    """Also, with shared: how long the trainer waits for the engine to serve a version before it works on the
    next."""


@dataclass(frozen=True, slots=True)
class ScratchConfig:
    """Section `[model.scratch]`. Names as in Hugging Face configurations."""

    architecture: str = "qwen2"
    """qwen2, qwen3 or llama."""
    hidden_size: int = 128
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 256
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.05
    vocabulary: str = "0123456789=+- "
    """Characters (printable ASCII, newline), one token each; `<pad>` (0) and `<eos>` (1) come before them."""
    seed: int = 0
