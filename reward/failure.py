"""The error of a score that could not be computed, with what a `ScoreFailure` message needs to say."""

from protocol.errors import RewardError


class VerifierError(RewardError):
    """A verifier raised, hung, crashed or returned no number."""

    def __init__(self, verifier: str, error: str) -> None:
        super().__init__(f"{verifier}: {error}")
        self.verifier = verifier
        self.error = error
