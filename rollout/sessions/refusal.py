"""Defines the refusal of a request, and the error body sent to its client."""

from collections.abc import Sequence

MAX_MESSAGE = 1000
"""Maximum characters of an error message, which may quote the request."""
MAX_PARAM = 200


class RequestRefused(Exception):
    """Refused request; session state is unchanged.

    The fields match an error of the OpenAI API, whose clients choose an exception by the status.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message[:MAX_MESSAGE])
        self.status = status
        self.code = code
        self.message = message[:MAX_MESSAGE]
        self.param = param and param[:MAX_PARAM]
        """Name of the invalid request field."""

    @property
    def body(self) -> dict[str, object]:
        """Error body in the OpenAI format."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }


def ended(reason: str) -> RequestRefused:
    """Return the refusal of a request to an ended session."""
    return RequestRefused(410, "session_ended", f"the session has ended: {reason}")


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> RequestRefused:
    """Return the refusal of an invalid request; a retry cannot succeed."""
    return RequestRefused(400, code, message, param)


def unsupported(name: str, value: object, supported: str) -> RequestRefused:
    """Return the refusal of a field's value; `supported` describes the supported values."""
    shown = repr(value)[:80]
    return invalid(f"{name} = {shown} is not supported, only {supported}", name, "unsupported_value")


def check_supported(name: str, value: object, supported: Sequence[object]) -> None:
    """Raise RequestRefused if a field's value is neither None nor in `supported`."""
    if value is not None and value not in supported:
        raise unsupported(name, value, " or ".join(map(repr, supported)))
