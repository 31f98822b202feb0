"""Conditions whose deletion changes nothing that anybody could see, and why.

By module and by the key of the deletion: see conditions.py. Named by the text of the condition, so that an entry
outlives changes elsewhere and falls out when its condition changes. What is marked as superfluous could go.
"""

from __future__ import annotations

VIEW_STANDS = "superfluous: exactly who is not frozen has a view (`check_invariants`)"
WORD_IS_THERE = "for the type checker: with a view there is the word that was said of it"

_BY_MODULE: dict[str, dict[str, str]] = {
    "agreement": {
        "Agreement.change_wanted: self.frozen [dropped]": VIEW_STANDS,
        "Agreement.change_wanted: self.view is None [dropped]": VIEW_STANDS,
        "Agreement.awaited: self._withdrawn [dropped]": "superfluous: who withdrew has no view and no attempt",
        "Agreement.at_barrier: self.view is None [dropped]": VIEW_STANDS,
        "Agreement.at_barrier: self.frozen [dropped]": VIEW_STANDS,
        "Agreement.complete: view is None [dropped]": VIEW_STANDS,
        "Agreement.complete: self.frozen [dropped]": VIEW_STANDS,
        "Agreement.foreign_header: self.view is None [dropped]": WORD_IS_THERE,
        "Agreement.foreign_header: self._word is None [dropped]": WORD_IS_THERE,
        "Agreement.wants_change: self.view is not None [dropped]": VIEW_STANDS,
        "Agreement.adopted: view is None [dropped]": VIEW_STANDS,
        "Agreement.adopted: self.frozen [dropped]": VIEW_STANDS,
    },
    "agreement_state": {
        "AgreementState._cause: view is None [dropped]": "for the type checker: nobody frozen asks for its cause",
        "AgreementState._prune: self._last is not None [false]": (
            "superfluous: the last view is the base, or still promised"
        ),
    },
    "agreement_machine": {
        "AgreementMachine._progress: self._withdrawn [false]": (
            "superfluous: who withdrew has no view and no attempt"
        ),
        "AgreementMachine._progress: not self.frozen [true]": VIEW_STANDS,
        "AgreementMachine._consider_change: self.me not in view.voters [dropped]": (
            "superfluous: nobody is lost to itself, so no voter sees all of them gone"
        ),
        "AgreementMachine._consider_change: view is not None [dropped]": VIEW_STANDS,
        "AgreementMachine._consider_change: view is None [dropped]": "for the type checker: no view, no cause",
        "AgreementMachine._repeat_word: view is None [dropped]": WORD_IS_THERE,
        "AgreementMachine._repeat_word: word is None [dropped]": WORD_IS_THERE,
        "AgreementMachine._open: self._late.lineage > self.completed.lineage [dropped]": (
            "superfluous: nothing else is kept as late, and nothing is completed while frozen"
        ),
        "AgreementMachine._advance: not self._decision.holds [dropped]": (
            "superfluous: a decision that holds ends the attempt, and is forgotten with it"
        ),
        "AgreementMachine._judge: self.history [dropped]": "superfluous: the own word is among them",
        "AgreementMachine._replace_if_stuck: self._protected(peer) [dropped]": (
            "superfluous: `_open` adds the members of the last view and remembers who of them votes"
        ),
        "AgreementMachine._install: self._attempt [true]": "for the type checker: only an attempt ends in a view",
        "AgreementMachine._adopt: self.view is not None [dropped]": "for the type checker: asked in a view only",
        "AgreementMachine._on_propose_standing: mine is not None [dropped]": WORD_IS_THERE,
        "AgreementMachine._on_propose_standing: mine is not None [dropped] #2": WORD_IS_THERE,
        "AgreementMachine._on_cause: self._word is not None [dropped]": WORD_IS_THERE,
        "AgreementMachine._follow: self._attempt is not None [true]": (
            "for the type checker: it was opened in the line before"
        ),
        'AgreementMachine._may_vote: word.history in (b"", self.history) [dropped]': (
            "superfluous: words of other histories are not listened to (`_fenced`)"
        ),
    },
    "quorum": {
        "views_to_hold: word.sender.peer_id in word.voting [true]": (
            "superfluous: a view all of whose voters are here is held anyway"
        ),
        "views_to_hold: word.sender.peer_id in word.voting [false]": (
            "superfluous: a view all of whose voters are here is held anyway"
        ),
        "views_to_hold: view.members != here [dropped]": (
            "superfluous: a view all of whose voters are here is held anyway"
        ),
        "origin: epoch == 0 [false]": "superfluous: no view has the number 0",
    },
}

EQUIVALENT = {(module, key): why for module, book in _BY_MODULE.items() for key, why in book.items()}
