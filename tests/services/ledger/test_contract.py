"""The contract of a ledger, on the one in memory, on Valkey and on Redis."""

from tests.contracts.ledger_groups import GroupContract
from tests.contracts.ledger_rebuild import RebuildContract
from tests.contracts.ledger_runs import RunContract
from tests.contracts.ledger_steps import StepContract


class TestGroup(GroupContract):
    pass


class TestStep(StepContract):
    pass


class TestRun(RunContract):
    pass


class TestRebuild(RebuildContract):
    pass
