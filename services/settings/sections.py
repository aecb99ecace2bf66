"""Composes the sections of all components into the settings of a run.

Most sections are frozen dataclasses next to their component; this module defines the other sections. A
field's annotation has its range (`protocol.validation`), the docstring below the field its meaning. `python
docs/settings_pages.py` generates `docs/settings.md` from them.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import AfterValidator

from protocol.device.shared_layout import TRANSPORT
from protocol.errors import SettingsError
from protocol.host.hub import Kind, is_commit, is_hub_name, snapshot_dir
from protocol.ids import checked_run_id
from protocol.paths import FilePath, HubPath, basic_setting
from protocol.staleness import Bound, GroupsPerStep, MaxStaleness, Policy
from protocol.weights.lora import LoraConfig
from reward.config import RewardConfig
from rollout.config import EnvironmentConfig, SamplingConfig
from rollout.engines.base import EngineConfig
from rollout.prompts.base import PromptConfig
from rollout.prompts.named_source import HeldOutConfig
from rollout.render import RenderConfig
from services.bus.config import BusConfig
from services.ledger.limits import ARCHIVE_LIMIT
from services.settings.processes import ServicesConfig
from services.settings.tracking import TrackingConfig
from trainer.algorithms.registry import ALGORITHMS
from trainer.backends.plain_copy import quantization_of
from trainer.config import (
    AlgorithmConfig,
    ClusterConfig,
    OptimizerConfig,
    ParallelConfig,
    ScratchConfig,
    TrainerConfig,
    WeightConfig,
)
from trainer.memory.expected import ITEM_BYTES
from trainer.roles.config import (
    CriticConfig,
    FrozenConfig,
    PlacementConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Section `[run]`: name, directory and length of the run."""

    name: Annotated[str, AfterValidator(checked_run_id)] = basic_setting("run")
    """Name of the run in the ledger: lower-case letters, digits, `-` and `_`."""
    dir: FilePath = basic_setting("")
    """Directory for all files of the run. Empty: runs/NAME in the working directory."""
    steps: Annotated[int, Interval(ge=1, le=10**9)] = basic_setting(100)
    """Number of optimizer steps after which the run is done."""
    deterministic: bool = False
    """Make the run reproducible bit for bit, with any number of workers and across crashes. The groups of a
    step are generated with the version E steps before it, and samples are seeded by `trainer.seed`, group and
    place (docs/reproducible.md)."""
    lockstep: bool = True
    """With `deterministic`: commit no version during a sample, and train groups in order. false: the order of
    work depends on timing as in other runs, and `tether rerun` repeats it from the log."""
    remote: str = ""
    """URL of a directory for copies of checkpoints and exports, by fsspec: s3://BUCKET/RUN, gs://...,
    file:///... Credentials come from the environment. With an empty run directory the run is resumed from the
    newest complete copy (docs/resume.md). Empty: no copies."""
    hub: str = ""
    """Model on the Hugging Face hub, as OWNER/NAME, to which each export is uploaded as one commit, with the
    account of HF_TOKEN or `hf auth login`. A missing model is created as private. Empty: no uploads."""
    modules: tuple[FilePath, ...] = ()
    """Directories with your own Python modules, such as ["."] for the settings file's directory. They are
    searched last, so that they cannot replace modules of Python, tether or libraries."""


@dataclass(frozen=True, slots=True)
class BoundConfig:
    """Section `[bound]`: the staleness bound, and limits on failures that drop a group or halt the run."""

    max_staleness: MaxStaleness = basic_setting(1)
    """E: the largest lag, in versions, that a trained token may have. 0 is on-policy."""
    groups_per_step: GroupsPerStep = basic_setting(8)
    """B: number of prompt groups per step, the batch."""
    staleness_policy: Policy = basic_setting(Policy.MASK)
    """Policy when B groups are scored and a straggler would become too late. `wait`: the step waits for the
    straggler. `drop`: the straggler is dropped. `mask`: the step does not wait, and only tokens within the
    bound are trained from late groups."""
    max_attempts: Annotated[int, Interval(ge=1, le=10**6)] = 5
    """Number of leases after which a group is dropped; leases lost with their worker count."""
    drop_share: Annotated[float, Interval(gt=0, le=1)] = 0.9
    """The run halts if more than this share of the last `drop_window` finished groups was dropped for one
    reason."""
    drop_window: Annotated[int, Interval(ge=1, le=10**6)] = 64
    """Number of finished groups over which `drop_share` is computed."""

    @property
    def bound(self) -> Bound:
        """Part of the section that can change during the run."""
        return Bound(self.max_staleness, self.groups_per_step, self.staleness_policy)


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """Section `[ledger]`: the Redis or Valkey server with the state of the run."""

    url: str = ""
    """redis:// or rediss:// URL. Empty: an embedded server in the run directory. Set it by TETHER_REDIS_URL,
    because other users can read command lines."""
    password_file: FilePath = ""
    """File with the password, readable only by its owner, as an alternative to a password in the URL."""
    ca_file: FilePath = ""
    """rediss: CA certificates (PEM) that verify the server's certificate. Empty: the system's."""
    timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 10.0
    """Timeout of one call, seconds."""
    retry_s: Annotated[float, Interval(ge=0, le=1e6)] = 60.0
    """Seconds for which a lost connection is retried before the process ends."""
    ttl_s: Annotated[float, Interval(ge=0.1, le=1e6)] = 5.0
    """Time-to-live of a process in the registry, seconds; renewed every third of this time."""
    archive_limit: Annotated[int, Interval(ge=1, le=10**9)] = ARCHIVE_LIMIT
    """Maximum number of events that wait for the archive before leasing stops."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Section `[model]`: a Hugging Face directory or name, or a small random model."""

    path: HubPath = basic_setting("")
    """Model directory with config.json, tokenizer and safetensors, or the name of a model on the Hugging Face
    hub, such as "Qwen/Qwen2.5-0.5B-Instruct". A model in fp8 or mxfp4 is copied to RUN_DIR/model in the dtype
    of its config.json."""
    revision: str = ""
    """Branch, tag or commit of a model on the hub. Empty: main. The commit is recorded at the first start and
    does not change afterwards."""
    trust_remote_code: bool = False
    """Whether to run Python files from the run's model directories (`auto_map` in config.json) in trainer,
    engines and tokenizer. They run with all of your permissions: docs/security.md."""
    scratch: ScratchConfig | None = None
    """Random model to create in RUN_DIR/model, as an alternative to `path`."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Section `[rollout]`: the rollout workers."""

    groups_in_flight: Annotated[int, Interval(ge=1, le=10**5)] = basic_setting(32)
    """Number of groups that one worker generates or holds at a time. auto: 32, or as many more as the bound
    allows and two batches of `engine.max_running` need; 32 for environments whose samples hold more than a
    request."""
    lease_s: Annotated[float, Interval(ge=0.5, le=1e6)] = 30.0
    """Seconds after which a lease that was not extended may pass to another worker. Leases are extended every
    third of this time."""
    drain_s: Annotated[float, Interval(ge=0, le=1e6)] = 10.0
    """Seconds in which a stopping worker finishes its groups; then it releases the remaining groups."""
    prompt_failures: Annotated[int, Interval(ge=0, le=10**6)] = 1
    """Number of attempts at a prompt that cannot be rendered or generated, after which its group is dropped.
    Other engine failures count only for `bound.max_attempts`."""


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """Section `[monitor]`: the web page of the run."""

    enabled: bool = True
    """Whether `tether up` starts the monitor."""
    host: str = "127.0.0.1"
    """Address on which the page is served. Off loopback readers need a key."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """Port of the page. 0: any free port; `tether up` prints it."""
    key_file: FilePath = ""
    """File with the key that readers of the page need, readable only by its owner. Empty: no key on loopback;
    elsewhere RUN_DIR/monitor.key, which is created if missing."""


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Section `[eval]`: scores on held-out prompts, during and after the run."""

    at_end: bool = basic_setting(False)
    """Whether `tether up` scores the first and the last model at the end of the run."""
    prompts: Annotated[int, Interval(ge=1, le=10**9)] = 200
    """Maximum number of held-out prompts per set to score."""
    samples: Annotated[int, Interval(ge=0, le=10**5)] = 1
    """Number of sampled answers per prompt for the sampled score. 0: no sampled score."""
    temperature: Annotated[float, Interval(ge=0, le=100)] = 1.0
    """Sampling temperature of the sampled score. 0 is greedy."""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Nucleus sampling: draw from the most likely tokens whose probabilities sum to this value. 1 is off."""
    top_k: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Draw from the k most likely tokens. 0 is off."""
    success: Annotated[float, Interval(ge=-1e6, le=1e6)] = 1.0
    """Minimum reward of an answer that counts as correct for pass@k."""
    every: Annotated[int, Interval(ge=0, le=10**9)] = basic_setting(0)
    """Steps between two versions that are scored during the run; version 0 and the last version are scored,
    too. 0: none."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Overrides of `[engine]` for the engine of the evaluation."""
    best: str = ""
    """Score that selects the best version, which is kept in RUN_DIR/exports/best: `SET/greedy`, `SET/sampled`
    or `SET/pass@K`. Empty: the greedy score of the first set."""
    finish_s: Annotated[float, Interval(ge=0, le=1e6)] = 600.0
    """Seconds that `tether up` waits at the end of the run for the score of the last version."""
    sets: tuple[HeldOutConfig, ...] = ()
    """Held-out sets in addition to the held-out prompts of `[prompts]`."""


@dataclass(frozen=True, slots=True)
class ColocatedConfig:
    """Section `[colocated]`: trainer and engines take turns on the same GPUs."""

    enabled: bool = False
    """Whether trainer and engines take turns on the same GPUs."""
    wait_s: Annotated[float, Interval(ge=1, le=1e6)] = 300.0
    """Timeout of a turn, seconds: for the trainer until started engines sleep, and for an engine until other
    processes leave the device during the engines' turn."""


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """Section `[audit]`: a second process recomputes a share of the run and compares the results."""

    share: Annotated[float, Interval(ge=0, le=1)] = 0.01
    """Share of the groups that are audited, always the same groups, and the largest share of one processor's
    time that the audit takes. 0: no audit. docs/audit.md lists the checks."""
    action: Literal["warn", "stop", "quarantine"] = "warn"
    """Reaction to an alarm, which is always shown and written to RUN_DIR/alarms.jsonl. `warn`: no further
    action. `stop`: the run halts. `quarantine`: the process of an engine that disagrees ends, and its
    unfinished groups are leased again; other alarms warn."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All sections of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    bound: BoundConfig = field(default_factory=BoundConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    render: RenderConfig = field(default_factory=RenderConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    weights: WeightConfig = field(default_factory=WeightConfig)
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    services: ServicesConfig = field(default_factory=ServicesConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)

    @property
    def run_dir(self) -> Path:
        """Absolute path of the run directory."""
        return Path(self.run.dir or f"runs/{self.run.name}").absolute()

    @property
    def trainer_ranks(self) -> int:
        """Number of trainer processes on all hosts: ranks of the policy and of `[placement]`."""
        return self.parallel.world_size + self.placement.total

    @property
    def together(self) -> "Settings":
        """These settings with all models on the policy's ranks."""
        return replace(self, placement=PlacementConfig())

    def served_bytes(self, parameters: int) -> int:
        """Return the bytes of published versions on each rank's GPU during training, as a mean over ranks.

        Adapters are not counted.

        Args:
            parameters: number of parameters of the model.
        """
        weights = self.weights
        if weights.transport not in ("nccl", "ipc") or weights.backend == "gloo" or self.lora.rank:
            return 0
        versions = 2 if weights.transport == "ipc" or weights.delta else 1
        gathers = weights.transport == "ipc" and self.cluster.nodes > 1
        ranks = 1 if gathers else self.parallel.world_size
        return versions * parameters * ITEM_BYTES[self.engine.dtype] // ranks

    @property
    def shares_masters(self) -> bool:
        """Whether the engine reads the trainer's masters; with adapters only the base is shared."""
        return self.weights.transport == TRANSPORT and not self.lora.rank

    @property
    def ranks_per_host(self) -> int:
        """Number of trainer processes per host, one per GPU."""
        return -(-self.trainer_ranks // max(1, self.cluster.nodes))

    @property
    def is_lockstep(self) -> bool:
        """Whether the order of work is fixed, so that a repeated run is identical."""
        return self.run.deterministic and self.run.lockstep

    @property
    def sampling_seed(self) -> int | None:
        """Seed of the samples' random numbers; None lets engines choose."""
        return self.trainer.seed if self.run.deterministic else None

    @property
    def context_tokens(self) -> int:
        """Maximum number of prompt and completion tokens that every engine of the run accepts."""
        given = [entry.engine.get("max_model_len", self.engine.max_model_len) for entry in self.services.pool]
        return min(given, default=self.engine.max_model_len)

    @property
    def rendering(self) -> RenderConfig:
        """Section `[render]` with the effective limit of prompt tokens."""
        room = max(0, self.context_tokens - self.sampling.max_tokens)
        return replace(self.render, max_prompt_tokens=self.render.max_prompt_tokens or room)

    @property
    def model_dir(self) -> Path:
        """Absolute path of the initial model: `model.path`, or the random model in the run directory.

        A hub model is in this host's cache; `model.revision` must be a commit. A quantised model has a
        dequantised copy in the run directory, written by `services.settings.hub`.
        """
        own_model = self.run_dir / "model"
        return _plain_dir(self.source_dir("model"), own_model) if self.model.path else own_model

    def role_dir(self, role: str) -> Path:
        """Return the absolute model directory of a section other than `[model]`, as `model_dir`.

        Raises:
            SettingsError: the revision of a hub model is not a commit.
        """
        return _plain_dir(self.source_dir(role), self.run_dir / f"model_{role}")

    def source_dir(self, section: str) -> Path:
        """Return the absolute path of a section's model, quantised or not.

        Raises:
            SettingsError: the revision of a hub model is not a commit.
        """
        config: ModelConfig | FrozenConfig | CriticConfig = getattr(self, section)
        return _model_dir(config.path, config.revision, f"{section}.path")

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained with the policy."""
        return self.algorithm.name in ALGORITHMS.having("has_critic")

    @property
    def is_critic_on_policy_ranks(self) -> bool:
        """Whether the critic runs on the policy's ranks."""
        return self.needs_critic and not self.placement.critic

    @property
    def critic_dir(self) -> Path:
        """Absolute path of the critic's initial model: `critic.path`, or the policy's model.

        A hub model is resolved as in `model_dir`.
        """
        return self.role_dir("critic") if self.critic.path else self.model_dir


def _plain_dir(source: Path, copy: Path) -> Path:
    return source if quantization_of(source) is None else copy


def _model_dir(path: str, revision: str, setting: str) -> Path:
    if not is_hub_name(path):
        return Path(path).absolute()
    if not is_commit(revision):
        raise SettingsError(
            f"{setting} {path} has no commit yet: start the run by `tether up` or `python -m "
            "services.prepare`; services that are started alone read RUN_DIR/settings.json"
        )
    return snapshot_dir(Kind.MODEL, path, revision)
