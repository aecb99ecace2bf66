"""Defines the messages that record a session's calls and replay them.

The result of a tool is recorded as a call with a name and without tokens.

Shapes: C tokens that the harness added, T sampled tokens, S version spans.
"""

from protocol.messages.base import Message
from protocol.tensors import Array


class Call(Message, tag="call", frozen=True, kw_only=True):
    """Answered call of a session, which a worker sends to the ingest before the harness gets the answer."""

    group: int
    token: str
    """Token of the lease under which the call was made."""
    epoch: str
    """Epoch of the lease. Calls are replayed within their epoch only."""
    engine: str
    """Incarnation of the engine that generated the answer."""
    sample: int
    """Index of the sample in the group; failed samples count."""
    attempt: int
    """Attempt at the sample, counted from 0 over all leases of the group."""
    number: int
    """Number of the call, counted from 0 over all attempts at the sample."""
    parent: int
    """Number of the call whose tokens this call continues; -1: none."""
    inserted: Array
    """int32 [C]: tokens that the harness added after `parent`'s tokens."""
    tokens: Array
    """int32 [T]: the answer."""
    logprobs: Array
    """float32 [T] nats, as sampled."""
    spans: Array
    """int32 [S, 2], rows (end, version): tokens from the previous row's `end` to this one have this version.
    """
    finish_reason: str
    """"stop" or "length"."""
    request: str
    """Hash of the request, 32 hex digits. It covers messages and tools, or the prompt, and the token limit
    and `sampling`."""
    context: str
    """Hash of all tokens before the answer, 32 hex digits."""
    began_ms: int = 0
    """Time when the engine received the request: Unix time on the worker's clock, ms."""
    ended_ms: int = 0
    """Time when the engine had answered: Unix time on the worker's clock, ms."""
    name: str = ""
    """Name of the tool result, given by the harness; empty: a call of the model."""
    result: bytes = b""
    """Tool result as JSON. With a tool result, the arrays and hashes are empty and `parent` is -1."""
    sampling: str = ""
    """Sampling parameters, as JSON, that the request sets instead of the run's; empty: none. If set, the
    answer is context only: none of its tokens may be trained."""


class Recall(Message, tag="recall", frozen=True, kw_only=True):
    """Request for the calls of a sample that earlier leases of its group recorded.

    The ingest answers with `Recalled`. Afterwards the ingest refuses calls under any other lease.
    """

    group: int
    token: str
    """Token of the current lease."""
    epoch: str
    sample: int


class Recalled(Message, tag="recalled", frozen=True, kw_only=True):
    """Reply of the ingest to a `Recall`: the calls of the sample's last attempt."""

    calls: tuple[Call, ...] = ()
    """In the order of their numbers; empty if recorded in another epoch."""
    attempt: int = 0
    """Attempt that recorded the calls; without calls, the next attempt."""
    number: int = 0
    """Number for the next call."""
