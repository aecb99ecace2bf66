"""Tests that a head learns to draft for its target, is kept by checkpoints, and joins versions."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from protocol.errors import SettingsError
from protocol.weights.draft_head import PREFIX, head_shapes
from rollout.engines.contract.models import VOCAB
from tests.changes import slow_unless_changed
from tests.contracts.engine_draft_models import tiny_shallow
from tests.trainer.groups import GroupSpec, SampleSpec, batch_of, scored
from tests.trainer.heads import ALGORITHM, ROUNDS, learnt, make_models, texts, write_random_head
from trainer.batch import Batch
from trainer.execution.commands import CopyWeightsCommand, DigestWeightsCommand
from trainer.execution.executor import Executor
from trainer.reference.eagle import EagleHead, EagleTraining, eagle_loss
from trainer.roles.models import RankModels

EACH_BACKEND = pytest.mark.parametrize(
    "backend",
    [
        "reference",
        pytest.param("fsdp", marks=slow_unless_changed("trainer/reference/eagle.py", "trainer/fsdp/")),
    ],
)


@pytest.fixture
def target(tmp_path: Path) -> PreTrainedModel:
    model = tiny_shallow(1)
    model.save_pretrained(tmp_path / "model")
    return model


@pytest.fixture
def head_dir(target: PreTrainedModel, tmp_path: Path) -> Path:
    return write_random_head(target, tmp_path)


@torch.no_grad()
def accepted(target: PreTrainedModel, tensors: dict[str, torch.Tensor], head_dir: Path, held: Batch) -> float:
    """Return the share of tokens at which a head's likeliest token is the target's, by plain transformers."""
    head = EagleHead(head_dir)
    head.load_state_dict({name.removeprefix(PREFIX): it for name, it in tensors.items()})
    found = []
    for tokens in held.tokens.long().split(held.lengths.tolist()):
        states = target.model(input_ids=tokens[None]).last_hidden_state
        drafted = head(states[:, :-1], target.get_input_embeddings()(tokens[None, 1:]))
        found.append(target.lm_head(drafted).argmax(-1) == target.lm_head(states[:, 1:]).argmax(-1))
    return float(torch.cat(found, dim=1).float().mean())


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            "reference", marks=slow_unless_changed("trainer/reference/", "protocol/weights/draft_head")
        ),
        pytest.param("fsdp", marks=slow_unless_changed("trainer/reference/eagle.py", "trainer/fsdp/")),
    ],
)
def test_head_learns_to_draft_what_its_target_says(
    backend: str, target: PreTrainedModel, head_dir: Path, tmp_path: Path
) -> None:
    models = make_models(backend, tmp_path / "model", head_dir)
    drafts, held = models.drafts, texts(target, 999)
    assert isinstance(drafts, EagleTraining)
    before = accepted(target, drafts.published, head_dir, held)
    assert not drafts.left  # there is no text yet
    losses = [learnt(drafts, texts(target, step)) for step in range(ROUNDS)]
    last = drafts.join(held)
    models.close()
    assert losses[0] is None
    assert losses[1] is not None
    assert last is not None
    assert last < losses[1] - 0.2
    assert before < 0.05
    assert accepted(target, drafts.published, head_dir, held) > 0.4


@pytest.mark.parametrize("backend", ["reference", "fsdp"])
def test_head_leaves_the_next_step_of_its_policy_as_it_is(
    backend: str, target: PreTrainedModel, head_dir: Path, tmp_path: Path
) -> None:
    samples = [SampleSpec([1 + i, 5, 2, 7], [0] * 4, reward=float(i)) for i in range(2)]
    batch, found = batch_of([(scored(GroupSpec(samples=samples)), 1)], step=0, algorithm=ALGORITHM), []
    for learns in (True, False):
        models = make_models(backend, tmp_path / "model", head_dir)
        assert models.drafts is not None
        if learns:
            learnt(models.drafts, texts(target, 3))
        assert models.policy.train_step(batch).grad_norm
        found.append({name: tensor.clone() for name, tensor in models.policy.export()})
        models.close()
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())


@EACH_BACKEND
def test_states_are_those_from_which_transformers_predicts_a_token(
    backend: str, target: PreTrainedModel, head_dir: Path, tmp_path: Path
) -> None:
    models, batch = make_models(backend, tmp_path / "model", head_dir), texts(target, 3)
    found = models.policy.last_states(batch)
    models.close()
    starts = batch.offsets[:-1].tolist()
    for start, tokens in zip(starts, batch.tokens.long().split(batch.lengths.tolist()), strict=True):
        with torch.no_grad():
            expected = target.model(input_ids=tokens[None]).last_hidden_state[0, :-1]
        torch.testing.assert_close(found.states[start + 1 : start + len(tokens)], expected, atol=1e-4, rtol=0)
    assert torch.equal(found.embedding, target.get_input_embeddings().weight)
    assert torch.equal(found.output, target.lm_head.weight)


def test_loss_is_that_of_the_paper() -> None:
    drafted, states, output = torch.randn(5, 8), torch.randn(5, 8), torch.randn(11, 8)
    terms = []
    for mine, wanted in zip(drafted, states, strict=True):
        gaps = (mine - wanted).abs()
        smooth = torch.where(gaps < 1, gaps**2 / 2, gaps - 0.5).mean()
        target, own = (output @ wanted).softmax(0), (output @ mine).softmax(0)
        terms.append(smooth - 0.1 * (target * own.log()).sum())
    torch.testing.assert_close(eagle_loss(drafted, states, output), torch.stack(terms).mean())


def test_version_has_the_head_as_it_was_at_its_step(
    target: PreTrainedModel, head_dir: Path, tmp_path: Path
) -> None:
    models = make_models("reference", tmp_path / "model", head_dir)
    drafts, leader = models.drafts, Executor(models)
    assert isinstance(drafts, EagleTraining)
    names = {PREFIX + name for name in head_shapes(json.loads((head_dir / "config.json").read_text()))}
    first = leader.lead(DigestWeightsCommand("float32"))
    assert {n for n in leader.lead(CopyWeightsCommand("float32")) if n.startswith(PREFIX)} == names
    learnt(drafts, texts(target, 0))
    assert leader.lead(DigestWeightsCommand("float32")) == first  # it is trained, and not of a version yet
    drafts.join(texts(target, 1))
    assert leader.lead(DigestWeightsCommand("float32")) != first
    leader.close()


def test_checkpoint_keeps_the_head_its_training_and_what_is_published(
    target: PreTrainedModel, head_dir: Path, tmp_path: Path
) -> None:
    models, batches = (
        make_models("reference", tmp_path / "model", head_dir),
        [texts(target, i) for i in range(3)],
    )
    assert isinstance(models.drafts, EagleTraining)
    learnt(models.drafts, batches[0])
    learnt(models.drafts, batches[1])  # the version has less than was learnt
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    models.copy_state().write(saved)
    expected = exported_after(models, batches[2])

    again = make_models("reference", tmp_path / "model", head_dir)
    again.restore(saved)
    found = exported_after(again, batches[2])
    assert all(torch.equal(found[i][name], expected[i][name]) for i in range(3) for name in expected[i])
    # what was published is a head that can be named in engine.draft_model
    assert (
        load_file(saved / "draft_head/model.safetensors").keys()
        == EagleHead(saved / "draft_head").state_dict().keys()
    )
    models.close()
    again.close()


def exported_after(models: RankModels, batch: Batch) -> list[dict[str, torch.Tensor]]:
    """Return the published head, the next version's, and the head of the version after it."""
    drafts, found = models.drafts, []
    assert isinstance(drafts, EagleTraining)
    for step in (lambda: None, lambda: learnt(drafts, batch), lambda: drafts.join(batch)):
        step()
        found.append({name: tensor.clone() for name, tensor in drafts.published.items()})
    return found


def test_checkpoint_of_a_run_without_a_trained_head_leaves_the_loaded_one(
    head_dir: Path, tmp_path: Path
) -> None:
    models = make_models("reference", tmp_path / "model", head_dir)
    RankModels(models.policy).copy_state().write(tmp_path)
    models.restore(tmp_path)
    loaded = load_file(head_dir / "model.safetensors")
    assert models.drafts is not None
    assert all(torch.equal(models.drafts.published[PREFIX + name], it) for name, it in loaded.items())


def test_checkpoint_of_another_head_is_refused(
    target: PreTrainedModel, head_dir: Path, tmp_path: Path
) -> None:
    make_models("reference", tmp_path / "model", head_dir).copy_state().write(tmp_path)
    path = head_dir / "config.json"
    config = {**json.loads(path.read_text()), "intermediate_size": 64}
    path.write_text(json.dumps(config))
    save_file(
        {name: torch.ones(shape) for name, shape in head_shapes(config).items()},
        head_dir / "model.safetensors",
    )
    with pytest.raises(SettingsError, match=r"of another model: layers\.0\.mlp\.down_proj\.weight"):
        make_models("reference", tmp_path / "model", head_dir).restore(tmp_path)


def limit_logits(monkeypatch: pytest.MonkeyPatch, positions: int) -> None:
    """Make torch run out of memory in the loss over the logits of more positions."""
    whole = F.cross_entropy

    def limited(logits: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if len(logits) > positions:
            raise torch.OutOfMemoryError(f"out of memory: logits of {len(logits)} positions")
        return whole(logits, *others)

    monkeypatch.setattr(F, "cross_entropy", limited)


def test_long_sample_is_learnt_at_512_positions(
    head_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit_logits(monkeypatch, 512)
    tokens = [(7 * i) % VOCAB for i in range(1200)]
    sample = SampleSpec(tokens, [0] * len(tokens))
    group = scored(GroupSpec(group=0, prompt=[1, 2], samples=[sample]))
    long = batch_of([(group, 1)], step=0, algorithm=ALGORITHM)
    models = make_models("reference", tmp_path / "model", head_dir)
    assert models.drafts is not None
    learnt(models.drafts, long)
    assert models.drafts.join(long) is not None
    assert not caplog.messages
    models.close()


@EACH_BACKEND
def test_samples_that_do_not_fit_in_memory_are_dropped(
    backend: str,
    target: PreTrainedModel,
    head_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    models, batch = make_models(backend, tmp_path / "model", head_dir), texts(target, 3)
    drafts = models.drafts
    assert isinstance(drafts, EagleTraining)
    before = {name: tensor.clone() for name, tensor in drafts.published.items()}
    with monkeypatch.context() as short:
        limit_logits(short, 0)
        learnt(drafts, batch)
    assert "draft_head.out_of_memory tokens=" in caplog.text
    assert drafts.join(batch) is None
    assert all(torch.equal(drafts.published[name], tensor) for name, tensor in before.items())
    learnt(drafts, batch)
    assert drafts.join(batch) is not None
    models.close()


def test_restored_head_does_not_learn_the_samples_of_an_abandoned_step(
    target: PreTrainedModel, head_dir: Path, tmp_path: Path
) -> None:
    models = make_models("reference", tmp_path / "model", head_dir)
    drafts = models.drafts
    assert drafts is not None
    for name, state in (("with", models.copy_state()), ("without", RankModels(models.policy).copy_state())):
        place = tmp_path / name
        place.mkdir()
        state.write(place)
        drafts.join(texts(target, 1))
        drafts.update()
        assert drafts.left
        models.restore(place)
        assert not drafts.left
        assert drafts.join(texts(target, 2)) is None
    models.close()
