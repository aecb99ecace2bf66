"""With E = 0 a run is the naive synchronous loop: the same tokens, and the same weights bit for bit, on a CPU
and on a GPU."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from protocol.codec import decode_payload
from protocol.device.slice_digests import digests_of
from protocol.messages import ScoredRollout, TensorEntry
from protocol.weights.buckets import manifest_digest
from tests.integration import synchronous
from tests.integration.loop import ROOT, run_to_end, settings_for
from tests.integration.synchronous import GROUPS, LENGTH, LR, SAMPLES, Loop
from trainer.storage.archive import Archive
from trainer.storage.spool import Spool

STEPS = 3
HERE = synchronous.__name__
OVERRIDES = (
    f"run.steps={STEPS}",
    f'run.modules=["{ROOT}"]',
    "bound.max_staleness=0",
    f"bound.groups_per_step={GROUPS}",
    f"sampling.samples_per_prompt={SAMPLES}",
    f"sampling.max_tokens={LENGTH}",
    "engine.name=hf",
    "run.deterministic=true",
    "bound.staleness_policy=wait",
    "engine.dtype=float32",
    f'reward.verifiers=[{{name="function", options={{path="{HERE}:score"}}}}]',
    "trainer.backend=reference",
    "trainer.recompute_logprobs=true",  # the policy at the start of the step is the trainer's own
    "algorithm.importance_cap=0",
    f"optimizer.lr={LR}",
    "optimizer.adam_beta2=0.95",
    "prompts.shuffle=false",
    "prompts.held_out=0",
    "eval.at_end=false",
)
WHERE = {
    "cpu": (),
    "cuda": (
        "services.trainer_gpus=0",
        "services.rollout_gpus=0",
        "trainer.dtype=float32",
    ),
}


def digest_of(model: torch.nn.Module) -> int:
    """The digest of a version, as its manifest has it."""
    named = dict(model.named_parameters())
    numbers = digests_of(named.values())
    return manifest_digest(
        [
            TensorEntry(name, "float32", tuple(tensor.shape), 0, 0, 0, number)
            for (name, tensor), number in zip(named.items(), numbers, strict=True)
        ]
    )


def sampled(run_dir: Path, events: list[dict[str, object]]) -> list[list[list[int]]]:
    """The sampled tokens of each step, group by group."""
    payloads = {}
    for step in Archive(run_dir / "archive").steps():
        for record in Archive(run_dir / "archive").records(step):
            payloads[record.group] = record.payload
    with closing(Spool(run_dir / "spool.sqlite", read_only=True)) as spool:
        for payload in spool.find(set(range(STEPS * GROUPS)) - payloads.keys()):
            message = decode_payload(payload)
            assert isinstance(message, ScoredRollout)
            payloads[message.rollout.group] = payload
    found = []
    for group in sorted(payloads):
        message = decode_payload(payloads[group])
        assert isinstance(message, ScoredRollout)
        rows = message.rollout.tokens.numpy().tolist()
        for length in message.rollout.lengths.numpy().tolist():
            found.append(rows[:length])
            rows = rows[length:]
    size = GROUPS * SAMPLES
    return [found[first : first + size] for first in range(0, len(found), size)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield where trainer and engine compute; the loop's sums on a GPU have a fixed order, as the run's."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(request.param == "cuda")
    yield request.param
    torch.use_deterministic_algorithms(False)


async def test_a_run_with_bound_0_is_the_naive_synchronous_loop_bit_for_bit(
    tmp_path: Path, device: str
) -> None:
    settings = settings_for(tmp_path, "demo.toml", *OVERRIDES, *WHERE[device])
    run = await run_to_end(settings, checked=False)
    commits = {event["version"]: int(event["digest"]) for event in run.events if event["event"] == "commit"}
    tokens = sampled(settings.run_dir, run.events)
    torch.set_num_threads(settings.trainer.threads)
    loop = Loop(settings.model_dir, ROOT / "deploy/examples/max3/prompts.jsonl", device)
    digests = []
    for step, found in enumerate(loop.steps(STEPS)):
        assert found == tokens[step], step
        digests.append(digest_of(loop.model))
        assert digests[-1] == commits[step + 1], step
    assert len(set(digests)) == STEPS  # every step learns
    assert {step["lag_max"] for step in run.steps} == {0}
