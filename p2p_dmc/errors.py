"""Two kinds of error, never mixed: a user's mistake and a peer's (STYLE: each costs what it should)."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The message is one line: the value, what is wrong with it, the remedy."""


class RemoteProtocolError(Exception):
    """Another peer sent something it should not have. Costs that message and a count, nothing else."""


class RunStopped(SystemExit):
    """Raised inside the user's script when the run was stopped by agreement or this peer left; exits quietly."""
