import itertools
import json
import time
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.errors import EngineError, SettingsError, WeightError
from rollout.engines.base import EngineConfig, Sampling
from rollout.engines.multi_process.token_versions import TokenVersions
from rollout.engines.registry import ENGINES, make_engine
from rollout.engines.requests import read_config, spans_from_marks, spans_of
from rollout.engines.sampling import sample, sampled_distribution
from rollout.engines.vllm.launch import check_model
from rollout.staging.loader_trace import StagingPlan, trace
from rollout.staging.rank import RankStaging
from rollout.staging.staging import Staging, digest_of, stored_once, whole_source
from tests.contracts.engine_models import tiny_model, weights, write_shm


def test_an_unknown_engine_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"engine 'vlm' is not known; did you mean 'vllm'\?"):
        make_engine(EngineConfig(name="vlm"), tmp_path, "e")


@pytest.mark.parametrize("name", sorted(ENGINES))
async def test_an_engine_without_a_model_directory_does_not_start(name: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    engine = make_engine(EngineConfig(name=name), tmp_path / "model", "e")
    if name == "scripted":
        await engine.start()
    else:
        with pytest.raises(EngineError, match=r"did you mean .*models"):
            await engine.start()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.check()


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(EngineError, match="not a JSON object"):
        read_config(tmp_path)


@given(st.lists(st.integers(0, 3)))
def test_spans_say_the_version_of_every_token(versions: list[int]) -> None:
    spans = spans_of(versions)
    start = 0
    found = []
    for end, version in spans:
        assert end > start
        found += [version] * (end - start)
        start = end
    assert found == versions
    assert all(a[1] != b[1] for a, b in itertools.pairwise(spans))


def test_spans_leave_out_versions_without_tokens_and_end_with_the_tokens() -> None:
    assert spans_from_marks([(0, 1), (0, 2), (5, 3), (5, 4), (9, 5)], 7) == ((5, 2), (7, 4))
    assert spans_from_marks([(0, 1), (3, 1), (6, 1)], 9) == ((9, 1),)
    assert spans_from_marks([(0, 1)], 0) == ()


def test_marks_record_a_request_at_its_first_step_after_a_change() -> None:
    marks = TokenVersions(1)
    marks.step([("a", 0)])
    marks.step([("a", 1)])
    marks.switch(2)
    marks.step([("b", 0)])  # "a" was preempted
    marks.step([("a", 2), ("b", 1)])
    marks.switch(3)
    marks.step([("b", 2)], finished=["a"])
    assert marks.of("a") == [(0, 1), (2, 2)]
    assert marks.of("b") == [(0, 2), (2, 3)]
    assert marks.of("c") == []


def test_the_sampled_distribution_is_that_of_temperature_then_top_k_then_top_p() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert sampled_distribution(logits, Sampling(1, top_p=0.6)).exp().tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0, 0]
    )
    assert sampled_distribution(logits, Sampling(1, top_p=0.5)).exp().tolist() == pytest.approx([1, 0, 0, 0])
    assert sampled_distribution(logits, Sampling(1, top_k=3)).exp().tolist() == pytest.approx(
        [5 / 9, 2.5 / 9, 1.5 / 9, 0]
    )
    cold = sampled_distribution(logits, Sampling(1, temperature=0.5)).exp()
    assert cold.tolist() == pytest.approx((torch.tensor([0.25, 0.0625, 0.0225, 0.01]) / 0.345).tolist())
    token, logprob = sample(logits, Sampling(1, temperature=0), torch.Generator())
    assert token == 0
    assert logprob == pytest.approx(torch.tensor(0.5).log().item())


class Fused(torch.nn.Module):
    """A loader like vLLM's: q and k fused, the vocabulary padded."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.randn(6, 4))
        self.embed = torch.nn.Parameter(torch.randn(8, 4))
        self.head = self.embed

    def load_weights(self, named: object) -> None:
        for name, tensor in named:  # type: ignore[attr-defined]
            if name == "embed":
                self.embed[:5].data.copy_(tensor)
                self.embed[5:].data.fill_(0)
            else:
                self.qk.data.narrow(0, 0 if name == "q" else 4, tensor.shape[0]).copy_(tensor)


SHAPES = {"q": (4, 4), "k": (2, 4), "embed": (5, 4)}


def traced(model: Fused, shapes: dict[str, tuple[int, ...]] = SHAPES) -> StagingPlan:
    return trace(model.load_weights, model.named_parameters(remove_duplicate=False), shapes, torch.float32)


def test_a_traced_loader_changes_nothing_and_its_plan_does_what_it_would_have_done(tmp_path: Path) -> None:
    model, other = Fused(), Fused()
    before = digest_of(dict(model.named_parameters()))
    plan = traced(model)
    plan.calibrate()
    assert digest_of(dict(model.named_parameters())) == before
    new = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    staging = Staging(plan.sources())
    manifest = write_shm(tmp_path / "v1", new, 1)
    assert staging.fetch(manifest, 10) == sum(t.nbytes for t in new.values())
    assert digest_of(dict(model.named_parameters())) == before
    staging.take(manifest)
    padding = model.embed[5:].clone()
    plan.apply()
    other.load_weights(new.items())
    assert torch.equal(model.qk, other.qk)
    assert torch.equal(model.embed[:5], other.embed[:5])
    assert torch.equal(model.embed[5:], padding)
    assert all(whole and torch.equal(tensor, new[name]) for name, tensor, whole in plan.gathered())


def test_a_plan_gives_its_buffer_back_and_takes_it_again_with_its_padding(tmp_path: Path) -> None:
    model = Fused()
    with torch.no_grad():
        model.embed[5:] = 7.0
    plan = traced(model)
    share = RankStaging(plan, architecture="", tied=False)
    assert share.sleep() == share.sleep() == {"error": ""}
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in plan.buffer.values())
    new = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    manifest = write_shm(tmp_path / "v1", new, 1)
    assert "sleeps" in share.stage(manifest, 10)["error"]
    assert share.commit(manifest) == {"applied": False, "error": "the rank is asleep", "poisoned": False}
    assert share.wake() == share.wake() == {"error": ""}
    assert share.stage(manifest, 10) == {"error": ""}
    end = time.monotonic() + 10
    while share.status()["state"] == "staging" and time.monotonic() < end:
        time.sleep(0.001)
    assert share.commit(manifest)["applied"]
    assert torch.equal(model.qk, torch.cat([new["q"], new["k"]]))
    assert torch.equal(model.embed[5:], torch.full((3, 4), 7.0))


def test_a_buffer_that_may_not_be_so_large_is_not_allocated() -> None:
    model = Wide()
    with pytest.raises(EngineError, match=r"engine\.staging_mb is 1, a copy of the parameters takes 2 MiB"):
        trace(model.load_weights, model.named_parameters(), {"wide": (1 << 19,)}, torch.float32, staging_mb=1)


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(1 << 19))

    def load_weights(self, named: object) -> None:
        for _, tensor in named:  # type: ignore[attr-defined]
            self.wide.data.copy_(tensor)


@pytest.mark.parametrize("missing", sorted(SHAPES))
def test_a_parameter_that_the_loader_does_not_fill_is_named(missing: str) -> None:
    with pytest.raises(EngineError, match="parameter embed" if missing == "embed" else "parameter qk"):
        traced(Fused(), {name: shape for name, shape in SHAPES.items() if name != missing})


def test_a_parameter_that_was_repacked_after_loading_is_found() -> None:
    class Computed(Fused):
        def load_weights(self, named: object) -> None:
            super().load_weights((name, tensor * 2) for name, tensor in named)  # type: ignore[attr-defined]

    with pytest.raises(EngineError, match="computes what it copies"):
        traced(Computed())

    class Scaled(Fused):
        def load_weights(self, named: object) -> None:
            super().load_weights(named)
            self.qk.data.mul_(2)

    with pytest.raises(EngineError, match="parameter qk: its loader calls"):
        traced(Scaled())

    model = Fused()
    model.qk = torch.nn.Parameter(torch.empty(0))
    with pytest.raises((EngineError, RuntimeError)):
        traced(model)


def test_a_loader_that_writes_one_place_twice_fails_calibration() -> None:
    class Twice(Fused):
        def load_weights(self, named: object) -> None:
            for name, tensor in named:  # type: ignore[attr-defined]
                if name == "embed":
                    self.embed[:5].data.copy_(tensor)
                    self.embed[5:].data.fill_(0)
                elif name == "q":
                    self.qk.data.narrow(0, 0, 4).copy_(tensor)
                else:
                    self.qk.data.narrow(0, 0, 2).copy_(tensor)

    with pytest.raises(EngineError, match="parameter qk: staging the live weights does not reproduce them"):
        traced(Twice()).calibrate()


def test_tied_parameters_are_staged_once_and_an_untied_engine_takes_a_tied_version(tmp_path: Path) -> None:
    tied, untied = tiny_model(1, tied=True), tiny_model(2)
    assert "lm_head.weight" not in stored_once(tied.named_parameters(remove_duplicate=False))
    manifest = write_shm(tmp_path / "tied", weights(tied), 1)
    sources = {name: whole_source(tensor) for name, tensor in weights(untied).items()}
    with pytest.raises(WeightError, match=r"lacks tensor lm_head\.weight"):
        Staging(sources).check(manifest)
    said = msgspec.structs.replace(manifest, tied=(("lm_head.weight", "model.embed_tokens.weight"),))
    copies = Staging(sources).check(said)
    assert copies == {"lm_head.weight": "model.embed_tokens.weight"}
    with pytest.raises(WeightError, match=r"no place for tensor lm_head.weight \(its embeddings are tied\)"):
        Staging({name: whole_source(t) for name, t in weights(tied).items()}, tied=True).check(
            write_shm(tmp_path / "u", weights(untied), 1)
        )


def test_checkpoint_shapes_come_from_files_or_from_the_architecture(tmp_path: Path) -> None:
    model = tiny_model(1)
    model.save_pretrained(tmp_path / "full")
    model.config.save_pretrained(tmp_path / "bare")
    expected = {name: list(tensor.shape) for name, tensor in weights(model).items()}
    assert checkpoint_shapes(tmp_path / "full") == expected
    assert checkpoint_shapes(tmp_path / "bare") == expected
    (tmp_path / "full" / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(EngineError, match=r"model\.safetensors"):
        checkpoint_shapes(tmp_path / "full")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a limit of vLLM on a CPU")
@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        ({"num_attention_heads": 8, "hidden_size": 128}, EngineConfig(), "head_dim 16 is not supported"),
        ({"max_position_embeddings": 100}, EngineConfig(max_model_len=200), "exceeds the 100 positions"),
        ({}, EngineConfig(tensor_parallel_size=3), "tensor_parallel_size 3 does not divide the 4 heads"),
    ],
)
def test_a_model_that_vllm_could_not_run_is_refused(
    tmp_path: Path, change: dict[str, int], config: EngineConfig, words: str
) -> None:
    tiny_model(1).config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(EngineError, match=words):
        check_model(config, tmp_path)
