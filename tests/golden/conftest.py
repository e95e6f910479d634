"""Properties are checked for their truth, never for their speed."""

from hypothesis import settings

settings.register_profile("golden", deadline=None, max_examples=60)
settings.load_profile("golden")
