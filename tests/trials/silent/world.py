"""Runs the parts of a run in one process: two engines, a verifier, a trainer, a sender and an auditor.

The parts are the product's own; only the loop between them is here, without ledger and bus. Each step trains
as many tokens of the version before as of the newest one. A fault replaces a part's method, or one of the
seams: functions that `World` calls between the parts.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from protocol.codec import decode_payload, encode_payload
from protocol.messages import Rollout, ScoredRollout
from protocol.tensors import Array
from rollout.engines.base import Engine, EngineConfig, Sampling
from rollout.engines.in_process import engine as in_process_engine
from rollout.engines.registry import make_engine
from rollout.environments.base import Environment
from rollout.generate import generate_group
from rollout.prompts.base import Prompt, PromptConfig, PromptSource
from rollout.prompts.registry import make_source
from rollout.render import Renderer
from rollout.sample import Generate, Sample, SampleBuilder
from services.audit.alarms import Alarm
from services.audit.auditor import AuditedStep, Auditor, UnchangedSteps, wrong_versions
from services.audit.offline import shared_prompts
from services.audit.recompute import COMPARISON_DTYPES, Recomputer
from services.audit.records import Expectations
from services.audit.updates import Shadow
from services.audit.versions import read_version
from services.ledger.interface import TakenBatch, TakenGroup
from services.run_record.evaluations import Evaluation
from services.runtime.training import build_models, train_command
from services.settings.sections import BoundConfig, ModelConfig, RunConfig, Settings
from trainer.config import AlgorithmConfig, OptimizerConfig, ScratchConfig, TrainerConfig, WeightConfig
from trainer.execution.commands import DigestWeightsCommand
from trainer.execution.executor import Executor
from trainer.random_model import build_scratch
from trainer.weights.publish import published
from trainer.weights.registry import make_sender

PROMPTS = Path(__file__).parents[3] / "deploy" / "examples" / "max3" / "prompts.jsonl"
GROUPS = 6
"""Groups of a step."""
SAMPLES = 4
TURN_TOKENS = 6
HELD = 3
"""Versions whose tensors are held."""
SCRATCH = ScratchConfig(
    architecture="qwen2",
    vocabulary="0123456789= ",
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    initializer_range=0.1,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


class TwoTurns(Environment):
    """Environment that asks twice: the model's turn, a result of a tool, and a turn again."""

    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        sample = SampleBuilder()
        sample.sampled(await generate(prompt_tokens, TURN_TOKENS))
        sample.inserted(renderer.turn_tokens(f"={prompt.text[:2]}"))
        last = await generate((*prompt_tokens, *sample.tokens), TURN_TOKENS)
        sample.sampled(last)
        return sample.finish(last.finish_reason)


def rewards_of(rollout: Rollout) -> list[float]:
    """Return, for each sample, the share of its characters that are digits of its prompt."""
    wanted = set(rollout.prompt_text) - {"="}
    return [sum(c in wanted for c in text) / max(1, len(text)) for text in rollout.responses]


def settings_of(directory: Path, seed: int, **sections: Any) -> Settings:
    """Return the settings of a trial; `sections` replace some."""
    given = {
        "run": RunConfig(name="silent", dir=str(directory), steps=100),
        "bound": BoundConfig(max_staleness=2, groups_per_step=GROUPS),
        "model": ModelConfig(scratch=dataclasses.replace(SCRATCH, seed=seed)),
        "prompts": PromptConfig(source="jsonl", path=str(PROMPTS), held_out=50, seed=seed),
        "engine": EngineConfig(name="hf", max_model_len=64),
        "trainer": TrainerConfig(backend="reference", device="cpu", micro_batch_size=4),
        "optimizer": OptimizerConfig(lr=2e-3, weight_decay=0.01),
        "algorithm": AlgorithmConfig(name="grpo"),
        "weights": WeightConfig(transport="disk", keep=HELD + 1),
        **sections,
    }
    return Settings(**given)


@dataclass
class World:
    """A run in one process, and the seams at which a fault can be put."""

    settings: Settings
    engines: Sequence[Engine]
    executor: Executor
    sender: Any
    source: PromptSource
    renderer: Renderer
    auditor: Auditor
    environment: Environment = field(default_factory=TwoTurns)
    record: Callable[[Rollout], Rollout] = lambda rollout: rollout
    """Seam: the message of a group that a rollout worker generated."""
    score: Callable[[Rollout], list[float]] = rewards_of
    """Seam: the verifier."""
    publish: Callable[[Any], Any] = lambda tensors: tensors
    """Seam: the tensors on their way from the trainer to the sender."""
    held_out: Callable[["World"], Sequence[Prompt]] = lambda world: world.source.held_out()
    """Seam: prompts that an evaluation scores."""
    scored: Callable[["World"], int] = lambda world: world.digest
    """Seam: digest of the weights that an evaluation scores as the newest version."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Calls that undo, at the end, a fault that patched a class."""
    step: int = 0
    versions: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    unchanged: UnchangedSteps = field(init=False)
    _pending: list[ScoredRollout] = field(default_factory=list)
    _groups: int = 0
    digest: int = 0
    """Digest of the newest version."""

    def __post_init__(self) -> None:
        self.unchanged = UnchangedSteps(self.settings.engine.dtype)

    def prompt(self, group: int) -> Prompt:
        """Return a group's prompt."""
        return self.source.at(group)

    async def begin(self) -> None:
        """Publish version 0."""
        await self._publish(0)
        self._pending = await self._generated(GROUPS // 2)

    async def advance(self) -> list[Alarm]:
        """Generate, train, publish and audit one step; returns the alarms."""
        fresh = await self._generated(GROUPS)
        batch, self._pending = self._pending + fresh[: GROUPS // 2], fresh[GROUPS // 2 :]
        bound = self.settings.bound.max_staleness
        taken = TakenBatch(
            self.step,
            tuple(
                TakenGroup(one.rollout.group, one.rollout.token, self.step + bound, bound, self.step, {})
                for one in batch
            ),
        )
        command = train_command(self.settings, taken, [encode_payload(one) for one in batch])
        plan, stats = await asyncio.to_thread(self.executor.train, command)
        before = self.digest
        await self._publish(self.step + 1)
        exported = self.executor.lead(DigestWeightsCommand(self.settings.engine.dtype))
        digests = before, self.digest
        unchanged = self.unchanged.count_step(stats, digests, learns=True)
        step = AuditedStep(command, plan, stats, digests, unchanged, exported)
        alarms = await asyncio.to_thread(self.auditor.audit, step, dict(self.versions))
        self.step += 1
        return alarms + self._evaluated()

    def _evaluated(self) -> list[Alarm]:
        """Return the alarms about an evaluation of the newest version."""
        line = Evaluation(version=self.step, set="held_out", digest=f"{self.scored(self):016x}")
        questions = [prompt.question for prompt in self.held_out(self)]
        trained = set(self.source.trained_texts())
        wrong = wrong_versions([line], {self.step: self.digest})
        return [*wrong, *shared_prompts({"held_out": questions}, trained)]

    async def _generated(self, count: int) -> list[ScoredRollout]:
        numbers = range(self._groups, self._groups + count)
        self._groups += count
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._one(number), name=f"group {number}") for number in numbers]
        return [task.result() for task in running]

    async def _one(self, group: int) -> ScoredRollout:
        engine = self.engines[group % len(self.engines)]
        rollout = await generate_group(
            engine,
            self.renderer,
            self.environment,
            self.prompt(group),
            group=group,
            token=f"lease{group}",
            n=SAMPLES,
            sampling=Sampling(
                max_tokens=self.settings.sampling.max_tokens,
                temperature=self.settings.sampling.temperature,
                stop_token_ids=tuple(self.renderer.stop_token_ids),
            ),
            engine_name=f"engine.{group % len(self.engines)}",
        )
        rollout = decode_payload(encode_payload(self.record(rollout)))
        assert isinstance(rollout, Rollout)
        return ScoredRollout(
            rollout=rollout, rewards=Array.of(self.score(rollout), "float32"), scorer="reward.0"
        )

    async def _publish(self, version: int) -> None:
        policy, dtype = self.executor.models.policy, self.settings.engine.dtype
        tensors = self.publish(published(policy, dtype))
        manifest = self.sender.publish("epoch", version, tensors, base_model=policy.architecture)
        self.digest = manifest.digest
        self.versions[version] = {k: t.clone() for k, t in read_version(manifest, 60.0).items()}
        self.versions.pop(version - HELD, None)
        for engine in self.engines:
            await engine.stage(manifest)
            await engine.commit(manifest)
        self.sender.retire(frozenset({version}))


@asynccontextmanager
async def open_engines(settings: Settings, model_dir: Path) -> AsyncIterator[Sequence[Engine]]:
    """Start both engines at the same time, and close them."""
    engines = [make_engine(settings.engine, model_dir, f"engine.{n}", settings.lora) for n in range(2)]
    try:
        async with asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(engine.start(), name="start")
        yield engines
    finally:
        for engine in engines:
            await engine.close()


@asynccontextmanager
async def open_world(
    directory: Path, seed: int = 0, engines: Sequence[Engine] = (), **sections: Any
) -> AsyncIterator[World]:
    """Build a world with version 0 published, and close it; without engines it starts some of its own."""
    settings = settings_of(directory, seed, **sections)
    model_dir = build_scratch(settings.model.scratch or SCRATCH, settings.run_dir / "model")
    drawn = in_process_engine._generator
    draws = iter(range(seed * 10**6, 10**9))
    in_process_engine._generator = lambda own: drawn(next(draws) if own is None else own)
    executor = Executor(build_models(settings))
    sender = make_sender(
        settings.weights, executor.models.policy, settings.engine.dtype, run="silent", run_dir=directory
    )
    renderer, source = Renderer(model_dir, settings.render), make_source(settings.prompts)
    expectations = Expectations(
        prompt=lambda group: Renderer.prompt_tokens(renderer, source.at(group)),
        rewards=rewards_of,
        text=renderer.text,
        stop_token_ids=frozenset(renderer.stop_token_ids),
        algorithm=settings.algorithm,
    )
    dtype = settings.engine.dtype
    auditor = Auditor(
        tuple(
            Recomputer(model_dir, kind, settings.lora) for kind in (torch.float32, COMPARISON_DTYPES[dtype])
        ),
        share=1.0,
        dtype=dtype,
        expectations=expectations,
        shadow=Shadow(settings),
    )
    async with AsyncExitStack() as stack:
        stack.callback(executor.close)
        stack.callback(lambda: setattr(in_process_engine, "_generator", drawn))
        served = engines or await stack.enter_async_context(open_engines(settings, model_dir))
        world = World(settings, served, executor, sender, source, renderer, auditor)
        await world.begin()
        yield world
