"""Defines the base class of messages: a frozen, keyword-only struct with a tag.

New fields are appended with defaults. An older reader ignores unknown fields; a newer reader fills in the
defaults of missing fields.
"""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Number of messages or tokens that a peer has counted. The limit keeps sums within 64 bits."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base class of messages.

    Subclasses name their tag: `class X(Message, tag="x", frozen=True, kw_only=True)`.
    """
