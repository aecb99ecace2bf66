"""Exceptions from the house rules, each with its reason, and the tables that the rules read.

An exception that nothing needs any more is a violation itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

SHORT_MODULES: dict[str, str] = {}
"""Modules under 40 lines that stay although one other imports them."""

DUPLICATE_CLASSES = {
    "LowRank": "the adapter of a linear layer, one for each training backend",
    "Options": "settings of one verifier or environment: its registry finds them by this name",
}
"""Class names that the product has more than once."""

LITERARY_WORDS = {
    "gone": "removed, disconnected or exited",
    "go on|goes on|going on|went on": "continue or resume",
    "lets? go|letting go": "release",
    "own words": "output",
    "mend|mends|mended|mending": "fix",
    "obey|obeys|obeyed|obeying": "apply or follow",
    "heirs?": "child processes",
    "told": "reported or recorded",
    "hold on|holds on": "keep or wait",
    "left alone|leaves? alone|leave each other alone": "do not change or do not affect",
    "bears?|bore": "tolerate or carry",
    "look(s|ed|ing)? (at|again|whether|into|once|that|before)": "check or read",
    "(a|two|another|next|first|the) looks?": "check or read",
}
"""Words (regular expressions) that docstrings, messages and documents avoid, and what they say instead."""

EVASIONS = {
    r"that of|those of": 1.5,
    r"what (a|the|is)|which ones": 1,
    r"of which": 1,
    r"nobody|nothing": 1,
    r"beside|anew|likewise|whatever": 1,
}
"""Constructions (regular expressions) that keep a noun from its reader -> how often 10,000 words of the
product's docstrings and comments have them at most."""

MOST_OF_NAMES = 7
"""How many functions, parameters and variables of the product may be called `of_x`."""

MOST_CLAUSE_CLASSES = 0
"""How many docstrings of the product's classes may begin with what, how, where or which."""

FOREIGN_NAMES: frozenset[str] = frozenset(
    {"trainer.logger", "trainer.save_freq", "trainer.test_freq", "trainer.total_training_steps"}  # of verl
)
"""Names of other projects that documents mention and the code does not."""

MADE_PATHS = frozenset(
    {
        "my_agent.py",
        "my_algorithm.py",
        "my_engine.py",
        "my_game.py",
        "my_loss.py",
        "my_optimizer.py",
        "my_parts.py",
        "my_program.py",
        "my_reward.py",
        "my_server.py",
        "my_standing_program.py",
        "my_stream.py",
        "my_tool_agent.py",
        "test_my_engine.py",
    }
)
"""Paths that documents name and users write."""

MOST_WORDS = {"README.md": 800, "CONTRIBUTING.md": 700, "CHANGELOG.md": 900}
"""Document -> words that it has at most."""

SCENARIO_FOLDERS = {
    "tests": "the repository itself",
    "tests/benchmarks": "the benchmarks run",
    "tests/benchmarks/gpu": "the GPU benchmarks run, without a GPU",
    "tests/benchmarks/generation": "the benchmark of the engines runs, without a GPU",
    "tests/benchmarks/gpu_reshard": "the benchmark of a trainer of two ranks runs, without a GPU",
    "tests/benchmarks/sessions": "the benchmark of sessions runs",
    "tests/benchmarks/staleness": "the staleness benchmark, on hand-made runs",
    "tests/trials/chaos": "the loop under faults",
    "tests/docs": "documents do what they say",
    "tests/trials/fuzz": "bytes from outside are refused or read",
    "tests/integration": "whole runs of several processes",
    "tests/security": "attempts to break what docs/security.md defends",
    "tests/trials/simulation": "runs in virtual time",
    "tests/trials/soak": "what a long run costs",
    "tests/trainer/recomputed": "steps are recomputed by a naive loop, in every backend and layout",
}
"""Folders of tests whose files are named after scenarios."""

SCENARIOS = {
    "tests/rollout/sessions/test_listener.py": "strangers, slow and malformed requests at the endpoint",
    "tests/rollout/sessions/test_off_loopback.py": "clients and strangers that come from another machine",
    "tests/reward/judge/test_served_by_vllm.py": "a judge in vLLM's own server",
    "tests/rollout/engines/test_gpu_settings.py": "settings of vLLM and SGLang that apply on a GPU alone",
    "tests/rollout/engines/test_loading.py": "models are loaded at the same time",
    "tests/rollout/engines/test_orphans.py": "a worker dies, and its engine with it",
    "tests/rollout/engines/vllm/drafts/test_trained_head.py": "versions that bring a draft head",
    "tests/rollout/engines/test_sleep.py": "engines give memory back and return",
    "tests/rollout/environments/test_contract.py": "every environment keeps what `Environment` promises",
    "tests/rollout/environments/test_recorded_episodes.py": "episodes of text and their tools, over kills",
    "tests/rollout/sessions/test_large_requests.py": "requests that are read beside the event loop",
    "tests/rollout/staging/test_wider.py": "parameters in float32 take versions in 16 bits",
    "tests/rollout/weights/test_receivers.py": "every receiver reads what the senders publish",
    "tests/services/settings/test_engine_staging.py": "places of versions, with engines and transports",
    "tests/services/bus/test_binding.py": "where a socket may be bound, and who may connect",
    "tests/services/bus/test_closing.py": "what a closed bus leaves behind",
    "tests/services/bus/test_delivery.py": "a message reaches one receiver",
    "tests/services/bus/test_noise.py": "bytes that are no message",
    "tests/services/bus/test_resend.py": "when a message is sent again",
    "tests/services/ledger/test_clock_jumps.py": "the wall clock of a real server jumps by days",
    "tests/services/ledger/test_contract.py": "every ledger keeps the contract of tests/contracts",
    "tests/services/ledger/test_races.py": "many workers and two trainers at once",
    "tests/services/ledger/test_states.py": "every reachable state of small runs",
    "tests/services/monitor/test_grafana.py": "the dashboard asks for metrics that exist",
    "tests/services/monitor/test_page.py": "the page in a browser",
    "tests/services/rollout/test_session_bound.py": "sessions that live over several versions",
    "tests/services/rollout/test_update_history.py": "whatever happens to trainer, engine and files",
    "tests/services/runtime/test_descriptors.py": "a service raises its limit of descriptors",
    "tests/services/runtime/test_exit_codes.py": "exit codes of services",
    "tests/services/serving/test_adapters.py": "requests name the adapter that answers them",
    "tests/trainer/backends/test_training.py": "both backends train as plain torch does, in every layout",
    "tests/trainer/reference/test_learning.py": "GRPO learns a digit",
    "tests/trainer/weights/test_nccl_death.py": "either end of a transfer dies",
    "tests/trainer/weights/served/test_changes.py": "versions that are sent as changes, by both ends",
    "tests/trainer/weights/served/test_death.py": "either end of a transfer of slices dies",
    "tests/trainer/weights/test_provisional.py": "versions that are sent during their export",
}
"""Test files in mirrored folders that are named after a scenario, and the scenario."""


@dataclass(frozen=True)
class Constant:
    """A number in a document that is a constant in the code."""

    document: str
    pattern: str
    """Regular expression; its first group is the number, with or without commas."""
    name: str
    """Dotted name of the constant."""
    scale: Callable[[float], float] = float
    """From the constant to the number in the document."""


def _mib(value: float) -> float:
    return value / (1 << 20)


def _log2(value: float) -> float:
    return int(value).bit_length() - 1


CONSTANTS = (
    Constant("ARCHITECTURE.md", r"modules of at most (\d+) lines", "tests.house.sizes.MODULE_LINES"),
    Constant("ARCHITECTURE.md", r"functions of at most (\d+)", "tests.house.sizes.FUNCTION_LINES"),
    Constant("ARCHITECTURE.md", r"folders of at most (\d+) modules", "tests.house.sizes.FOLDER_MODULES"),
    Constant("CONTRIBUTING.md", r"(\d+) at most; functions", "tests.house.sizes.MODULE_LINES"),
    Constant("CONTRIBUTING.md", r"functions of (\d+) lines at most", "tests.house.sizes.FUNCTION_LINES"),
    Constant("CONTRIBUTING.md", r"folders of (\d+) modules at most", "tests.house.sizes.FOLDER_MODULES"),
    Constant("docs/guarantees.md", r"the last ([\d,]+) finished", "services.bus.receiver.REMEMBERED_IDS"),
    Constant(
        "docs/security.md", r"`bus.max_frame_bytes` \((\d+) MiB\)", "protocol.codec.MAX_FRAME_BYTES", _mib
    ),
    Constant("docs/security.md", r"payloads over (\d+) MiB", "protocol.codec.SMALL_BYTES", _mib),
    Constant("docs/security.md", r"at most 2\^(\d+) in", "protocol.msgpack_limits.MAX_ITEMS", _log2),
    Constant("docs/security.md", r"in a manifest 2\^(\d+)", "protocol.msgpack_limits.MANIFEST_ITEMS", _log2),
    Constant("docs/security.md", r"in (\d+) levels", "protocol.msgpack_limits.MAX_DEPTH"),
    Constant(
        "docs/weights.md",
        r"(\d+) MiB of transfer buffers",
        "rollout.staging.places.RECEIVING_BYTES",
        _mib,
    ),
    Constant(
        "docs/weights.md", r"on a GPU up to (\d+) MiB", "protocol.device.slice_digests.BATCH_BYTES", _mib
    ),
    Constant("docs/guarantees.md", r"equal within ([\d.e-]+)", "services.tools.replay.LOSS_TOLERANCE"),
)
