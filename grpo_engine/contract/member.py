"""How a file of a checkpoint may be called: a plain name, or one folder and a plain name (`adapter/adapter_config.json`).

No part may begin with a dot, so a name never leads out of its checkpoint, and never to a temporary file.
"""

from __future__ import annotations

import re

_PLAIN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"

MEMBER_PATTERN = rf"^(?:{_PLAIN}/)?{_PLAIN}$"
"""For a pydantic field."""

MEMBER_NAME = re.compile(rf"(?:{_PLAIN}/)?{_PLAIN}")
"""For `fullmatch`."""
