"""Defines the interface of a generation engine, its requests and its completions.

An engine takes and returns tokens, never text, and must return log-probabilities. Every engine passes
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
from protocol.paths import FilePath, ProgramPath, set_first


class KvPolicy(StrEnum):
    """Treatment of running requests' KV cache at a commit."""

    RECOMPUTE = "recompute"  # preempt and prefill again: new tokens are computed from KV of the new weights
    KEEP = "keep"  # keep the old KV: no pause, but new tokens are computed partly from KV of old weights


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Section `[engine]`. An engine refuses a setting that it does not support, naming the field."""

    name: Annotated[str, Predicate(NameIn("rollout.engines.registry:ENGINES"))] = set_first("vllm")
    """The engine, a name of `rollout/engines/registry.py`; or `MODULE:NAME`, an engine of your own
    (docs/own_code.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of your own engine."""
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Data type of the engine's parameters. Weights are published in it, even if the trainer uses another."""
    tensor_parallel_size: Annotated[int, Interval(ge=1, le=4096)] = set_first(1)
    """Tensor-parallel ranks of one engine, a GPU each."""
    memory_fraction: Annotated[float, Interval(gt=0, le=1)] = set_first(0.85)
    """Share of a GPU's memory for weights and KV cache; auto: 0.85, or 0.4 on a GPU shared with the trainer.
    Not used on a CPU."""
    kv_cache_mb: Annotated[int, Interval(ge=1, le=10**9)] = 64
    """KV cache on a CPU, MiB."""
    max_model_len: Annotated[int, Interval(ge=1, le=10**8)] = set_first(1024)
    """Prompt and completion together, tokens."""
    max_running: Annotated[int, Interval(ge=1, le=10**6)] = set_first(64)
    """Most requests that are decoded in one batch; vllm and sglang decode fewer while their KV cache has no
    room for more. auto: 512 with these two on a GPU, else 64."""
    enforce_eager: bool = True
    """vllm, sglang, megatron on a GPU: run without CUDA graphs. That starts faster, leaves memory free, and
    decodes slower."""
    attention_backend: str = ""
    """vllm and sglang on a GPU: the attention kernels, by the engine's own name. Empty: the engine
    chooses."""
    enable_sleep_mode: bool = False
    """vllm (on a GPU) and sglang: make the engine able to sleep. Set by colocated runs."""
    enable_return_routed_experts: bool = False
    """hf, megatron, sglang, and vllm on a GPU: record which experts a mixture of experts chose. Set by
    `trainer.routing_replay`."""
    drafts: Literal["off", "history", "history_always", "model", "model_always"] = "off"
    """vllm: speculative decoding, several tokens of a request in one step: off, history (drafts from earlier
    answers to the same prompt, from the prompt and from the answer itself, while that is faster), model
    (drafts of `draft_model`, while that is faster), or history_always and model_always (also while it is
    slower, to measure). Tokens and log-probabilities stay the model's."""
    draft_model: FilePath = ""
    """vllm: directory of an EAGLE or EAGLE3 head of the model, or of a small model of its vocabulary, that
    drafts with `drafts = "model"`. Empty: the layers of the model's own checkpoint that predict further
    tokens (MTP)."""
    draft_lr: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """vllm: learning rate of the EAGLE head `draft_model`, which the trainer then trains while it waits for
    groups, on the samples of its last step; versions bring the head with the model. 0: it stays as it is
    loaded."""
    num_speculative_tokens: Annotated[int, Interval(ge=1, le=32)] = 8
    """vllm: most tokens of a draft."""
    batch_invariant: bool = False
    """hf, vllm: compute each request in passes of its own, so that its bits do not depend on other
    requests; several times slower. Set by `run.deterministic`."""
    staging: Literal["device", "host", "layers", "auto", "copy"] = "device"
    """Where a version is staged: device (a copy next to the parameters), host (a copy in host memory, pinned
    where there is CUDA), layers (verified in its files, and copied out of them tensor by tensor by the
    commit; transports of files), copy (device or host, the first that fits), or auto, the first of all
    that fits and that the transport allows. docs/weights.md has the price of each. sglang_jax has device
    alone."""
    staging_mb: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """Most memory for the staging copy of the weights on each rank, MiB. 0: as much as they take."""
    threads: Annotated[int, Interval(ge=1, le=4096)] = 1
    """CPU threads of the engine. auto: its share of the cores; 1 for an engine on a GPU."""
    kv: KvPolicy = KvPolicy.RECOMPUTE
    """What happens to the KV cache of running requests at an update. `recompute`: it is computed again under
    the new weights. `keep`: it stays, without a pause, and tokens rest partly on old KV."""
    stage_timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 120.0
    """How long staging one version may take, seconds."""
    start_timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 300.0
    """How long loading the model may take, seconds."""
    profile_versions: tuple[Annotated[int, Interval(ge=0, le=10**9)], ...] = ()
    """vllm, sglang, hf, megatron: first and last version under which torch.profiler watches every rank
    decode, such as [10, 12]; the traces are RUN_DIR/profiles/version_V.NAME.rank_R.json.gz. Empty: none. A
    watched decode step is slower."""
    profile_decode_steps: Annotated[int, Interval(ge=1, le=1000)] = 32
    """Most decode steps that are watched under one version."""
    python: ProgramPath = ""
    """sglang, sglang_jax: the Python interpreter that has SGLang or sglang-jax. Empty: the one of the rollout
    worker."""
    environment: dict[str, str] = field(default_factory=dict)
    """sglang, sglang_jax: environment variables of its process, which override the rollout worker's."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """vllm, sglang: arguments of vLLM's AsyncEngineArgs, or of SGLang's server, passed as they are.
    docs/engines.md lists the refused ones."""
    buffer_size_gb: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """megatron: KV cache of each rank, GiB. Requests wait while it has no room, of which they take more as
    they grow; it must hold one of `max_model_len`. 0: as much as `max_running` requests of `max_model_len`
    need."""
    max_batch_tokens: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """megatron: tokens of one forward pass, padding included. 0: 8192, or more if `max_model_len` or
    `max_running` is more."""
    seconds_per_token: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """scripted: delay for each token, seconds."""
    straggler_share: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """scripted: share of groups that take `straggler_factor` times longer."""
    straggler_factor: Annotated[float, Interval(ge=0, le=1e6)] = 1.0
    """scripted: how many times longer a straggler takes."""

    @property
    def trained_head(self) -> str:
        """Directory of the head that versions have, if the trainer trains it; empty: they have none."""
        return self.draft_model if self.draft_lr else ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request.

    Log-probabilities come from the distribution that was sampled from: after temperature, top-k and top-p.
    """

    max_tokens: int
    """Most tokens of the completion; at least 1."""
    temperature: float = 1.0
    """0 is greedy; log-probabilities are then those at temperature 1."""
    top_p: float = 1.0
    """Above 0 and at most 1; 1 is off."""
    top_k: int = 0
    """0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, and are its last token."""
    seed: int | None = None
    """None: the engine chooses."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to generate."""

    id: str
    """Unique among running requests.

    The scripted engine derives tokens and delays from the part before the last '/'.
    """
    prompt: tuple[int, ...]
    """[P] token ids; not empty."""
    sampling: Sampling
    adapter: str = ""
    """Name of one of the adapters that the engine was made with; empty: the model alone."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens that an engine generated for one request."""

    tokens: tuple[int, ...]
    """[T]; the stop token, if one was sampled, is the last."""
    logprobs: tuple[float, ...]
    """[T] nats, as sampled."""
    spans: tuple[tuple[int, int], ...]
    """Rows (end, version): tokens from the previous row's end up to `end` were sampled under `version`.

    The last end is T.
    """
    finish_reason: str
    """"stop", "length" or "abort"."""
    experts: NDArray[np.uint16] | None = None
    """[P + T - 1, L, K]: the experts that each of L mixture layers chose for each token that was an input, in
    the pass that computed it first (SGLang: last); `UNKNOWN_EXPERT` where the choice was not recorded. None:
    no choice was."""
    cached_tokens: int = 0
    """Tokens of the prompt whose KV was in the engine's prefix cache, so that it was not computed again; 0
    where there is no such cache."""

    def stopped_at(self, count: int | None) -> "Completion":
        """Return the first `count` tokens, at least 1, which ended with a stop; None: no stop is in them."""
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
    """Requests in the decoded batch, paused ones included; not those that wait for a place in it."""
    kv_use: float | None = None
    """Share of the KV cache that running requests hold, 0 to 1; a prefix that they share counts once."""
    drafts_accepted: float | None = None
    """Share of all drafted tokens that were accepted so far, 0 to 1; None: there were no drafts."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of an engine beyond the contract's core; what it lacks raises `Unsupported`."""

    sleep: bool = False
    """Whether `sleep` and `wake` are supported."""
    seeds: bool = True
    """Whether `Sampling.seed` is supported."""


class Engine(ABC):
    """Generation engine whose weights can be updated while it generates.

    All methods are called from one event loop; many calls of `generate` run at once.

    Cancellation: a cancelled `generate` aborts its request. A cancelled `stage` discards the staged copy.
    `commit` must not be cancelled: it ends in applied, untouched (WeightError) or poisoned (PoisonedError).
    """

    capabilities: Capabilities
    draft_digest: str = ""
    """Once started: digests, rank by rank, of the tensors that draft and that no version changes; empty:
    there are none."""

    @classmethod
    def preload(cls, config: EngineConfig) -> Callable[[], None] | None:
        """Import what an engine with these settings will import at its start; opens no device.

        Returns: what a fork of this process, which will have the engine, has to do at first, if anything.

        Raises:
            ImportError: the engine's library is broken.
        """
        return None  # most engines import nothing later than their module

    @property
    @abstractmethod
    def served(self) -> Served:
        """The version that is live now."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model from the model directory and prepare to stage.

        Raises:
            EngineError: if it is not ready within `start_timeout_s`; names the cause.
        """

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Generate until a stop token, the token limit, or abort.

        Raises:
            EngineError: if the request is not valid for this engine (too long, empty, token out of range)
                or the engine died.
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
        """Fetch a complete, verified copy of a version next to the live weights while generation continues.

        A provisional manifest (`protocol/weights/provisional.py`) is staged as its bytes arrive. When the
        version's final manifest is staged afterwards and has the digest of those bytes, no byte is fetched
        again.

        Raises:
            WeightError: the staged copy is discarded and the live weights are untouched.
            PoisonedError: the same, and this process cannot stage any more; the engine must be closed.
        """

    @abstractmethod
    async def commit(self, manifest: WeightManifest) -> float:
        """Copy the staged version over the live weights between two decode steps.

        Returns: for how long running requests were paused, milliseconds.

        Raises:
            WeightError: this version is not staged; the live weights are untouched.
            PoisonedError: live weights may be mixed; the engine must be closed.
        """

    @abstractmethod
    async def adopt(self, epoch: str, version: int) -> None:
        """Rename the live weights: a new epoch continues the branch with the same digest.

        Raises:
            WeightError: if no version is live.
        """

    async def sleep(self) -> None:
        """Release the accelerator's memory until `wake`: weights, staging copy and KV cache. Idempotent.

        The engine then serves no version (`served` is as in a fresh engine) and refuses to stage, commit and
        adopt. Running requests keep their tokens, and new ones wait; both continue only when a version has
        been committed after `wake`, and the caller of `sleep` has to bound that wait. `abort`, `pause` and
        `close` work as usual.

        Raises:
            Unsupported: if `capabilities.sleep` is false; the engine is unchanged.
            WeightError: while a version is being staged, which continues.
        """
        raise Unsupported(f"{type(self).__name__} cannot sleep: it keeps its memory until it is closed")

    async def wake(self) -> None:
        """Take the memory again; requests continue when the next version is committed. Idempotent.

        Raises:
            Unsupported: as `sleep`.
            EngineError: if there is no room. An engine with processes of its own is then poisoned, another
                one stays asleep.
        """
        raise Unsupported(f"{type(self).__name__} cannot sleep, so there is nothing to wake")

    async def occupancy(self) -> Occupancy:
        """Return how full the engine is, as of its last decode step. Cheap: for a few calls per second.

        May wait for the decode step that runs; the caller bounds that, and may cancel it.

        Raises:
            EngineError: if the engine is dead, poisoned, closed or not started.
        """
        await self.check()
        return Occupancy()

    async def profile(self, file: Path, steps: int) -> None:
        """Have torch.profiler watch the next decode steps on every rank; each writes FILE.rank_R.json.gz.

        Args:
            file: path of the traces without their ending. A profile that is on is written before.
            steps: to watch, at most; 0 only ends the one that is on. Later ones are not in the trace, which
                may be written when the next step begins.

        Raises:
            Unsupported: it cannot be watched.
            EngineError: a trace cannot be written; the engine continues.
        """
        raise Unsupported(f"{type(self).__name__} cannot be watched by torch.profiler")

    @abstractmethod
    async def check(self) -> None:
        """Raise EngineError if the engine is dead, poisoned, closed or not started."""

    @abstractmethod
    async def close(self) -> None:
        """End the engine and everything it started. Idempotent."""
