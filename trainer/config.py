"""Defines the settings of the trainer, a section each. No torch here: every process reads settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Section `[parallel]`. Names as in Megatron-core."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each layer; must divide the model's attention heads and feed-forward rows."""
    pipeline_model_parallel_size: int = 1
    """Stages that split the layers; must divide the model's number of layers."""
    data_parallel_size: int = 1
    """Copies of the model, each of which trains a share of every batch."""
    sequence_parallel: bool = False
    """Whether norms and residuals are split along the sequence over the tensor ranks; no effect with one."""
    use_distributed_optimizer: bool = True
    """Whether masters and moments are sharded over the data-parallel ranks; no effect with one."""

    @property
    def world_size(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Section `[optimizer]`. AdamW on fp32 masters. Names as in Megatron-core."""

    lr: float = 1e-5
    """Learning rate after warm-up; constant from there on."""
    lr_warmup_steps: int = 0
    """Steps over which the learning rate grows linearly to `lr`; 0 is no warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    adam_beta1: float = 0.9
    """Decay of the first moment's running mean, in [0, 1)."""
    adam_beta2: float = 0.95
    """Decay of the second moment's running mean, in [0, 1)."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest L2 norm of the whole gradient, which is scaled down to it; 0 does not clip."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Section `[trainer]`."""

    backend: str = "megatron"
    """Training backend: megatron, reference or scripted (`trainer/registry.py`)."""
    dtype: str = "float32"
    """Dtype of the parameters in forward and backward: float32 or bfloat16 (with fp32 masters)."""
    device: str = "auto"
    """Device to train on: auto (a GPU if there is one), cpu or cuda."""
    micro_batch_size: int = 16
    """Samples in one forward pass."""
    threads: int = 1
    """CPU threads of each rank."""
    checkpoint_every: int = 20
    """Steps between checkpoints; the last step always makes one."""
    keep_checkpoints: int = 2
    """Checkpoints, and exports, that are kept; older ones are removed."""
    archive_mb: int = 4096
    """MiB for the records of steps that checkpoints cover, for `tether replay`; the oldest are removed first.
    0 keeps none."""
    recompute_logprobs: bool = False
    """Compute the proximal log-probabilities with the trainer before each step (decoupled objective)."""
    memory_gb: float = 0.0
    """colocated only: GiB of GPU memory that training takes on each rank at its peak, for the check before the
    start; 0: estimated from the model's size, without activations."""
    seed: int = 0
    """Seed of torch's random generators and of the adapters' initial values."""
    step_s: float = 0.0
    """scripted only: seconds that a step sleeps."""


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Section `[algorithm]`."""

    name: str = "grpo"
    """Algorithm: grpo or dr_grpo (`trainer/algorithms/registry.py`)."""
    clip_low: float = 0.2
    """PPO ratio clip: the ratio's lower edge is 1 - clip_low."""
    clip_high: float = 0.2
    """PPO ratio clip: the ratio's upper edge is 1 + clip_high."""
    importance_cap: float = 2.0
    """Truncated importance sampling: weight min(pi_proximal / pi_behaviour, cap) where proximal
    log-probabilities are recomputed; 0 is off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per nat; 0 is off."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial model (k3 estimator), per nat; 0 is off and costs nothing."""
    advantage_eps: float = 1e-4
    """grpo: added to a group's standard deviation of rewards before the advantages are divided by it."""
    length_normalizer: int = 0
    """dr_grpo: tokens that each sample's sum is divided by, usually the generation limit; 0 takes the longest
    sample of the batch."""


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Section `[weights]`."""

    transport: str = "shm"
    """How weights reach the engines: shm, disk, nccl, ipc or shared (`trainer/weights/registry.py`)."""
    directory: str = ""
    """shm and disk: directory that versions are written to; empty: /dev/shm/tether-RUN-NONCE and
    RUN_DIR/weights."""
    bucket_mb: int = 64
    """MiB of a bucket, the unit in which weights are laid out and sent."""
    keep: int = 2
    """Versions kept for engines that are late; the newest is always kept."""
    host: str = "127.0.0.1"
    """nccl and ipc: address on which the trainer listens for engines."""
    backend: str = ""
    """nccl: process group backend, gloo (CPU) or nccl (GPU); empty: the one for the trainer's device."""
    timeout_s: float = 60.0
    """nccl and ipc: seconds that a new connection may stay silent, and that one transfer of a version may take.
    shared: seconds that the trainer waits for the engine to serve a version before it fails."""


@dataclass(frozen=True, slots=True)
class ScratchConfig:
    """Section `[model.scratch]`. Names as in Hugging Face configurations."""

    architecture: str = "qwen2"
    """Model family: qwen2, qwen3 or llama."""
    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 128
    """Width of the feed-forward layers."""
    num_hidden_layers: int = 2
    """Number of layers."""
    num_attention_heads: int = 4
    """Query heads of a layer."""
    num_key_value_heads: int = 4
    """Key and value heads of a layer; must divide `num_attention_heads`."""
    head_dim: int = 32
    """Width of one attention head."""
    max_position_embeddings: int = 256
    """Longest sequence, tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    tie_word_embeddings: bool = False
    """Whether the output layer is the embedding."""
    initializer_range: float = 0.05
    """Standard deviation of the random initial weights."""
    vocabulary: str = "0123456789=+- "
    """Characters (printable ASCII, newline), one token each; `<pad>` (0) and `<eos>` (1) come before them."""
    seed: int = 0
    """Seed of the initial weights."""
