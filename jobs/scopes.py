"""What an API key may open."""

from __future__ import annotations

SCOPES = ("read", "submit", "control", "admin")
"""`admin` opens everything."""
