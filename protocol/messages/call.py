"""Defines the messages of one call of a session: journalled before it is answered, and recalled.

A tool's result is a call, too: one with a name and without tokens.

Shapes: C tokens that the harness added, T sampled tokens, S version spans.
"""

from protocol.messages.base import Message
from protocol.tensors import Array


class Call(Message, tag="call", frozen=True, kw_only=True):
    """An answered call of a session, sent by a rollout worker to the ingest before the harness has it."""

    group: int
    token: str
    """The lease token under which it was made."""
    epoch: str
    """Epoch of the lease: calls of another one are not replayed."""
    engine: str
    """Incarnation of the engine that generated it."""
    sample: int
    """Index of the sample in the group, those that fail included."""
    attempt: int
    """Attempt at the sample, counted from 0 over all leases of the group."""
    number: int
    """Number of the call, counted from 0 over all attempts at the sample."""
    parent: int
    """Number of the call whose tokens it continues; -1: it continues none."""
    inserted: Array
    """int32 [C]: tokens that the harness added after `parent`'s tokens."""
    tokens: Array
    """int32 [T]: the answer."""
    logprobs: Array
    """float32 [T] nats, as sampled."""
    spans: Array
    """int32 [S, 2], rows (end, version): tokens from the end of the row above to `end` are of `version`."""
    finish_reason: str
    """"stop" or "length"."""
    request: str
    """Hash of the request: its messages and tools, or its prompt, its limit of tokens, and `sampling`; 32 hex
    digits."""
    context: str
    """Hash of all tokens that the answer continues, 32 hex digits."""
    began_ms: int = 0
    """When the engine was asked, Unix time on the worker's clock, ms."""
    ended_ms: int = 0
    """When the engine had answered, Unix time on the worker's clock, ms."""
    name: str = ""
    """The harness's name for this tool result; empty: a call of the model."""
    result: bytes = b""
    """That result, as JSON. The arrays and hashes of the call are empty then, and `parent` is -1."""
    sampling: str = ""
    """Sampling parameters that its request asked for instead of the run's, as JSON; empty: none. With them
    the answer is context, and no token of it may be trained."""


class Recall(Message, tag="recall", frozen=True, kw_only=True):
    """Asks the ingest for the calls of a sample that earlier leases of its group recorded.

    From then on calls under another lease are refused. It is answered by `Recalled`.
    """

    group: int
    token: str
    """Token of the present lease."""
    epoch: str
    """Its epoch."""
    sample: int


class Recalled(Message, tag="recalled", frozen=True, kw_only=True):
    """The calls of a sample's last attempt, as the ingest answers a `Recall`."""

    calls: tuple[Call, ...] = ()
    """In the order of their numbers; none if they are of another epoch."""
    attempt: int = 0
    """The attempt of these calls; without calls, the next one."""
    number: int = 0
    """The number of the next call."""
