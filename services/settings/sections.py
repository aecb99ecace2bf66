"""Composes the sections of all components into the settings of a run.

Most sections are a frozen dataclass next to their component; those of no single component are here. The
range of a number stands on its field (`protocol.validation`), its meaning in the string below.
`docs/settings.md` is generated from them by `python docs/settings_pages.py`, and names the file of each
section.
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
from protocol.paths import FilePath, HubPath, set_first
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
    """Section `[run]`: name, place and length of the run."""

    name: Annotated[str, AfterValidator(checked_run_id)] = set_first("run")
    """Name of the run on the ledger: lower-case letters, digits, `-` and `_`."""
    dir: FilePath = set_first("")
    """Directory that everything of the run is written to. Empty: runs/NAME in the working directory."""
    steps: Annotated[int, Interval(ge=1, le=10**9)] = set_first(100)
    """Optimizer steps after which the run is done."""
    deterministic: bool = False
    """Make a run that can be repeated bit for bit, with any number of workers, and if some die: the groups
    of a step are generated with the version E steps before it, and samples draw their random numbers by
    `trainer.seed`, group and place (docs/reproducible.md)."""
    lockstep: bool = True
    """deterministic: commit no version in the middle of a sample, and train the groups in their order. false:
    the order of work depends on time as in any other run, and `tether rerun` makes it again from the log."""
    remote: str = ""
    """URL of a directory that checkpoints and exports are copied to, by fsspec: s3://BUCKET/RUN, gs://...,
    file:///... What it needs to log in comes from the environment. With an empty run directory the run is
    resumed from the newest complete copy (docs/resume.md). Empty: no copies."""
    hub: str = ""
    """Model on the Hugging Face hub, as OWNER/NAME, to which each export is uploaded as one commit, with the
    account of HF_TOKEN or `hf auth login`; it is made, private, if there is none. Empty: none."""
    modules: tuple[FilePath, ...] = ()
    """Directories with Python modules of your own, such as ["."] for the settings file's directory. They are
    searched last, so that none replaces a module of Python, of tether or of a library."""


@dataclass(frozen=True, slots=True)
class BoundConfig:
    """Section `[bound]`: the staleness bound, and how many failures end a group or halt the run."""

    max_staleness: MaxStaleness = set_first(1)
    """E: the largest lag, in versions, that a trained token may have. 0 is on-policy."""
    groups_per_step: GroupsPerStep = set_first(8)
    """B: prompt groups of one step, its batch."""
    staleness_policy: Policy = set_first(Policy.MASK)
    """What happens when B groups are scored and a straggler would become too late. `wait`: the step waits for
    it. `drop`: it is dropped. `mask`: the step does not wait, and of late groups only tokens within the bound
    are trained."""
    max_attempts: Annotated[int, Interval(ge=1, le=10**6)] = 5
    """Leases of one group, after which it is dropped; one that was lost with its worker counts."""
    drop_share: Annotated[float, Interval(gt=0, le=1)] = 0.9
    """The run halts when more than this share of the last `drop_window` finished groups was dropped for one
    reason."""
    drop_window: Annotated[int, Interval(ge=1, le=10**6)] = 64
    """Finished groups that `drop_share` looks back on."""

    @property
    def bound(self) -> Bound:
        """The part that can be changed while the run is on."""
        return Bound(self.max_staleness, self.groups_per_step, self.staleness_policy)


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """Section `[ledger]`: the Redis or Valkey server that holds the state of the run."""

    url: str = ""
    """redis:// or rediss:// URL. Empty: an embedded server in the run directory. Set it by TETHER_REDIS_URL,
    not on a command line, which other users can read."""
    password_file: FilePath = ""
    """File with the password, readable by its owner only, instead of a password in the URL."""
    ca_file: FilePath = ""
    """rediss: certificates (PEM) that the server's certificate is checked against. Empty: the system's."""
    timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 10.0
    """Limit for one call, seconds."""
    retry_s: Annotated[float, Interval(ge=0, le=1e6)] = 60.0
    """How long a lost connection is retried before the process gives up, seconds."""
    ttl_s: Annotated[float, Interval(ge=0.1, le=1e6)] = 5.0
    """Time-to-live of a process in the registry, seconds; renewed every third of it."""
    archive_limit: Annotated[int, Interval(ge=1, le=10**9)] = ARCHIVE_LIMIT
    """Events that may wait for the archive before leasing stops."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Section `[model]`: a Hugging Face directory or name, or a small random model."""

    path: HubPath = set_first("")
    """Model directory with config.json, tokenizer and safetensors, or the name of a model on the Hugging Face
    hub, such as "Qwen/Qwen2.5-0.5B-Instruct". Of one in fp8 or mxfp4 a copy in the dtype of its config.json
    is written to RUN_DIR/model."""
    revision: str = ""
    """Branch, tag or commit of a model on the hub. Empty: main. The commit of the first start is recorded and
    kept."""
    trust_remote_code: bool = False
    """Whether model directories of the run may bring Python files (`auto_map` in config.json), which trainer,
    engines and tokenizer then run, with all that you may do on the machine: docs/security.md."""
    scratch: ScratchConfig | None = None
    """Instead of `path`: the random model to make in RUN_DIR/model."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Section `[rollout]`: the rollout workers."""

    groups_in_flight: Annotated[int, Interval(ge=1, le=10**5)] = set_first(32)
    """Groups that one worker generates or holds at a time. auto: 32, or as many more as the bound allows and
    two batches of `engine.max_running` need; 32 for environments whose samples hold more than a request."""
    lease_s: Annotated[float, Interval(ge=0.5, le=1e6)] = 30.0
    """Seconds after which a lease that was not extended may go to another worker. Extended every third of
    it."""
    drain_s: Annotated[float, Interval(ge=0, le=1e6)] = 10.0
    """Seconds in which a stopping worker finishes the groups it holds before it hands them back."""
    prompt_failures: Annotated[int, Interval(ge=0, le=10**6)] = 1
    """Attempts of a prompt that cannot be rendered or generated before its group is dropped. What an engine
    fails for another reason counts for `bound.max_attempts` alone."""


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """Section `[monitor]`: the web page of the run."""

    enabled: bool = True
    """Whether `tether up` starts the monitor."""
    host: str = "127.0.0.1"
    """Address that the page is served on. Off loopback readers need a key."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """Port of the page. 0: any free port; `tether up` prints it."""
    key_file: FilePath = ""
    """File with the key that readers of the page need, readable by its owner only. Empty: no key on loopback;
    elsewhere RUN_DIR/monitor.key, which is made when it is missing."""


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Section `[eval]`: scores on held-out prompts, while a run is on and after it."""

    at_end: bool = set_first(False)
    """Whether `tether up` scores the first and the last model when the run is done."""
    prompts: Annotated[int, Interval(ge=1, le=10**9)] = 200
    """Held-out prompts of each set to score on, at most."""
    samples: Annotated[int, Interval(ge=0, le=10**5)] = 1
    """Sampled answers to each prompt for the sampled score. 0: no sampled score."""
    temperature: Annotated[float, Interval(ge=0, le=100)] = 1.0
    """Divides the logits before an answer of the sampled score is drawn. 0 is greedy."""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Draw answers from the most likely tokens that together have this probability. 1 is off."""
    top_k: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Draw answers from the k most likely tokens. 0 is off."""
    success: Annotated[float, Interval(ge=-1e6, le=1e6)] = 1.0
    """Reward from which an answer counts as right for pass@k."""
    every: Annotated[int, Interval(ge=0, le=10**9)] = set_first(0)
    """Steps between two versions that are scored while the run is on; version 0 and the last one are, too.
    0: none."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Settings of `[engine]` that are different for the engine of the evaluation."""
    best: str = ""
    """Score by which the best version is kept in RUN_DIR/exports/best: `SET/greedy`, `SET/sampled` or
    `SET/pass@K`. Empty: the first set's greedy score."""
    finish_s: Annotated[float, Interval(ge=0, le=1e6)] = 600.0
    """Seconds that `tether up` waits at the end of the run until the last version is scored."""
    sets: tuple[HeldOutConfig, ...] = ()
    """Held-out sets in addition to the prompts that `[prompts]` holds out."""


@dataclass(frozen=True, slots=True)
class ColocatedConfig:
    """Section `[colocated]`: trainer and engines use the same GPUs in turns."""

    enabled: bool = False
    """Whether they do."""
    wait_s: Annotated[float, Interval(ge=1, le=1e6)] = 300.0
    """Seconds that the trainer waits for engines to sleep (after they have started or staged), and an engine
    for others to leave the device in the engines' turn, before it gives up."""


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """Section `[audit]`: a share of the run is computed again by another party, and compared."""

    share: Annotated[float, Interval(ge=0, le=1)] = 0.01
    """Share of the groups that are audited, always the same ones, and most of one processor's time that it
    takes. 0: none. docs/audit.md has the checks."""
    action: Literal["warn", "stop", "quarantine"] = "warn"
    """What an alarm does besides being shown and written to RUN_DIR/alarms.jsonl. `warn`: nothing more.
    `stop`: the run halts. `quarantine`: the process of an engine that disagrees ends, and its unfinished
    groups are leased again; other alarms warn."""


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
        """Processes of the trainer on all of its hosts: the policy's ranks and ranks of `[placement]`."""
        return self.parallel.world_size + self.placement.total

    @property
    def together(self) -> "Settings":
        """The settings with all models on the policy's ranks."""
        return replace(self, placement=PlacementConfig())

    def served_bytes(self, parameters: int) -> int:
        """Return the bytes of versions that a rank has on its GPU while it trains, by the mean of the ranks.

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
        """Whether the engine reads the trainer's masters; with adapters the base alone is shared."""
        return self.weights.transport == TRANSPORT and not self.lora.rank

    @property
    def ranks_per_host(self) -> int:
        """Processes of the trainer on one of its hosts, each of which has a GPU."""
        return -(-self.trainer_ranks // max(1, self.cluster.nodes))

    @property
    def is_lockstep(self) -> bool:
        """Whether the order of work is fixed, so that the run is the same whenever it is made."""
        return self.run.deterministic and self.run.lockstep

    @property
    def sampling_seed(self) -> int | None:
        """Seed of the samples' random numbers; None: engines choose."""
        return self.trainer.seed if self.run.deterministic else None

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and completion together that every engine of the run takes."""
        given = [entry.engine.get("max_model_len", self.engine.max_model_len) for entry in self.services.pool]
        return min(given, default=self.engine.max_model_len)

    @property
    def rendering(self) -> RenderConfig:
        """Section `[render]` with the limit of prompts that is in force."""
        room = max(0, self.context_tokens - self.sampling.max_tokens)
        return replace(self.render, max_prompt_tokens=self.render.max_prompt_tokens or room)

    @property
    def model_dir(self) -> Path:
        """Absolute path of the initial model: `model.path`, or the random model in the run directory.

        For a name on the hub it is the place in this host's cache, and `model.revision` has to be a commit.
        Of a quantised one it is the copy in the run directory that `services.settings.hub` writes.
        """
        made = self.run_dir / "model"
        return _plain(self.given_dir("model"), made) if self.model.path else made

    def role_dir(self, role: str) -> Path:
        """Return the absolute path of the model that a section other than `[model]` names, as `model_dir`.

        Raises:
            SettingsError: as `model_dir`.
        """
        return _plain(self.given_dir(role), self.run_dir / f"model_{role}")

    def given_dir(self, section: str) -> Path:
        """Return the absolute path of the model that a section names, quantised or not.

        Raises:
            SettingsError: as `model_dir`.
        """
        config: ModelConfig | FrozenConfig | CriticConfig = getattr(self, section)
        return _model_dir(config.path, config.revision, f"{section}.path")

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained with the policy."""
        return self.algorithm.name in ALGORITHMS.having("has_critic")

    @property
    def critic_beside(self) -> bool:
        """Whether the critic is on the policy's ranks."""
        return self.needs_critic and not self.placement.critic

    @property
    def critic_dir(self) -> Path:
        """Absolute path of the model that the critic starts from: `critic.path`, or the policy's.

        For a name on the hub as `model_dir`.
        """
        return self.role_dir("critic") if self.critic.path else self.model_dir


def _plain(given: Path, made: Path) -> Path:
    return given if quantization_of(given) is None else made


def _model_dir(path: str, revision: str, setting: str) -> Path:
    if not is_hub_name(path):
        return Path(path).absolute()
    if not is_commit(revision):
        raise SettingsError(
            f"{setting} {path} has no commit yet: start the run by `tether up` or `python -m "
            "services.prepare`; services that are started alone read RUN_DIR/settings.json"
        )
    return snapshot_dir(Kind.MODEL, path, revision)
