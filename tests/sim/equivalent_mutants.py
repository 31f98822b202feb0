"""Conditions whose deletion changes nothing that anybody could see, and why.

By module and by the key of the deletion: see conditions.py. Named by the text of the condition, so that an entry
outlives changes elsewhere and falls out when its condition changes. What is marked as superfluous could go.
"""

from __future__ import annotations

_BY_MODULE: dict[str, dict[str, str]] = {
    "assignment": {
        "Assignment.consumed: start >= hi [false]": "it only saves time: beyond the cursors a piece is empty",
    },
    "agreement": {
        "Agreement.complete: view is None [dropped]": "for the type checker: without a view no lineage is expected",
    },
    "agreement_state": {
        "AgreementState._prune: view is not None [true]": "for the type checker: a base comes with what is known",
    },
    "agreement_machine": {
        "AgreementMachine._say_late: self._last is not None [dropped]": (
            "for the type checker: what comes too late comes from a view of this life (`adopted`)"
        ),
    },
}

EQUIVALENT = {(module, key): why for module, book in _BY_MODULE.items() for key, why in book.items()}
