"""Runs a real worker off loopback: official clients, TLS, and context calls, which leave no gradient.

A naive loop over a Hugging Face model recomputes the first step; it trains what the journal says was drawn by
the run's own sampling, whatever the records say.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.codec import decode_payload
from protocol.messages import Call, Rollout, ScoredRollout
from protocol.network.certificates import create_certificate
from protocol.tensors import Array
from services.tools.verification import verify_run
from tests.integration.loop import run_to_end, settings_for
from tests.integration.own_sampling import CALLS
from tests.trainer.recomputed.loop import NaiveTrainer
from tests.trainer.recomputed.records import rows_of
from trainer.storage.archive import Archive

SETTINGS = (
    "engine.name=hf", "trainer.backend=reference", "bound.groups_per_step=4", "sampling.samples_per_prompt=2",
    "engine.max_model_len=128", "model.scratch.max_position_embeddings=128", "rollout.groups_in_flight=8",
    "trainer.checkpoint_every=2", "run.steps=3", "monitor.enabled=false", "environment.name=agent",
    'environment.options={function="tests.integration.own_sampling:solve"}', "reward.verifiers=[]",
    'environment.sampling="context"', 'environment.host="0.0.0.0"',
    'environment.advertise="https://127.0.0.2:{port}"', "environment.attempts=1",
)  # fmt: skip


def trained_by_the_journal(scored: ScoredRollout, calls: dict[tuple[int, int, int], Call]) -> ScoredRollout:
    """Return a record that trains the answers of the calls that have no sampling of their own."""
    rollout = scored.rollout
    assert rollout.calls is not None
    mask = np.zeros_like(rollout.loss_mask.numpy())
    begins = np.cumsum([0, *rollout.lengths.numpy()])
    for sample, number, row, first, end in rollout.calls.numpy():
        call = calls[rollout.group, int(sample), int(number)]
        mask[begins[row] + first : begins[row] + end] = not call.sampling
    masked = msgspec.structs.replace(rollout, loss_mask=Array.of(mask, "uint8"))
    return msgspec.structs.replace(scored, rollout=masked)


@torch.no_grad()
def assert_most_likely(model: torch.nn.Module, rollout: Rollout, greedy: set[tuple[int, int]]) -> None:
    """Check the answers of some calls, (sample, number), against the model's most likely tokens."""
    assert rollout.calls is not None
    begins = np.cumsum([0, *rollout.lengths.numpy()])
    contexts = [context for _, context, _ in rows_of(rollout)]
    for sample, number, row, first, end in rollout.calls.numpy().tolist():
        if (sample, number) in greedy:
            tokens = contexts[row] + rollout.tokens.numpy()[begins[row] : begins[row] + end].tolist()
            logits = model(input_ids=torch.tensor([tokens])).logits[0]
            place = len(contexts[row]) + first
            assert logits[place - 1 : -1].argmax(-1).tolist() == tokens[place:]


@pytest.mark.timeout(300)
async def test_context_calls_leave_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert_file, key_file = create_certificate(tmp_path / "keys", ["127.0.0.2"])
    monkeypatch.setenv("SSL_CERT_FILE", str(cert_file))
    pair = (f'environment.cert_file="{cert_file}"', f'environment.key_file="{key_file}"')
    settings = settings_for(tmp_path / "run", "demo.toml", *SETTINGS, *pair)
    finished = await run_to_end(settings)
    assert [step["step"] for step in finished.steps] == [0, 1, 2]

    facts = verify_run(settings.run_dir)
    assert facts["violations"] == []
    archive = Archive(settings.run_dir / "archive")
    part = archive.read(0)
    calls = [decode_payload(item.payload) for item in part.calls]
    by_place = {(call.group, call.sample, call.number): call for call in calls if isinstance(call, Call)}
    own = [bool(call.sampling) for call in by_place.values()]
    assert sum(own) == (CALLS - 1) * len(own) / CALLS
    records = [decode_payload(item.payload) for item in part.records]
    groups = [
        (trained_by_the_journal(record, by_place), settings.bound.max_staleness)
        for record in records
        if isinstance(record, ScoredRollout)
    ]
    assert len(groups) == settings.bound.groups_per_step

    greedy = [place for place, call in by_place.items() if call.sampling == '{"temperature": 0}']
    assert len(greedy) == len(own) / CALLS
    model = AutoModelForCausalLM.from_pretrained(settings.model_dir, dtype=torch.float32)
    for scored, _ in groups:
        assert_most_likely(
            model, scored.rollout, {place[1:] for place in greedy if place[0] == scored.rollout.group}
        )

    naive = NaiveTrainer(settings.model_dir, settings.algorithm, settings.optimizer, 1.0)
    naive.model.get_input_embeddings().padding_idx = None  # the digit 0, whose gradient counts
    expected = naive.step(groups, 0, decoupled=False, epochs=1)
    step = finished.steps[0]
    assert step["trained_tokens"] == expected["trained_tokens"]
    assert step["trained_tokens"] == sum(
        call.tokens.shape[0] for call in by_place.values() if not call.sampling
    )
    assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert step["loss"] == pytest.approx(expected["loss"], abs=1e-5)
