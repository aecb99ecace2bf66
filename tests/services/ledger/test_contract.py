"""Every ledger keeps the contract of tests/contracts."""

from tests.contracts.ledger_clock import ClockContract
from tests.contracts.ledger_groups import GroupContract
from tests.contracts.ledger_rebuild import RebuildContract
from tests.contracts.ledger_runs import RunContract
from tests.contracts.ledger_steps import StepContract


class TestClock(ClockContract):
    pass


class TestGroup(GroupContract):
    pass


class TestStep(StepContract):
    pass


class TestRun(RunContract):
    pass


class TestRebuild(RebuildContract):
    pass
