"""Defines the messages of one prompt group: generated, scored, or failed to be scored.

Shapes: P prompt tokens, n samples per group, R rows of tokens, T tokens of all rows together, S version spans
of all rows together, K turns of all samples together. A sample is one row unless it has branches.
`protocol.rollout_view` decodes and checks them, `protocol.turns` the turns.
"""

from typing import Annotated

import msgspec

from protocol.messages.base import Count, Message
from protocol.tensors import Array

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A time that a peer has measured: no NaN or infinity, which would spoil a mean."""
UNKNOWN_EXPERT = 2**16 - 1
"""In place of an expert whose index was not recorded."""


class Rollout(Message, tag="rollout", frozen=True, kw_only=True):
    """A generated group, sent by a rollout worker to a reward worker."""

    group: int
    """Number of the group in the run, which is also the position of its prompt in the prompt stream."""
    token: str
    """The lease token under which it was generated."""
    engine: str
    """Incarnation of the engine that generated it."""
    prompt_tokens: Array
    """int32 [P]: tokens that all rows begin with. It may be empty if each row of `tokens` that follows no
    other row begins with a token that was not sampled."""
    lengths: Array
    """int32 [R]: tokens of each row; sums to T."""
    tokens: Array
    """int32 [T]: the rows' own tokens, without what they follow, one row after the other."""
    logprobs: Array
    """float32 [T]: behaviour log-probability of each token as sampled, nats; 0 where `loss_mask` is 0."""
    loss_mask: Array
    """uint8 [T]: 1 for tokens that the model sampled, 0 for tokens that the environment inserted."""
    spans: Array
    """int32 [S, 3], rows (row, end, version): that row's own tokens from the end of the line above (0 in the
    first line of a row) up to, not including, `end` are of `version`."""
    finish_reasons: tuple[str, ...]
    """[n]: "stop", "length" or "environment"."""
    responses: tuple[str, ...]
    """[n]: the samples as text, for verifiers; detokenized by the rollout worker."""
    prompt_text: str = ""
    """The prompt as text, for verifiers."""
    metadata: msgspec.Raw = msgspec.Raw(b"\x80")
    """MessagePack map from the prompt source (answer, task name, tests ...), for verifiers."""
    generate_s: Seconds = 0.0
    """Seconds from the lease to the last token."""
    environment_rewards: Array | None = None
    """float32 [n]: rewards of the environment, if it gives any."""
    prompt_experts: Array | None = None
    """uint16 [P, L, K]: the experts that each of the model's L mixture layers chose for each token of the
    prompt, K each; `UNKNOWN_EXPERT` where the engine did not record it. None if it recorded none."""
    experts: Array | None = None
    """uint16 [T, L, K]: experts of the rows' tokens as inputs, so that a choice belongs to the
    log-probability of the token after it; unknown for the last token of a sample."""
    branches: Array | None = None
    """int32 [R, 3], rows (sample, parent, shared): a row is of `sample`, and its own tokens follow the first
    `shared` tokens after the prompt of row `parent`, an earlier one of the sample; the first row of a sample
    has parent -1 and shared 0. None: R = n, and each row is a sample."""
    calls: Array | None = None
    """int32 [C, 5], rows (sample, number, row, first, end): the own tokens from `first` up to `end` of a row
    are the answer of a journalled `Call`; row -1: no token of the call is in the message. None: no call was
    journalled."""
    read_tokens: Count = 0
    """Tokens that the engine was given to continue, of all calls of the model in all attempts at the group's
    samples; 0: not counted. Calls that a record answered are left out."""
    cached_tokens: Count = 0
    """Part of `read_tokens` whose KV the engine had in its prefix cache."""
    row_texts: tuple[str, ...] = ()
    """[R]: the rows' own tokens as text, special ones too, for readers, where `responses` are not the text of
    whole samples; otherwise empty."""
    turns: Array | None = None
    """int32 [K, 4], rows (sample, row, first, end): the own tokens from `first` up to `end` of a row are a
    turn of the model. The turns of a sample come one after the other, as they were made. None: every sample
    is one turn."""
    turn_texts: tuple[str, ...] = ()
    """[K]: the turns as text, for readers and verifiers; empty if there are `row_texts` and no verifier may
    ask for them."""
    turn_contexts: tuple[str, ...] = ()
    """[K]: text that the environment or the harness wrote between the previous turn in that row and this one.
    """
    own_prompts: Array | None = None
    """int32 [n]: how many tokens at the start of each sample's first row are the rest of its prompt, the
    context of its first call. They are not part of the response. None: all samples have the prompt P."""
    cancelled: Array | None = None
    """int32 [c]: tokens that each further sample had when it was cancelled, because `sampling.keep_first`
    others had finished; they are in no other field. None: none was."""


class Remark(msgspec.Struct, frozen=True, kw_only=True):
    """A verifier's remark on a sample, for readers; no value is computed from it."""

    verifier: str
    """Name of the verifier that was asked; a fallback has a name of its own."""
    sample: int = -1
    """Number of the sample in the group; -1: all of them at once."""
    text: str = ""
    """What it said, at most 2000 characters, and less where a group has many samples."""
    prompt_tokens: int = 0
    """Tokens that it read, of all requests for this score."""
    completion_tokens: int = 0
    """Tokens that it wrote."""
    cost: float = 0.0
    """What they cost, in the currency of the verifier's prices."""
    is_cached: bool = False
    """Whether it was asked the same before, and the answer kept."""


class ScoredRollout(Message, tag="scored", frozen=True, kw_only=True):
    """A group with its rewards, sent by a reward worker to the ingest."""

    rollout: Rollout
    rewards: Array
    """float32 [n]: the combined reward of each sample."""
    components: dict[str, Array] = {}
    """Verifier name -> float32 [n], its scores before weighting."""
    scorer: str = ""
    """Incarnation of the reward worker."""
    score_s: Seconds = 0.0
    """Seconds spent scoring."""
    remarks: tuple[Remark, ...] = ()
    """What judges said, at most one of each verifier and sample; their scores are in `components`."""
    turn_rewards: Array | None = None
    """float32 [K]: the combined reward of each of the rollout's turns. A sample's turn rewards add up to its
    reward, since a score of the whole sample counts at its last turn. None: no verifier scored turns."""
    turn_components: dict[str, Array] = {}
    """Verifier that scored turns -> float32 [K], its scores before weighting; `components` has their sums."""


class ScoreFailure(Message, tag="score_failure", frozen=True, kw_only=True):
    """A group that could not be scored, sent by a reward worker to the ingest. Never counted as reward 0."""

    group: int
    token: str
    """The lease token under which the group was generated."""
    verifier: str
    """Name of the verifier that failed."""
    error: str
    """Its error, at most 500 characters."""
    scorer: str = ""
    """Incarnation of the reward worker."""
