"""Tests that every layout starts from the source's bits, trains as plain torch does, and restores exactly."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from protocol.weights.lora import NO_ADAPTERS
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.models import (
    ALL_MODELS,
    PlainTrainer,
    make_batch,
    make_model,
    plain_logprobs,
    save_model,
    step_batch,
)
from tests.trainer.megatron.ranks import (
    ALGORITHM,
    BACK,
    FROM,
    LAYOUTS,
    OVERFLOWS,
    RESTORED,
    STEPS,
    make_backend,
    models_of,
    restore_from,
    run,
)
from trainer.config import ParallelConfig
from trainer.megatron.architecture.reading import read_architecture
from trainer.megatron.checkpoint.description import TrainedModel
from trainer.megatron.checkpoint.reading import CheckpointReader, read_description
from trainer.megatron.layout import Grid, Layout, Place

pytestmark = pytest.mark.xdist_group("layouts")  # what the module sets up once, not one for each process


def marks_of(layout: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if LAYOUTS[layout].world_size > 2 else []


EACH_LAYOUT = pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=marks_of(layout)) for layout in LAYOUTS]
)
EACH_LAYOUT_AND_MODEL = pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(layout, model, marks=marks_of(layout))
        for layout in LAYOUTS
        for model in models_of(layout)
    ],
)


class Runs:
    """Results by layout, each launched once, when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models = root / "models"
        for name in ALL_MODELS:
            save_model(name, self.models)
        self._started: set[str] = set()
        self._plain: dict[str, tuple[list[dict[str, float]], dict[str, torch.Tensor]]] = {}

    def __call__(self, layout: str) -> Path:
        if layout not in self._started:
            # Also when it fails: its other tests then fail on what is missing, instead of waiting once more.
            self._started.add(layout)
            if LAYOUTS[layout].world_size == 1:
                run(layout, self.models, self.root / layout)
            else:
                for source in FROM.get(layout, ()):
                    self(source)
                arguments = (layout, str(self.models), str(self.root / layout))
                launch(
                    LAYOUTS[layout].world_size,
                    "tests.trainer.megatron.ranks",
                    *arguments,
                    logs=self.root / f"logs-{layout}",
                )
        return self.root / layout

    def restore_back(self) -> None:
        """Restore in a single rank what the ranks of other layouts saved."""
        self("single")
        for source in BACK:
            self(source)
            restore_from(source, "single", self.models, self.root / "single")

    def plain(self, model: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        """Statistics of each step and the weights after the last, from plain torch."""
        if model not in self._plain:
            trainer = PlainTrainer(model, ALGORITHM)
            stats = [trainer.step(step_batch(model, step)) for step in range(STEPS)]
            self._plain[model] = stats, trainer.weights()
        return self._plain[model]


@pytest.fixture(scope="module")
def moves(runs: Runs) -> Runs:
    """Results by layout, those of other layouts' checkpoints included."""
    runs.restore_back()
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(tmp_path_factory.mktemp("layouts"))


def same_bits(left: Path, right: Path) -> bool:
    a, b = load_file(left), load_file(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@EACH_LAYOUT_AND_MODEL
def test_export_before_training_is_the_source(runs: Runs, layout: str, model: str) -> None:
    exported = load_file(runs(layout) / model / "before.safetensors")
    source = dict(make_model(model).named_parameters())
    assert exported.keys() == source.keys()
    assert [name for name in source if not torch.equal(exported[name], source[name])] == []


@EACH_LAYOUT_AND_MODEL
def test_logprobs_equal_hugging_face(runs: Runs, layout: str, model: str) -> None:
    of_ranks = load_file(runs(layout) / model / "logprobs.safetensors")["first"]
    logprobs = of_ranks.amin(0)  # 0 on the ranks of other replicas
    assert all(((row == logprobs) | (row == 0)).all() for row in of_ranks)
    assert (
        (of_ranks != 0).sum(0) == len(of_ranks) // LAYOUTS[layout].data_parallel_size * (logprobs != 0)
    ).all()
    batch = make_batch(model, 0)
    with torch.no_grad():
        expected, _ = plain_logprobs(make_model(model), batch)
    torch.testing.assert_close(logprobs, expected * batch.sampled_mask, atol=2e-6, rtol=0)


@EACH_LAYOUT_AND_MODEL
def test_training_equals_plain_torch(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    expected_stats, expected = runs.plain(model)
    for stats, wanted in zip(json.loads((directory / "stats.json").read_text()), expected_stats, strict=True):
        assert stats.pop("skipped") == ""
        assert 1 <= stats.pop("micro_batches") <= 13
        assert 0 <= stats.pop("padding_share") < 0.1
        assert stats == pytest.approx(wanted, rel=5e-5, abs=2e-5)  # rel: a gradient norm of 20 in float32
    trained = load_file(directory / "after.safetensors")
    worst = max((trained[name] - expected[name]).abs().max().item() for name in expected)
    assert worst < 1e-5


@EACH_LAYOUT_AND_MODEL
def test_continuing_from_a_checkpoint_is_bit_identical(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    assert same_bits(directory / "after.safetensors", directory / "restored.safetensors")


@EACH_LAYOUT_AND_MODEL
def test_export_is_what_the_ranks_hold(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    exported = load_file(directory / "after.safetensors")
    held = gather_by_hand(directory / "held", layout, model)
    for name, tensor in held.items():
        assert torch.equal(exported[name], tensor), name
    assert held.keys() == exported.keys()


@EACH_LAYOUT_AND_MODEL
def test_reference_stays_while_the_model_moves(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    kept = load_file(directory / "reference.safetensors")
    assert torch.equal(kept["first"], load_file(directory / "logprobs.safetensors")["first"])
    assert not torch.equal(kept["now"], kept["first"])


@EACH_LAYOUT_AND_MODEL
def test_saved_checkpoint_loads_in_transformers(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory / "hf")
    weights = dict(loaded.named_parameters())
    exported = load_file(directory / "after.safetensors")
    assert weights.keys() == exported.keys()
    assert all(torch.equal(weights[name], exported[name]) for name in weights)


@EACH_LAYOUT
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_sixteen_bits_train_on_float32_masters(runs: Runs, layout: str, name: str) -> None:
    directory, dtype = runs(layout) / name, getattr(torch, name)
    before, after = load_file(directory / "before.safetensors"), load_file(directory / "after.safetensors")
    source = dict(make_model("qwen3-tied").named_parameters())
    assert all(torch.equal(before[name], source[name].to(dtype)) for name in source)
    _, expected = runs.plain("qwen3-tied")
    for name, tensor in after.items():
        assert tensor.dtype is dtype
        torch.testing.assert_close(tensor.float(), expected[name], atol=5e-3, rtol=1e-2)
    assert same_bits(directory / "after.safetensors", directory / "restored.safetensors")
    files = [load_file(path) for path in (directory / "after-one").glob("rank-*.safetensors")]
    assert {tensor.dtype for file in files for name, tensor in file.items() if "/" in name} == {torch.float32}
    scale, repeats = json.loads((directory / "scale.json").read_text())
    if dtype is torch.float16:
        assert (scale * 2**repeats, repeats > 0) == (OVERFLOWS, True)
        assert {tuple(file["loss_scale"].tolist()) for file in files} == {(scale, 1.0)}
    else:
        assert (scale, repeats) == (None, None)


EACH_MOVE = pytest.mark.parametrize(
    ("source", "layout"),
    [
        pytest.param(source, layout, marks=[*marks_of(layout), *marks_of(source)])
        for layout, sources in {**FROM, "single": BACK}.items()
        for source in sources
    ],
)


@EACH_MOVE
@pytest.mark.parametrize("saved", RESTORED)
def test_masters_and_moments_are_the_same_bits_in_another_layout(
    moves: Runs, source: str, layout: str, saved: str
) -> None:
    model_dir = moves.models / RESTORED[saved][1]
    before = whole_state(moves(source) / saved / "after-one", model_dir)
    after = whole_state(moves(layout) / saved / f"from-{source}", model_dir)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert before["steps"] == 1


@EACH_MOVE
@pytest.mark.parametrize("saved", RESTORED)
def test_a_run_goes_on_in_another_layout_as_if_it_had_stayed(
    moves: Runs, source: str, layout: str, saved: str
) -> None:
    stayed = load_file(moves(source) / saved / "after.safetensors")
    moved = load_file(moves(layout) / saved / f"went-on-from-{source}.safetensors")
    atol, rtol = (1e-5, 0.0) if saved == "qwen2" else (5e-3, 1e-2)
    for name, expected in stayed.items():
        torch.testing.assert_close(moved[name], expected, atol=atol, rtol=rtol, msg=name)


def whole_state(checkpoint: Path, model_dir: Path) -> dict[str, torch.Tensor]:
    """Masters and moments by Hugging Face name, as a single rank would restore them."""
    architecture = read_architecture(model_dir)
    single = Layout.of(ParallelConfig(), architecture.layers)
    model = TrainedModel(architecture, single, "float32", NO_ADAPTERS, distributed=False)
    result = {}
    with CheckpointReader(checkpoint, read_description(checkpoint), model) as reader:
        result["steps"] = torch.tensor(reader.steps)
        shapes = {rule.parameter: rule.local_shape(Grid()) for rule in model.rules(0)}
        for kind in reader.kinds:
            flat = {
                rule.parameter: reader.flat(kind, rule, Place(), 0, 10**9).view(shapes[rule.parameter])
                for rule in model.rules(0)
            }
            for plan in model.plans().values():
                rows = [
                    flat[plan.parameter].narrow(plan.dim, piece.local_start, piece.length)
                    for piece in plan.pieces
                ]
                result[f"{kind} {plan.name}"] = torch.cat(rows, plan.dim)
    return result


def test_moments_of_a_rank_are_those_of_its_optimizer(runs: Runs, tmp_path: Path) -> None:
    """What `whole_state` reads, without the code that wrote it."""
    backend = make_backend(runs.models / "qwen2", "single")
    backend.train_step(step_batch("qwen2", 0))
    backend.save(tmp_path)
    state = whole_state(tmp_path, runs.models / "qwen2")
    held = {id(parameter): name for name, parameter in backend._parameters.items()}
    (adam,) = backend._optimizer.torch_optimizers
    found = {held[id(parameter)]: values for parameter, values in adam.state.items()}
    backend.close()
    for kind in ("exp_avg", "exp_avg_sq"):
        norm = found["decoder.layers.1.input_layernorm.weight"][kind]
        assert torch.equal(state[f"{kind} model.layers.1.input_layernorm.weight"], norm)
        gate_up = found["decoder.layers.1.mlp.linear_fc1.weight"][kind]
        names = [f"{kind} model.layers.1.mlp.{half}_proj.weight" for half in ("gate", "up")]
        assert torch.equal(torch.cat([state[name] for name in names]), gate_up)


def gather_by_hand(directory: Path, layout: str, model: str) -> dict[str, torch.Tensor]:
    """Hugging Face tensors from the ranks' files, without the rules: reshapes and concatenations only."""
    config = make_model(model).config
    parallel = LAYOUTS[layout]
    result = {}
    for stage in range(parallel.pipeline_model_parallel_size):
        files = [
            load_file(directory / f"tp{tp}-pp{stage}.safetensors")
            for tp in range(parallel.tensor_model_parallel_size)
        ]
        first = stage * config.num_hidden_layers // parallel.pipeline_model_parallel_size
        for name in files[0]:
            parts = [file[name] for file in files]
            if name.startswith("decoder.layers."):
                local, kind = name.removeprefix("decoder.layers.").split(".", 1)
                layer = f"model.layers.{int(local) + first}."
                result.update(
                    {layer + key: value for key, value in layer_by_hand(kind, parts, config).items()}
                )
            elif name == "decoder.final_layernorm.weight":
                result["model.norm.weight"] = parts[0]
            else:
                tied = config.tie_word_embeddings or name.startswith("embedding")
                result["model.embed_tokens.weight" if tied else "lm_head.weight"] = torch.cat(parts)[
                    : config.vocab_size
                ]
    return result


def layer_by_hand(
    kind: str, parts: list[torch.Tensor], config: transformers.PretrainedConfig
) -> dict[str, torch.Tensor]:
    suffix = kind.rsplit(".", 1)[1]
    if "linear_qkv" in kind:
        fused = torch.cat(parts)
        groups, queries = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        pieces = fused.view(groups, queries + 2, config.head_dim, *fused.shape[1:]).split([queries, 1, 1], 1)
        split = [part.reshape(-1, *fused.shape[1:]) for part in pieces]
        if config.model_type == "phi3":
            return {"self_attn.qkv_proj.weight": torch.cat(split)}
        return {f"self_attn.{x}_proj.{suffix}": part for x, part in zip("qkv", split, strict=True)}
    if "linear_fc1" in kind:
        gate, up = (torch.cat(half) for half in zip(*(part.chunk(2) for part in parts), strict=True))
        if config.model_type == "phi3":
            return {"mlp.gate_up_proj.weight": torch.cat([gate, up])}
        return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    columns = {
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    if kind in columns:
        return {columns[kind]: torch.cat(parts, 1)}
    if config.model_type == "olmo2" and "self_attention" in kind:
        return {f"self_attn.{kind[len('self_attention.')]}_norm.weight": torch.cat(parts)}
    names = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "post_attention_layernorm.weight": "post_attention_layernorm.weight",
        "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    }
    assert all(torch.equal(part, parts[0]) for part in parts)
    return {names[kind]: parts[0]}
