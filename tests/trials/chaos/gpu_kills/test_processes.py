"""Processes that are killed: vLLM's by their titles, the others by what started them."""

import subprocess
import sys
from pathlib import Path

from services.settings.load import compose_settings
from tests.trials.chaos.gpu_kills.layouts import LAYOUTS, TINY, Part, Target, layout_named
from tests.trials.chaos.gpu_kills.processes import find_process, is_engine_process
from tests.trials.chaos.gpu_kills.scenario import CONFIG


def test_ranks_of_an_engine_are_told_apart() -> None:
    titles = (
        "VLLM::EngineCore",
        "VLLM::Worker_TP0",
        "VLLM::Worker_TP1",
        "VLLM::Worker_DP0_TP1_EP1",
        "python",
    )
    found = {
        target.label: [title for title in titles if is_engine_process(title, target)]
        for target in (Target(Part.CORE), Target(Part.RANK, 0), Target(Part.RANK, 1))
    }
    assert found == {
        "engine core": ["VLLM::EngineCore"],
        "engine rank 0": ["VLLM::Worker_TP0"],
        "engine rank 1": ["VLLM::Worker_TP1", "VLLM::Worker_DP0_TP1_EP1"],
    }


def test_rank_of_a_trainer_is_found_below_its_service(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "trainer.log"
    log.parent.mkdir()
    rank = (sys.executable, "-c", "import sys; print(file=sys.stderr); input()", "services.trainer")
    service = (
        "import os, subprocess, sys; environ = {**os.environ, 'RANK': '1'}\n"
        f"subprocess.run({rank!r}, env=environ)"
    )
    started = f"subprocess.run({(sys.executable, '-c', service, 'services.trainer')!r}, stdout=log)"
    up = f"import subprocess\nwith open({str(log)!r}, 'w') as log: {started}"
    with subprocess.Popen(
        [sys.executable, "-c", up], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stderr.readline()  # the rank is there
        found = find_process(process.pid, Target(Part.TRAINER, 1), 2)
        assert found is not None
        assert found.environ()["RANK"] == "1"
        alone = find_process(process.pid, Target(Part.TRAINER), 1)
        assert alone is not None
        assert alone == found.parent()
        assert find_process(process.pid, Target(Part.TRAINER), 2) is None
        assert find_process(process.pid, Target(Part.WORKER), 1) is None
        process.stdin.close()


def test_settings_of_every_layout_fit_together_and_have_what_is_killed() -> None:
    for layout in LAYOUTS:
        settings = compose_settings(str(CONFIG), list(layout.overrides), {})
        assert [target.missing_in(settings) for target, _ in layout.kills] == [""] * len(layout.kills)
        tiny = compose_settings(str(CONFIG), [*TINY, *layout.tiny], {})
        assert {target.part for target, _ in layout.kills if target.missing_in(tiny)} <= {
            Part.RANK, Part.CORE,
        }  # fmt: skip
    assert [target.label for target, _ in layout_named("A", "engine core").kills] == ["engine core"]
