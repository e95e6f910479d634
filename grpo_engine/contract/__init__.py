"""The language of all rooms: pydantic models only, no torch, no web framework."""
