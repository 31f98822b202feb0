"""For all tests: how fast an example of hypothesis runs is no matter of right or wrong."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")
