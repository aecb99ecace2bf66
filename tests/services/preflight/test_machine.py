"""Tests what is found of GPUs, attention kernels and the run directory before a run starts."""

import re
import sys
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.preflight.machine import (
    attention_problems,
    check_directory,
    device_problems,
    directory_problems,
)
from services.preflight.model import read_model
from tests.services.preflight.test_check import demo, found


@pytest.mark.parametrize(
    ("override", "gpus", "words"),
    [
        (
            "services.trainer_gpus=0",
            [],
            "setting services.trainer_gpus = '0': torch sees no GPU 0 here, it sees none",
        ),
        ("services.rollout_gpus='0,2'", ["0", "1"], "torch sees no GPU 2 here, it sees 0, 1"),
        ("services.rollout_gpus='0,1'", ["0", "1"], None),
        ("services.eval_gpus=GPU-a", ["0", "1"], None),
        (
            "trainer.device=cuda",
            [],
            "setting trainer.device = 'cuda': torch sees no GPU here; use auto or cpu",
        ),
        ("trainer.device=cuda", ["0"], None),
        ("colocated.enabled=true", [], "setting colocated.enabled = True: vLLM cannot sleep on a CPU"),
        ("engine.enable_sleep_mode=true", [], "vLLM cannot sleep on a CPU"),
        ("engine.enable_sleep_mode=true", ["0"], None),
        ("trainer.routing_replay=true", [], "vLLM cannot record experts on a CPU"),
    ],
)
def test_a_gpu_that_is_not_there_is_named(
    tmp_path: Path, override: str, gpus: list[str], words: str | None
) -> None:
    problems = [str(problem) for problem in device_problems(demo(tmp_path / "run", override), gpus)]
    assert problems == [] if words is None else len(problems) == 1 and words in problems[0], problems


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_library_for_attention_is_refused_where_it_cannot_compute(backend: str, tmp_path: Path) -> None:
    settings = demo(
        tmp_path / "run",
        f"trainer.backend={backend}",
        "trainer.attention_backend=flash_attn",
        "trainer.dtype=float32",
    )
    model = read_model(settings)
    texts = [str(problem) for problem in attention_problems(settings, model, [])]
    assert any(
        "it computes on a GPU in 16 bits; the trainer is on a CPU, in float32" in text for text in texts
    )
    for usual in ("auto", "torch", "segments"):
        settings = demo(tmp_path / "run", f"trainer.attention_backend={usual}")
        assert list(attention_problems(settings, model, [])) == []


def test_fp8_without_its_library_or_on_a_cpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    settings = demo(tmp_path, "trainer.backend=fsdp", "trainer.dtype=bfloat16", "trainer.fp8=rowwise")
    for gpus in ([], ["0"]):
        texts = [str(problem) for problem in device_problems(settings, gpus)]
        assert "setting trainer.fp8 = 'rowwise': torchao is not installed" in texts[0]
        assert [
            "FP8 is computed on a GPU of compute capability 8.9 or more, and the trainer is on a CPU" in text
            for text in texts[1:]
        ] == [True] * (not gpus)


@pytest.mark.parametrize("place", ["/proc/run", "/proc/self/status", "/dev/null/run"])
def test_a_place_that_takes_no_directory_is_refused(place: str) -> None:
    (problem,) = directory_problems(Path(place))
    assert re.match(f"setting run.dir = '{place}': /.* cannot be written: ", str(problem))


@pytest.mark.parametrize(
    ("target", "reason"),
    [("run", "Too many levels of symbolic links"), ("none", "No such file or directory")],
)
def test_a_link_that_leads_nowhere_is_refused(target: str, reason: str, tmp_path: Path) -> None:
    link = tmp_path / "run"
    link.symlink_to(tmp_path / target)
    for place in (link, link / "inside"):
        (problem,) = directory_problems(place)
        assert f"setting run.dir = '{place}': {link} cannot be written: {reason}; " in str(problem)


def test_a_directory_of_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    assert list(directory_problems(tmp_path / "new" / "run")) == []
    assert list(directory_problems(tmp_path)) == []
    (tmp_path / "up.log").write_text("")
    assert list(directory_problems(tmp_path)) == []
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(SettingsError, match=r"it holds other files \(thesis\.tex\) and no run"):
        check_directory(tmp_path)
    (tmp_path / "settings.json").write_text("{}")
    check_directory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.tex", "settings.json", "up.log"}


def test_an_interpreter_without_sglang_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    settings = demo(tmp_path / "run", "engine.name=sglang", f'engine.python="{bare}"')
    assert f"setting engine.name = 'sglang': {bare} has no SGLang; " in "\n".join(found(settings, local=True))
