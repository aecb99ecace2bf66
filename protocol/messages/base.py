"""Defines the base of every message: a frozen, keyword-only struct with a tag.

New fields are appended with defaults: an older reader ignores them, a newer reader of an older message fills
in the default.
"""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number of messages or tokens that a peer has counted: sums of such numbers fit 64 bits."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """A message body. Subclasses name their tag: `class X(Message, tag="x", frozen=True, kw_only=True)`."""
