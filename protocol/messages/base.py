"""The base of every message: a frozen struct with a tag, keyword-only, strict about unknown fields' types
only.

New fields are appended with defaults, so that an older reader skips them and a newer one fills them in.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """A message body. Subclasses name their tag: `class X(Message, tag="x", frozen=True, kw_only=True)`."""
