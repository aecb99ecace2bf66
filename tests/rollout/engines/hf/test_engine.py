"""Tests that versions of a mixture of experts come as its checkpoint has them; bounded attention scores."""

import gc
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.device.checkpoint_views import checkpoint_views, model_tensors
from protocol.errors import WeightError
from protocol.weights.deltas import changes_name
from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.contract.models import follows, tiny_model, weights, write_shm
from rollout.engines.hf.engine import HFEngine
from rollout.staging.staging import digest_of
from tests.trainer.megatron.models import make_model
from tests.trainer.weights.senders import layout_of, part_sender
from trainer.config import WeightConfig
from trainer.weights.files import disk_sender

PROMPT = (5, 17, 20, 33)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss"])
async def test_a_version_has_the_tensors_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    model = make_model(name).eval()
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        for tensor in model_tensors(model).values():
            tensor.mul_(1.5)
    tensors = model_tensors(model)
    wanted = write_shm(tmp_path / "v0", checkpoint_views(model, tensors), 0)
    engine = HFEngine(EngineConfig(name="hf", max_model_len=64), tmp_path / "model", "engine.0")
    try:
        await engine.start()
        if name != "gpt-oss":  # its checkpoints have the experts joined, too
            with pytest.raises(WeightError, match=r"lacks tensor .*\.experts\.0\."):
                await engine.stage(write_shm(tmp_path / "v1", tensors, 1))
        await engine.stage(wanted)
        await engine.commit(wanted)
        assert await engine.live_digest() == wanted.digest
        found = await engine.generate(Request("a/0", PROMPT, Sampling(max_tokens=12, temperature=0)))
    finally:
        await engine.close()
    assert follows([(12, model)], PROMPT, found.tokens, recompute=True)


@pytest.mark.parametrize(("staging", "copies"), [("device", 2), ("host", 2), ("layers", 1)])
async def test_engine_that_stages_in_layers_has_one_set_of_parameters(
    tmp_path: Path, staging: Literal["device", "host", "layers"], copies: int
) -> None:
    model, new = tiny_model(1), weights(tiny_model(2))
    shape = tuple(new["lm_head.weight"].shape)
    alike = sum(tuple(tensor.shape) == shape for tensor in new.values())
    model.save_pretrained(tmp_path / "model")
    manifest = write_shm(tmp_path / "v0", new, 0)
    before = storages(shape)
    engine = HFEngine(
        EngineConfig(name="hf", max_model_len=64, staging=staging), tmp_path / "model", "engine.0"
    )
    try:
        await engine.start()
        await engine.stage(manifest)
        await engine.commit(manifest)
        assert await engine.live_digest() == manifest.digest
        assert len(storages(shape) - before) == copies * alike
    finally:
        await engine.close()


@pytest.mark.parametrize("staging", ["device", "host", "layers"])
async def test_biases_that_transformers_keeps_in_float32_take_versions_in_16_bits(
    tmp_path: Path, staging: Literal["device", "host", "layers"]
) -> None:
    half = torch.bfloat16
    model = make_model("deepseek-v3").eval()
    biases = [tensor for name, tensor in model_tensors(model).items() if "correction_bias" in name]
    for tensor in model_tensors(model).values():
        tensor.copy_(tensor.to(half))
    model.save_pretrained(tmp_path / "model")
    config = EngineConfig(name="hf", dtype="bfloat16", max_model_len=64, staging=staging)
    engine = HFEngine(config, tmp_path / "model", "engine.0")
    try:
        await engine.start()
        loaded = model_tensors(engine._model.decoder._model)  # type: ignore[attr-defined]
        wide = [tensor for tensor in loaded.values() if tensor.dtype is torch.float32]
        assert len(wide) == len(biases) > 0
        for version in range(3):
            for bias in biases:
                bias.copy_(torch.randn_like(bias).mul(0.1).to(half))
            manifest = write_shm(tmp_path / f"v{version}", weights(model, half), version)
            if version == 2:
                await engine.sleep()
                await engine.wake()
            await engine.stage(manifest)
            await engine.commit(manifest)
            assert await engine.live_digest() == manifest.digest
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(wide, biases, strict=True))
        wrong = weights(model, half)
        wrong["model.norm.weight"] = wrong["model.norm.weight"].float()
        with pytest.raises(WeightError, match=r"tensor model\.norm\.weight is float32.* is bfloat16"):
            await engine.stage(write_shm(tmp_path / "v3", wrong, 3))
    finally:
        await engine.close()


def storages(shape: tuple[int, ...]) -> set[int]:
    """Return the addresses of the memory of all tensors of a shape in this process."""
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.shape == shape]
    return {one.untyped_storage().data_ptr() for one in found}


async def test_attention_scores_are_bounded_where_the_model_bounds_them(tmp_path: Path) -> None:
    make_model("gemma2").save_pretrained(tmp_path / "model")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    engine = HFEngine(EngineConfig(name="hf", max_model_len=64), tmp_path / "model", "engine.0")
    try:
        await engine.start()
        found = await engine.generate(Request("a/0", PROMPT, Sampling(max_tokens=12, temperature=1.0)))
    finally:
        await engine.close()
    tokens = torch.tensor([[*PROMPT, *found.tokens]])
    with torch.no_grad():
        table = torch.log_softmax(oracle(tokens).logits[0].float(), -1)
    expected = table[len(PROMPT) - 1 : -1].gather(-1, tokens[0, len(PROMPT) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("staging", ["device", "layers"])
async def test_engine_follows_changes_and_serves_on_where_a_link_is_wrong(
    tmp_path: Path, staging: Literal["device", "layers"]
) -> None:
    model = tiny_model(1)
    model.save_pretrained(tmp_path / "model")
    tensors = {name: tensor.clone() for name, tensor in weights(model).items()}
    deltas = WeightConfig(delta=True, keep=9)
    sender = disk_sender(deltas, tmp_path, layout_of(tensors.items(), deltas))
    config = EngineConfig(name="hf", max_model_len=64, staging=staging)
    engine = HFEngine(config, tmp_path / "model", "engine.0")
    request = Request("a/0", PROMPT, Sampling(max_tokens=12, temperature=0))
    try:
        await engine.start()
        for version in range(4):
            for tensor in tensors.values():
                tensor.view(-1)[version::50] *= 1.5
            manifest = sender.publish("e1", version, tensors.items())
            assert len(manifest.chain) == 1 + version
            delta = Path(manifest.location) / changes_name(0)
            if version == 2:
                delta.write_bytes(delta.read_bytes()[:-1] + b"\xff")
            if version < 2:
                await engine.stage(manifest)
                await engine.commit(manifest)
                live = await engine.live_digest()
                assert live == manifest.digest
                continue
            with pytest.raises(WeightError, match=r"tensor .*: digest"):
                await engine.stage(manifest)
            with pytest.raises(WeightError):
                await engine.commit(manifest)
            assert (engine.served.version, await engine.live_digest()) == (1, live)
            assert (await engine.generate(request)).spans == ((12, 1),)
        late = disk_sender(deltas, tmp_path, layout_of(tensors.items(), deltas))  # starts again
        manifest = late.publish("e2", 4, tensors.items())
        await engine.stage(manifest)
        await engine.commit(manifest)
        assert await engine.live_digest() == manifest.digest
    finally:
        await engine.close()


async def test_engine_takes_changes_over_nccl_also_after_it_has_slept(tmp_path: Path) -> None:
    model = tiny_model(1)
    model.save_pretrained(tmp_path / "model")
    tensors = {name: tensor.clone() for name, tensor in weights(model).items()}
    engine = HFEngine(EngineConfig(name="hf", max_model_len=64), tmp_path / "model", "engine.0")
    sender = part_sender(WeightConfig(transport="nccl", backend="gloo", delta=True), tensors.items())
    read, whole = list[int](), sum(tensor.nbytes for tensor in tensors.values())
    try:
        await engine.start()
        for version in range(5):
            for tensor in tensors.values():
                tensor.view(-1)[version::50] *= 1.5
            manifest = sender.publish("e1", version, tensors.items())
            await engine.stage(manifest)
            await engine.commit(manifest)
            assert await engine.live_digest() == manifest.digest == digest_of(tensors)
            receiver = engine._staging.staging._receiver._receiver  # type: ignore[union-attr]
            read.append(sum(channel.read for channel, _ in receiver._connections.values()))
            if version == 2:
                await engine.sleep()
                await engine.wake()
    finally:
        await engine.close()
        sender.close()
    assert [n >= whole for n in read] == [True, False, False, True, False]
    assert all(0 < n < whole / 10 for n in (read[1], read[2], read[4]))
