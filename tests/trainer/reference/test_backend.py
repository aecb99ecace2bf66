"""Tests the reference backend against plain transformers and torch, its checkpoints, and its refusals."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from protocol.errors import SettingsError
from tests.trainer.checkpoints import save_part
from tests.trainer.groups import GroupSpec, SampleSpec, batch_of, scored
from tests.trainer.megatron.models import make_model, plain_logprobs
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.batch import Batch, trained_tokens
from trainer.config import OptimizerConfig, ScratchConfig, TrainerConfig
from trainer.random_model import build_scratch
from trainer.reference.backend import ReferenceBackend
from trainer.storage.hf_export import write_hf


def make(
    model_dir: Path,
    *,
    config: AlgorithmConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    shared: bool = False,
    **trainer: object,
) -> ReferenceBackend:
    settings = TrainerConfig(backend="reference", **{"micro_batch_size": 2, **trainer})
    return ReferenceBackend(
        model_dir,
        optimizer=optimizer or OptimizerConfig(lr=1e-3),
        trainer=settings,
        algorithm=make_algorithm(config or AlgorithmConfig()),
        shared=shared,
    )


def batch(step: int = 1, seed: int = 0, temperature: float = 0.8) -> Batch:
    """Two groups of three samples, of different lengths, with inserted and late tokens."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for group in range(2):
        samples = []
        for length in (1, 5, 3):
            tokens = torch.randint(2, 16, (length,), generator=generator).tolist()
            logprobs = (-3 * torch.rand(length, generator=generator)).tolist()
            mask = [int(i != 2) for i in range(length)]
            reward = float(torch.rand(1, generator=generator))
            samples.append(
                SampleSpec(tokens, [max(step - 1, 0)] + [step] * (length - 1), reward, mask, logprobs)
            )
        groups.append((scored(GroupSpec(group=group, prompt=[3, 4, 5][: group + 2], samples=samples)), 1))
    return batch_of(groups, step=step, algorithm=make_algorithm(AlgorithmConfig()), temperature=temperature)


def exported(backend: ReferenceBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export()}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    assert all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


@pytest.fixture
def tied_dir(tmp_path: Path) -> Path:
    return build_scratch(
        ScratchConfig(architecture="llama", tie_word_embeddings=True, num_key_value_heads=2, seed=3),
        tmp_path / "tied",
    )


def test_export_is_the_checkpoint_before_the_first_step(model_dir: Path) -> None:
    backend = make(model_dir)
    assert backend.architecture == "Qwen2ForCausalLM"
    wanted = dict(AutoModelForCausalLM.from_pretrained(model_dir).named_parameters())
    assert_same_bits(exported(backend), {name: p.detach() for name, p in wanted.items()})
    assert sum(t.numel() for t in wanted.values()) == 234_880


def plain(model: torch.nn.Module, made: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [t] from the model's own logits, a sample at a time."""
    found = []
    for tokens in made.tokens.long().split(made.lengths.tolist()):
        log_p = (model(input_ids=tokens[None]).logits[0, :-1] / made.temperature).log_softmax(-1)
        both = log_p.gather(-1, tokens[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        found.append([torch.nn.functional.pad(values, (1, 0)) for values in both])
    logprobs, entropy = (torch.cat(values) for values in zip(*found, strict=True))
    return logprobs, entropy


def test_logprobs_equal_plain_transformers_and_are_zero_where_not_sampled(model_dir: Path) -> None:
    made = batch()
    got = make(model_dir).logprobs(made)
    with torch.no_grad():
        wanted = plain(AutoModelForCausalLM.from_pretrained(model_dir).eval(), made)[0]
    torch.testing.assert_close(got, wanted * made.sampled_mask, atol=1e-5, rtol=0)
    assert not got[~made.sampled_mask].any()


def test_attention_scores_are_bounded_where_the_model_bounds_them(tmp_path: Path) -> None:
    make_model("gemma2").save_pretrained(tmp_path)
    data = batch()
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        expected = plain_logprobs(oracle, data)[0] * data.sampled_mask
    torch.testing.assert_close(make(tmp_path).logprobs(data), expected, atol=1e-5, rtol=0)


def test_a_step_equals_plain_adamw_on_the_sum_of_losses(tied_dir: Path) -> None:
    made, config = batch(step=0), AlgorithmConfig(entropy_coef=0.05)
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.05, lr_warmup_steps=4)
    backend = make(tied_dir, config=config, optimizer=optimizer)
    stats = backend.train_step(made)

    recipe = make_algorithm(config)
    model = AutoModelForCausalLM.from_pretrained(tied_dir)
    logprobs, entropy = plain(model, made)
    tokens, mask = trained_tokens(made), made.loss_mask
    terms = recipe.token_loss(tokens, logprobs[mask], entropy[mask])
    loss = (terms.loss * tokens.weights).sum()
    loss.backward()
    loss, logprobs, entropy, ratio = loss.detach(), logprobs.detach(), entropy.detach(), terms.ratio.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-3 / 4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()

    assert stats.loss == pytest.approx(float(loss), rel=1e-4)
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert stats.trained_tokens == int(mask.sum())
    assert stats.entropy == pytest.approx(float(entropy[mask].mean()), rel=1e-4)
    assert stats.ratio_mean == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert stats.clip_fraction == pytest.approx(float(terms.clipped.mean()), rel=1e-4)
    fresh = mask & (made.versions == made.step)
    assert stats.logprob_error_max == pytest.approx(
        float((logprobs - made.behaviour_logprobs)[fresh].abs().max()), rel=1e-4
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(exported(backend)[name], parameter.detach(), atol=2e-6, rtol=0)


def test_rotary_frequencies_are_the_configs_in_every_dtype(model_dir: Path) -> None:
    wanted = dict(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).named_buffers())
    found = dict(make(model_dir, dtype="bfloat16").model.named_buffers())
    assert found.keys() == wanted.keys() != set()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_step_does_not_depend_on_micro_batches(model_dir: Path) -> None:
    made = batch()
    assert made.lengths.tolist() == [3, 7, 5, 4, 8, 6]
    results = []
    for size, tokens, passes, padding in ((1, 0, 6, 0), (4, 0, 2, 7), (6, 0, 1, 15), (9, 14, 4, 2)):
        backend = make(model_dir, micro_batch_size=size, micro_batch_tokens=tokens)
        stats = backend.train_step(made)
        assert (stats.micro_batches, stats.padding_share) == (passes, pytest.approx(padding / (33 + padding)))
        results.append((stats.loss, stats.grad_norm, exported(backend)["lm_head.weight"]))
    for loss, norm, weight in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-4)
        assert norm == pytest.approx(results[0][1], rel=1e-4)
        torch.testing.assert_close(weight, results[0][2], atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restore_resumes_bit_for_bit(dtype: str, model_dir: Path, tmp_path: Path) -> None:
    backend = make(model_dir, dtype=dtype)
    for step in range(2):
        backend.train_step(batch(step, seed=step))
    torch.rand(3)  # moves the generator
    save_part(backend, tmp_path)
    saved, random = exported(backend), torch.rand(4)
    last = backend.train_step(batch(2, seed=2))

    fresh = make(model_dir, dtype=dtype, seed=99)
    fresh.restore(tmp_path)
    assert_same_bits(exported(fresh), saved)
    assert torch.equal(torch.rand(4), random)
    assert fresh.train_step(batch(2, seed=2)) == last
    assert_same_bits(exported(fresh), exported(backend))

    backend.restore(tmp_path)  # also over a later state
    assert backend.train_step(batch(2, seed=2)) == last
    assert_same_bits(exported(fresh), exported(backend))


def test_a_checkpoint_from_before_the_first_step_clears_the_optimizer(
    model_dir: Path, tmp_path: Path
) -> None:
    backend = make(model_dir)
    save_part(backend, tmp_path)
    first = backend.train_step(batch(0)), exported(backend)
    backend.restore(tmp_path)
    again = backend.train_step(batch(0)), exported(backend)
    assert first[0] == again[0]
    assert_same_bits(first[1], again[1])


def test_saving_twice_gives_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    backend = make(model_dir)
    backend.train_step(batch())
    parts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_part(backend, tmp_path / name)
        parts.append((tmp_path / name / "rank_00000.safetensors").read_bytes())
    assert parts[0] == parts[1]


@pytest.fixture
def others(tmp_path: Path, model_dir: Path) -> Path:
    (tmp_path / "part").mkdir()
    save_part(make(model_dir), tmp_path / "part")
    return tmp_path / "part"


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    tied_dir: Path, model_dir: Path, others: Path, tmp_path: Path
) -> None:
    small = build_scratch(ScratchConfig(hidden_size=64), tmp_path / "small")
    for directory, text in (
        (tied_dir, "Qwen2ForCausalLM.*LlamaForCausalLM"),
        (small, "another model: .* is .* there and .* here"),
    ):
        backend = make(directory)
        before = exported(backend)
        with pytest.raises(SettingsError, match=text):
            backend.restore(others)
        assert_same_bits(exported(backend), before)
    with pytest.raises(SettingsError, match="not one of the reference backend"):
        make(model_dir).restore(tmp_path)


def test_masters_are_restored_in_another_dtype(model_dir: Path, tmp_path: Path) -> None:
    backend = make(model_dir)
    backend.train_step(batch())
    save_part(backend, tmp_path)
    rounded = make(model_dir, dtype="bfloat16")
    rounded.restore(tmp_path)
    wanted = {name: tensor.bfloat16() for name, tensor in exported(backend).items()}
    assert_same_bits(exported(rounded), wanted)


def test_the_reference_is_the_model_that_training_began_with(model_dir: Path) -> None:
    backend, made = make(model_dir), batch()
    before = backend.logprobs(made)
    backend.keep_reference()
    backend.train_step(made)
    backend.keep_reference()  # the first call counts
    assert torch.equal(backend.reference_logprobs(made), before)
    assert not torch.equal(backend.logprobs(made), before)


@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_exported_as_their_checkpoint_has_them(tmp_path: Path, shared: bool) -> None:
    model = make_model("glm4-moe")
    model.save_pretrained(tmp_path / "model")
    backend = make(tmp_path / "model", shared=shared, dtype="bfloat16")
    assert backend.train_step(batch()).grad_norm > 0
    found = dict(backend.export_model())
    assert found.keys() == load_file(tmp_path / "model/model.safetensors").keys()
    assert {name for name, tensor in found.items() if tensor.dtype is torch.float32} == {
        name for name in found if name.endswith("e_score_correction_bias")
    }
    write_hf(backend.export_model(), tmp_path / "export", tmp_path / "model")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    expected = dict(backend.model.named_parameters())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.named_parameters())


def test_bfloat16_exports_rounded_masters(model_dir: Path, tmp_path: Path) -> None:
    backend = make(model_dir, dtype="bfloat16")
    weights = exported(backend)
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    for step in range(3):
        backend.train_step(batch(step))
    assert any(not torch.equal(t, weights[name]) for name, t in exported(backend).items())
    for name, parameter in backend.model.named_parameters():
        assert torch.equal(parameter, backend._masters[name].bfloat16())


def test_a_step_without_trained_tokens_is_skipped(model_dir: Path) -> None:
    backend = make(model_dir)
    before = exported(backend)
    stats = backend.train_step(
        batch_of(
            [(scored(GroupSpec(samples=[SampleSpec([5], [0], 1.0), SampleSpec([6], [0])])), 0)],
            step=5,
            algorithm=make_algorithm(AlgorithmConfig()),
        )
    )
    assert "within the bound" in stats.skipped
    assert_same_bits(exported(backend), before)


def test_a_gradient_that_is_not_finite_is_skipped(model_dir: Path, tmp_path: Path) -> None:
    backend, made = make(model_dir), batch()
    backend.train_step(made)
    before = exported(backend)
    made.advantages[made.loss_mask] = float("nan")
    assert backend.train_step(made).skipped == "the gradient's norm is nan"
    assert_same_bits(exported(backend), before)
    assert backend.train_step(batch(2)).skipped == ""


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "float16"}, "trainer.dtype: 'float16'"),
        ({"device": "cuda"}, "no GPU"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, str], text: str, model_dir: Path) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SettingsError, match=text):
        make(model_dir, **settings)


def test_more_ranks_than_one_are_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="one rank, not 2"):
        make(model_dir)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.path"):
        make(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_between_steps_frees_the_state_and_changes_no_bit(model_dir: Path, dtype: str) -> None:
    alone, by_turns = make(model_dir, dtype=dtype), make(model_dir, dtype=dtype)
    by_turns.keep_reference()
    for step in range(3):
        alone.train_step(batch(step, seed=step))
        by_turns.train_step(batch(step, seed=step))
        held = by_turns.offload()
        assert by_turns.offload() == held
        moments = [value for state in by_turns._stepper.optimizer.state.values() for value in state.values()]
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in moments)
        assert held >= sum(tensor.nbytes for tensor in moments)
        if dtype == "bfloat16":  # those of a float32 model are mapped from its file
            assert all(parameter.untyped_storage().nbytes() == 0 for parameter in by_turns.model.parameters())
        by_turns.onload()
        by_turns.onload()
    assert_same_bits(exported(alone), exported(by_turns))
    assert torch.equal(by_turns.reference_logprobs(batch()), make(model_dir, dtype=dtype).logprobs(batch()))
