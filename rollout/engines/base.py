"""Defines the interface of generation engines, and their requests and completions.

Engines take and return token ids, never text, and must return log-probabilities. Every engine must pass
`rollout/engines/contract/suite.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval, Predicate
from numpy.typing import NDArray

from protocol.choices import NameIn
from protocol.errors import Unsupported
from protocol.messages import WeightManifest
from protocol.paths import FilePath, ProgramPath, basic_setting


class KvPolicy(StrEnum):
    """Treatment of running requests' KV cache at a commit."""

    RECOMPUTE = "recompute"  # preempt and prefill again: new tokens use only KV of the new weights
    KEEP = "keep"  # keep the old KV: no pause, but new tokens partly use KV of old weights


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Section `[engine]`. Engines refuse settings that they do not support; the error names the field."""

    name: Annotated[str, Predicate(NameIn("rollout.engines.registry:ENGINES"))] = basic_setting("vllm")
    """Engine in `rollout/engines/registry.py`, or your own as `MODULE:NAME` (docs/own_code.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of your own engine."""
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Data type of the engine's parameters and of published weights; the trainer may use another."""
    tensor_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = basic_setting(1)
    """Number of tensor-parallel ranks of an engine, one GPU each."""
    memory_fraction: Annotated[float, Interval(gt=0, le=1)] = basic_setting(0.85)
    """Fraction of GPU memory for weights and KV cache; auto: 0.85, or 0.4 on a GPU shared with the trainer.
    Ignored on CPU."""
    kv_cache_mb: Annotated[int, Interval(ge=1, le=10**9)] = 64
    """Size of the KV cache on CPU, MiB."""
    max_model_len: Annotated[int, Interval(ge=1, le=10**8)] = basic_setting(1024)
    """Maximum length of prompt plus completion, tokens."""
    max_running: Annotated[int, Interval(ge=1, le=10**6)] = basic_setting(64)
    """Maximum batch size of decoding, requests; vllm and sglang run fewer while the KV cache is full. auto:
    512 for vllm and sglang on GPU, else 64."""
    enforce_eager: bool = True
    """vllm, sglang, megatron on GPU: run without CUDA graphs. Starts faster and uses less memory, but decodes
    slower."""
    attention_backend: str = ""
    """vllm and sglang on GPU: attention backend, by the engine's own name. Empty: the engine's default."""
    enable_sleep_mode: bool = False
    """vllm (GPU only) and sglang: enable sleep. Set by colocated runs."""
    enable_return_routed_experts: bool = False
    """hf, megatron, sglang, and vllm on GPU: record the experts chosen by a mixture of experts. Set by
    `trainer.routing_replay`."""
    drafts: Literal["off", "history", "history_always", "model", "model_always"] = "off"
    """vllm: speculative decoding, which verifies several draft tokens of a request per step. `off`;
    `history`: drafts from earlier answers to the same prompt, from the prompt and from the answer itself;
    `model`: drafts of `draft_model`. Both draft only while it is faster; `history_always` and `model_always`
    always draft, for measurements. The distribution of tokens and their log-probabilities stay the model's.
    """
    draft_model: FilePath = ""
    """vllm: directory of an EAGLE or EAGLE3 head of the model, or of a small model with the same vocabulary,
    for `drafts = "model"`. Empty: the multi-token prediction (MTP) layers of the model's checkpoint."""
    draft_lr: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """vllm: learning rate of the EAGLE head `draft_model`. The trainer trains the head on the samples of its
    last step while it waits for groups, and publishes it with the model. 0: the head is not trained."""
    num_speculative_tokens: Annotated[int, Interval(ge=1, le=32)] = 8
    """vllm: maximum tokens of a draft."""
    batch_invariant: bool = False
    """hf, vllm: compute each request in its own forward passes, so that results are bitwise independent of
    other requests; several times slower. Set by `run.deterministic`."""
    staging: Literal["device", "host", "layers", "auto", "copy"] = "device"
    """Location of a staged version. device: a copy in device memory. host: a copy in host memory, pinned with
    CUDA. layers: no copy; the version is verified in its files and the commit reads them tensor by tensor
    (file transports only). copy: device or host, whichever fits first. auto: the first of all that fits and
    that the transport allows. docs/weights.md compares the costs. sglang_jax supports only device."""
    staging_mb: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """Memory limit of the staging copy on each rank, MiB. 0: no limit."""
    threads: Annotated[int, Interval(ge=1, le=4096)] = 1
    """CPU threads of the engine. auto: its share of the cores; 1 for an engine on GPU."""
    kv: KvPolicy = KvPolicy.RECOMPUTE
    """KV cache of running requests at a weight update. `recompute`: recompute it under the new weights.
    `keep`: keep it without a pause; new tokens then partly use old KV."""
    stage_timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 120.0
    """Timeout of staging one version, seconds."""
    start_timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 300.0
    """Timeout of loading the model, seconds."""
    profile_versions: tuple[Annotated[int, Interval(ge=0, le=10**9)], ...] = ()
    """vllm, sglang, hf, megatron: first and last version to profile decoding with torch.profiler on every
    rank, such as [10, 12]. Traces: RUN_DIR/profiles/version_V.NAME.rank_R.json.gz. Empty: no profiling.
    Profiled steps are slower."""
    profile_decode_steps: Annotated[int, Interval(ge=1, le=1000)] = 32
    """Maximum profiled decode steps per version."""
    python: ProgramPath = ""
    """sglang, sglang_jax: Python interpreter with SGLang or sglang-jax. Empty: the rollout worker's
    interpreter."""
    environment: dict[str, str] = field(default_factory=dict)
    """sglang, sglang_jax: environment variables of the engine process; override the rollout worker's."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """vllm, sglang: arguments passed unchanged to vLLM's AsyncEngineArgs or SGLang's server. docs/engines.md
    lists the refused ones."""
    buffer_size_gb: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """megatron: KV cache size per rank, GiB; must hold one request of `max_model_len`. Requests occupy more
    of it as they grow, and wait while it is full. 0: enough for `max_running` requests of `max_model_len`."""
    max_batch_tokens: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """megatron: maximum tokens of a forward pass, including padding. 0: the largest of 8192, `max_model_len`
    and `max_running`."""
    seconds_per_token: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """scripted: delay per token, seconds."""
    straggler_share: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """scripted: fraction of groups that are slowed down by `straggler_factor`."""
    straggler_factor: Annotated[float, Interval(ge=0, le=1e6)] = 1.0
    """scripted: slowdown factor of stragglers."""

    @property
    def trained_head(self) -> str:
        """Directory of the draft head that the trainer trains and publishes; empty: no trained head."""
        return self.draft_model if self.draft_lr else ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request.

    Log-probabilities refer to the sampled distribution, after temperature, top-k and top-p.
    """

    max_tokens: int
    """Maximum tokens of the completion; at least 1."""
    temperature: float = 1.0
    """0: greedy, with log-probabilities at temperature 1."""
    top_p: float = 1.0
    """In (0, 1]; 1 disables top-p."""
    top_k: int = 0
    """0 disables top-k."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion; the stop token is its last token."""
    seed: int | None = None
    """None: chosen by the engine."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request for one completion."""

    id: str
    """Id, unique among running requests.

    The scripted engine derives tokens and delays from the part before the last '/'."""
    prompt: tuple[int, ...]
    """[P] token ids; not empty."""
    sampling: Sampling
    adapter: str = ""
    """Name of an adapter that the engine was created with; empty: the base model."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens generated for one request."""

    tokens: tuple[int, ...]
    """[T]; a sampled stop token is the last."""
    logprobs: tuple[float, ...]
    """[T] log-probabilities as sampled, nats."""
    spans: tuple[tuple[int, int], ...]
    """Rows (end, version): tokens from the previous row's end up to `end` were sampled under `version`.

    The last end is T."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    experts: NDArray[np.uint16] | None = None
    """[P + T - 1, L, K]: K experts chosen in each of L mixture layers for each input token, in the pass that
    first (SGLang: last) computed it. `UNKNOWN_EXPERT`: not recorded. None: recording is off."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache; 0 without such a cache."""

    def stopped_at(self, count: int | None) -> "Completion":
        """Return the first `count` tokens, at least 1, with finish reason "stop"; unchanged if None."""
        if count is None:
            return self
        less, ends = len(self.tokens) - count, [end for end, _ in self.spans]
        last = next(row for row, end in enumerate(ends) if end >= count)
        return Completion(
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            spans=(*self.spans[:last], (count, self.spans[last][1])),
            finish_reason="stop",
            experts=None if self.experts is None else self.experts[: len(self.experts) - less],
            cached_tokens=self.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """Version whose weights are live.

    A fresh engine serves ("", -1): it gets no lease before it has committed a version.
    """

    epoch: str = ""
    version: int = -1
    digest: int = 0
    """Digest of the version's manifest."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupancy of an engine; None: unknown."""

    running: int | None = None
    """Requests in the decode batch, including paused ones, without queued requests."""
    kv_use: float | None = None
    """Fraction of the KV cache used by running requests, 0 to 1; shared prefixes count once."""
    drafts_accepted: float | None = None
    """Fraction of draft tokens accepted so far, 0 to 1; None: no drafts yet."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional abilities of an engine. Unsupported operations raise `Unsupported`."""

    sleep: bool = False
    """Whether `sleep` and `wake` are supported."""
    seeds: bool = True
    """Whether `Sampling.seed` is supported."""


class Engine(ABC):
    """Generation engine whose weights can be updated while it generates.

    All methods are called from one event loop; many calls of `generate` run concurrently.

    Cancellation: a cancelled `generate` aborts its request. A cancelled `stage` discards the staged copy.
    `commit` must not be cancelled: it ends in applied, untouched (WeightError) or poisoned (PoisonedError).
    """

    capabilities: Capabilities
    draft_digest: str = ""
    """Digests per rank of the draft model's tensors that no version changes, set by `start`; empty: none."""

    @classmethod
    def preload(cls, config: EngineConfig) -> Callable[[], None] | None:
        """Import the modules that an engine with these settings imports at its start; no device is opened.

        Returns: a function that a fork of this process must call before it starts the engine, or None.

        Raises:
            ImportError: the engine's library is broken.
        """
        return None  # most engines import all modules with their own module

    @property
    @abstractmethod
    def served(self) -> Served:
        """The live version."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model from the model directory and prepare staging.

        Raises:
            EngineError: the engine is not ready within `start_timeout_s`; the message names the cause.
        """

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Generate until a stop token, the token limit, or abort.

        Raises:
            EngineError: the request is invalid for this engine (too long, empty, token out of range), or the
                engine died.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored.

        Their `generate` returns the tokens so far with finish_reason "abort".
        """

    @abstractmethod
    async def pause(self) -> None:
        """Stop between two decode steps and keep all running requests; new requests wait. Idempotent."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after `pause`. Idempotent."""

    @abstractmethod
    async def stage(self, manifest: WeightManifest) -> None:
        """Copy and verify a complete version next to the live weights while generation continues.

        A provisional manifest (`protocol/weights/provisional.py`) is staged as its bytes arrive. If the final
        manifest staged afterwards has the digest of these bytes, no byte is fetched again.

        Raises:
            WeightError: staging failed; the staged copy is discarded and the live weights are untouched.
            PoisonedError: as WeightError, and this process cannot stage again; the engine must be closed.
        """

    @abstractmethod
    async def commit(self, manifest: WeightManifest) -> float:
        """Copy the staged version over the live weights between two decode steps.

        Returns: the pause of running requests, milliseconds.

        Raises:
            WeightError: this version is not staged; the live weights are untouched.
            PoisonedError: live weights may be mixed; the engine must be closed.
        """

    @abstractmethod
    async def adopt(self, epoch: str, version: int) -> None:
        """Rename the live weights: a new epoch continues the branch with the same digest.

        Raises:
            WeightError: no version is live.
        """

    async def sleep(self) -> None:
        """Release accelerator memory (weights, staging copy and KV cache) until `wake`. Idempotent.

        The engine then serves no version (`served` as in a fresh engine) and refuses stage, commit and adopt.
        Running requests keep their tokens, and new requests wait; both continue after the first commit that
        follows `wake`. The caller of `sleep` must bound that wait. `abort`, `pause` and `close` work as
        usual.

        Raises:
            Unsupported: `capabilities.sleep` is false; the engine is unchanged.
            WeightError: a version is being staged; staging continues.
        """
        raise Unsupported(f"{type(self).__name__} cannot sleep: it keeps its memory until it is closed")

    async def wake(self) -> None:
        """Reallocate the memory; requests continue after the next commit. Idempotent.

        Raises:
            Unsupported: `capabilities.sleep` is false.
            EngineError: not enough memory. A multi-process engine is then poisoned; an in-process engine
                stays asleep.
        """
        raise Unsupported(f"{type(self).__name__} cannot sleep, so there is nothing to wake")

    async def occupancy(self) -> Occupancy:
        """Return the engine's load as of its last decode step. Cheap enough for a few calls per second.

        May wait for the running decode step; the caller should set a timeout, and may cancel the call.

        Raises:
            EngineError: the engine is dead, poisoned, closed or not started.
        """
        await self.check()
        return Occupancy()

    async def profile(self, file: Path, steps: int) -> None:
        """Profile the next decode steps of every rank with torch.profiler; each writes FILE.rank_R.json.gz.

        A running profile is written first.

        Args:
            file: path of the traces without suffix.
            steps: maximum number of steps to profile; 0: only end the running profile. The trace may be
                written when the step after the last profiled one begins.

        Raises:
            Unsupported: the engine cannot be profiled.
            EngineError: a trace cannot be written; the engine continues.
        """
        raise Unsupported(f"{type(self).__name__} cannot be watched by torch.profiler")

    @abstractmethod
    async def check(self) -> None:
        """Raise EngineError if the engine is dead, poisoned, closed or not started."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and everything that it started. Idempotent."""
