"""Defines the messages of one prompt group: generated, scored, or failed to be scored.

Shapes: P prompt tokens, n samples per group, R rows of tokens, T tokens of all rows, S version spans of all
rows, K turns of all samples. A sample is one row unless it has branches. `protocol.rollout_view` decodes and
checks rows, `protocol.turns` turns.
"""

from typing import Annotated

import msgspec

from protocol.messages.base import Count, Message
from protocol.tensors import Array

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""Duration measured by a peer, seconds. NaN and infinity are invalid because they would spoil a mean."""
UNKNOWN_EXPERT = 2**16 - 1
"""Placeholder for an expert whose index was not recorded."""


class Rollout(Message, tag="rollout", frozen=True, kw_only=True):
    """A generated group, sent by a rollout worker to a reward worker."""

    group: int
    """Number of the group in the run, which is also the position of its prompt in the prompt stream."""
    token: str
    """Token of the lease under which the group was generated."""
    engine: str
    """Incarnation of the engine that generated the group."""
    prompt_tokens: Array
    """int32 [P]: common prefix of all rows. May be empty if each row that continues no tokens of another row
    begins with a token that was not sampled."""
    lengths: Array
    """int32 [R]: own tokens of each row; the sum is T."""
    tokens: Array
    """int32 [T]: own tokens of all rows, concatenated, without prompt and tokens of parent rows."""
    logprobs: Array
    """float32 [T]: log-probability of each token under the sampling policy, nats; 0 where `loss_mask` is 0.
    """
    loss_mask: Array
    """uint8 [T]: 1 for tokens that the model sampled, 0 for tokens that the environment inserted."""
    spans: Array
    """int32 [S, 3], entries (row, end, version): `version` sampled the row's own tokens from the previous
    entry's `end` (0 in the first entry of a row) up to, not including, `end`."""
    finish_reasons: tuple[str, ...]
    """[n]: "stop", "length" or "environment"."""
    responses: tuple[str, ...]
    """[n]: samples as text, for verifiers; the rollout worker detokenizes the tokens."""
    prompt_text: str = ""
    """The prompt as text, for verifiers."""
    metadata: msgspec.Raw = msgspec.Raw(b"\x80")
    """MessagePack map of the prompt source (answer, task name, tests ...), for verifiers."""
    generate_s: Seconds = 0.0
    """Time from the lease to the last token, seconds."""
    environment_rewards: Array | None = None
    """float32 [n]: rewards of the environment; None: the environment gives no rewards."""
    prompt_experts: Array | None = None
    """uint16 [P, L, K]: the K experts that each of the L mixture-of-experts layers chose for each prompt
    token; `UNKNOWN_EXPERT` where the engine did not record the expert. None: the engine recorded no experts.
    """
    experts: Array | None = None
    """uint16 [T, L, K]: experts of the rows' tokens as inputs. A choice therefore belongs to the
    log-probability of the next token; the last token of a sample has `UNKNOWN_EXPERT`."""
    branches: Array | None = None
    """int32 [R, 3], entries (sample, parent, shared) of the rows. The row belongs to `sample`. Its own tokens
    follow the first `shared` tokens, counted after the prompt, of row `parent`, an earlier row of the sample.
    The first row of a sample has parent -1 and shared 0. None: R = n, each row is a sample."""
    calls: Array | None = None
    """int32 [C, 5], entries (sample, number, row, first, end): the row's own tokens from `first` up to `end`
    answer the `Call` with this number. Row -1: the message has no token of the call. None: no call was
    recorded."""
    read_tokens: Count = 0
    """Context tokens that the engine received, over all calls of the model in all attempts at the group's
    samples; 0: not counted. Replayed calls do not count."""
    cached_tokens: Count = 0
    """Part of `read_tokens` whose KV was in the engine's prefix cache."""
    row_texts: tuple[str, ...] = ()
    """[R]: own tokens of the rows as text, including special tokens, for readers. Empty if `responses`
    contain the text of whole samples."""
    turns: Array | None = None
    """int32 [K, 4], entries (sample, row, first, end): the row's own tokens from `first` up to `end` are a
    turn of the model. The turns of a sample are contiguous and in the order of generation. None: every sample
    is one turn."""
    turn_texts: tuple[str, ...] = ()
    """[K]: turns as text, for readers and verifiers. Empty if the message has `row_texts` and no verifier may
    request turns."""
    turn_contexts: tuple[str, ...] = ()
    """[K]: text that the environment or the harness wrote between the row's previous turn and this turn."""
    own_prompts: Array | None = None
    """int32 [n]: number of tokens at the start of each sample's first row that continue its prompt (the
    context of its first call). These tokens are not part of the response. None: the prompt of all samples is
    P."""
    cancelled: Array | None = None
    """int32 [c]: length in tokens of each further sample at cancellation, because `sampling.keep_first`
    samples had finished. No other field contains cancelled samples. None: no sample was cancelled."""


class Remark(msgspec.Struct, frozen=True, kw_only=True):
    """A verifier's remark on a sample, for readers only; no value is computed from remarks."""

    verifier: str
    """Name of the verifier. A fallback has a name of its own."""
    sample: int = -1
    """Index of the sample in the group; -1: all samples together."""
    text: str = ""
    """Text of the verifier, at most 2000 characters; shorter in groups of many samples."""
    prompt_tokens: int = 0
    """Tokens that the verifier read, over all requests for this score."""
    completion_tokens: int = 0
    """Tokens that the verifier generated."""
    cost: float = 0.0
    """Cost of the tokens, in the currency of the verifier's prices."""
    is_cached: bool = False
    """Whether the answer comes from the cache of an earlier identical request."""


class ScoredRollout(Message, tag="scored", frozen=True, kw_only=True):
    """A group with its rewards, sent by a reward worker to the ingest."""

    rollout: Rollout
    rewards: Array
    """float32 [n]: combined reward of each sample."""
    components: dict[str, Array] = {}
    """Verifier name -> float32 [n]: scores before weighting."""
    scorer: str = ""
    """Incarnation of the reward worker."""
    score_s: Seconds = 0.0
    """Seconds spent scoring."""
    remarks: tuple[Remark, ...] = ()
    """Remarks of judges, at most one per verifier and sample; the scores of judges are in `components`."""
    turn_rewards: Array | None = None
    """float32 [K]: combined reward of each turn. The turn rewards of a sample add up to its reward; a score
    of the whole sample counts at the last turn. None: no verifier scored turns."""
    turn_components: dict[str, Array] = {}
    """Name of a verifier that scored turns -> float32 [K]: scores before weighting; `components` has the
    sums."""


class ScoreFailure(Message, tag="score_failure", frozen=True, kw_only=True):
    """A group that could not be scored, sent by a reward worker to the ingest. Never counted as reward 0."""

    group: int
    token: str
    """Token of the lease under which the group was generated."""
    verifier: str
    """Name of the verifier that failed."""
    error: str
    """Error of the verifier, at most 500 characters."""
    scorer: str = ""
    """Incarnation of the reward worker."""
