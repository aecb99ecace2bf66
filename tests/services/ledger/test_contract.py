from tests.contracts.ledger_suite import GroupContract, RunContract, StepContract


class TestGroup(GroupContract):
    pass


class TestStep(StepContract):
    pass


class TestRun(RunContract):
    pass
