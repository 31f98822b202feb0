"""Conditions whose deletion changes nothing that anybody could see, and why.

By (module, key of the deletion): see conditions.py. Named by the text of the condition, so that an entry outlives
changes elsewhere and falls out when its condition changes.
"""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str], str] = {}
