"""One case per guard of the ledger, the assignment and AdaComm: without the guard, the case fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from p2p_dmc.core.adacomm import RoundFacts, TauPolicy, TauState, after_round
from p2p_dmc.core.assignment import Assignment, assign
from p2p_dmc.core.ledger import Ledger, Stretch, check_exact
from p2p_dmc.errors import RemoteProtocolError

DIGEST = b"d" * 32


def stretch(shard: int, lo: int, hi: int) -> Stretch:
    return Stretch(shard=shard, lo=lo, hi=hi)


def ledger(*counts: int, epochs: int = 2) -> Ledger:
    return Ledger.start(DIGEST, counts, 0, epochs)


def wrong(sound: Ledger, complaint: str, **fields: Any) -> None:
    """The sound ledger with these fields is refused for that reason."""
    with pytest.raises(ValueError, match=complaint):
        replace(sound, **fields)


class TestStretch:
    @pytest.mark.parametrize(
        "bounds", [(True, 0, 1), (False, False, 1), (0, 0, True), (1.0, 0.0, 1.0), (0, 0.0, 1.0)]
    )
    def test_it_is_made_of_integers(self, bounds: tuple[Any, Any, Any]) -> None:
        with pytest.raises(ValueError, match="three integers"):
            stretch(*bounds)

    @pytest.mark.parametrize("bounds", [(-1, 0, 1), (0, -1, 1), (0, 1, 1), (0, 2, 1)])
    def test_it_is_somewhere_and_not_empty(self, bounds: tuple[int, int, int]) -> None:
        with pytest.raises(ValueError, match="no such stretch"):
            stretch(*bounds)


class TestLedger:
    def test_what_does_not_exist_is_not_given_up_either(self) -> None:
        for beyond in (stretch(0, 2, 4), stretch(1, 0, 1)):
            for act in (ledger(3).strike, ledger(3).struck_out, lambda s: ledger(3).skip([s])):
                with pytest.raises(ValueError, match="no such samples"):
                    act(beyond)

    def test_a_strike_concerns_one_shard(self) -> None:
        struck = ledger(5, 5).strike(stretch(0, 0, 3))
        assert struck.struck_out(stretch(1, 0, 3)) == ()
        assert struck.strike(stretch(1, 0, 3)).strikes == (stretch(0, 0, 3), stretch(1, 0, 3))

    @pytest.mark.parametrize("name", ["seed", "epochs", "epoch", "samples_total"])
    @pytest.mark.parametrize("value", [-1, 2**63, True, 1.0])
    def test_its_numbers_are_numbers(self, name: str, value: Any) -> None:
        wrong(ledger(5), f"{name} is an integer from 0: {value!r}$", **{name: value})

    def test_it_has_an_epoch(self) -> None:
        wrong(ledger(5), "epoch: 0, 0", epochs=0)
        wrong(ledger(5), "epoch: 3, 2", epoch=3)

    def test_counts_are_a_tuple_of_numbers(self) -> None:
        """Bytes would do as well and be written back as bytes."""
        wrong(ledger(5, 4), "counts is a tuple: b'", counts=b"\x05\x04")
        for count in (-1, 2**63, True, 1.0):
            wrong(ledger(5, 4), "0 or more samples", counts=(5, count))

    def test_complaints_name_the_value_where_there_is_one(self) -> None:
        wrong(ledger(5), "^the data set's digest is bytes: 'text'$", dataset_digest="text")
        wrong(ledger(5), "^a data set without samples has no epochs$", counts=(0,))

    def test_there_is_one_entry_per_shard(self) -> None:
        wrong(ledger(5, 4), "^counted: one entry per shard$", counted=((),))
        wrong(ledger(5, 4), "^skipped: one entry per shard$", skipped=((), (), ()))

    @pytest.mark.parametrize(
        "positions",
        [
            ((True, 3),),
            ((1.0, 3.0),),
            ((1, 3.0),),
            ((3, 3),),
            ((3, 2),),
            ((-1, 3),),
            ((1, 6),),
            ((2, 3), (1, 2)),
            ((1, 2), (2, 3)),
        ],
    )
    def test_positions_are_written_in_one_way(self, positions: Any) -> None:
        wrong(ledger(5, 90), "counted: positions", counted=(positions, ()), samples_total=2)
        wrong(ledger(5, 90), "skipped: positions", skipped=(positions, ()))

    def test_nothing_is_both_counted_and_skipped(self) -> None:
        wrong(ledger(9).advance([stretch(0, 0, 3)]), "both counted and skipped", skipped=(((2, 4),),))

    def test_a_full_epoch_is_over(self) -> None:
        wrong(ledger(2, 2), "a full epoch", counted=(((0, 2),), ()), skipped=((), ((0, 2),)), samples_total=2)

    def test_there_is_no_progress_after_the_last_epoch(self) -> None:
        done = ledger(2, epochs=1).advance([stretch(0, 0, 2)])
        wrong(done, "progress after the last epoch", counted=(((0, 1),),), samples_total=3)
        wrong(done, "progress after the last epoch", skipped=(((0, 1),),))

    def test_the_total_fits_the_epochs(self) -> None:
        second = ledger(3, epochs=3).advance([stretch(0, 0, 3)]).advance([stretch(0, 0, 1)])
        assert replace(second, samples_total=1).samples_total == 1, "the first epoch was skipped"
        for total in (0, 5):
            wrong(second, "samples_total does not fit", samples_total=total)

    def test_strikes_are_open_sorted_and_disjoint(self) -> None:
        some = ledger(9, 9).advance([stretch(0, 0, 2)])
        wrong(some, "settled samples", strikes=(stretch(0, 1, 4),))
        wrong(some, "no such samples", strikes=(stretch(0, 4, 10),))
        for pair in ((2, 4), (3, 6)), ((4, 6), (2, 4)), ((2, 4), (2, 4)):
            wrong(some, "strikes out of order", strikes=tuple(stretch(0, *bounds) for bounds in pair))
        wrong(some, "strikes out of order", strikes=(stretch(1, 0, 1), stretch(0, 3, 4)))
        touching = (stretch(0, 2, 4), stretch(0, 4, 6), stretch(1, 0, 1))
        assert replace(some, strikes=touching).strikes == touching


class TestBytes:
    def test_another_format_is_named(self) -> None:
        fields = msgpack.unpackb(ledger(5).to_bytes())
        with pytest.raises(RemoteProtocolError, match="ledger format 77, expected"):
            Ledger.from_bytes(msgpack.packb([77, *fields[1:]]))

    def test_there_is_one_encoding(self) -> None:
        """The same numbers, one of them written in more bytes than it needs."""
        data = Ledger.start(DIGEST, [5], 3, 2).to_bytes()
        at = data.index(DIGEST) + len(DIGEST)
        assert data[at] == 3
        with pytest.raises(RemoteProtocolError, match="written in another way"):
            Ledger.from_bytes(data[:at] + b"\xcc" + data[at:])


class TestReplay:
    def test_one_line_per_gap(self) -> None:
        assert check_exact([6], 1, [(0, stretch(0, 1, 2)), (0, stretch(0, 3, 4))]) == [
            "epoch 0, shard 0, positions 0 to 0: never counted",
            "epoch 0, shard 0, positions 2 to 2: never counted",
            "epoch 0, shard 0, positions 4 to 5: never counted",
        ]

    def test_one_line_per_shard_and_epoch(self) -> None:
        assert check_exact([2, 3], 1, [(0, stretch(1, 0, 2))]) == [
            "epoch 0, shard 0, positions 0 to 1: never counted",
            "epoch 0, shard 1, positions 2 to 2: never counted",
        ]


class TestAssignment:
    def test_a_cursor_begins_at_nothing(self) -> None:
        plan = Assignment(epoch=0, lists=(((stretch(0, 0, 5),),),))
        for lo, hi in ((-1, 1), (2, 1)):
            with pytest.raises(ValueError, match="a cursor moves forward"):
                plan.consumed(0, lo, hi)

    @pytest.mark.parametrize("entries", [(3, 2, 2, 2), (2, 2, 1, 1), (2, 2, 2, 1), (2, 1, 2, 2)])
    def test_every_member_has_its_entries(self, entries: tuple[int, int, int, int]) -> None:
        members, holdings, speeds, claims = entries
        with pytest.raises(ValueError, match=f"{members} members, but {holdings}, {speeds} and {claims}"):
            assign(ledger(5), members, [(0,)] * holdings, [1] * speeds, [()] * claims)

    def test_what_full_members_would_have_fetched_is_shared_to_the_sample(self) -> None:
        plan = assign(ledger(3), 3, [(), (), ()], [1, 1, 1], [(), (), ()], full={0})
        assert [plan.length(member) for member in range(3)] == [0, 2, 1]


class TestTau:
    policy = TauPolicy(kind="adacomm", tau0=16, t0_ms=10)
    state = TauState(
        tau=16,
        f0_micro=None,
        elapsed_us=0,
        interval_samples=0,
        interval_loss_micro=0,
        reason="start",
        tau0=16,
    )

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tau", 2**63),
            ("f0_micro", 1.5),
            ("f0_micro", True),
            ("elapsed_us", -1),
            ("interval_samples", -1),
            ("interval_loss_micro", -(2**63) - 1),
            ("last_micro", -(2**63) - 1),
            ("tau0", -1),
            ("rate_nano", 1.0),
            ("rate0_nano", -1),
            ("ratio_q16", 2**63),
            ("measured", -1),
            ("members", True),
            ("lowest", 1),
            ("reason", b"bytes"),
            ("reason", "x" * 201),
        ],
    )
    def test_a_state_that_makes_no_sense_is_refused(self, name: str, value: Any) -> None:
        words = {"reason": "reason", "lowest": "lowest is True or False"}
        with pytest.raises(ValueError, match=words.get(name, f"^{name} is an integer")):
            replace(self.state, **{name: value})
        assert replace(self.state, reason="x" * 200, f0_micro=-(2**63)).tau == 16

    def test_a_state_with_samples_and_no_first_loss_stops_nothing(self) -> None:
        """No peer of ours makes it, but one could be sent."""
        odd = replace(self.state, interval_samples=5)
        idle = RoundFacts(samples=0, steps=0, loss_sum_micro=0, compute_us=20_000, comm_us=0)
        assert after_round(self.policy, odd, [idle]) == replace(odd, elapsed_us=20_000, members=1)

    def test_another_format_is_named(self) -> None:
        fields = msgpack.unpackb(self.state.to_bytes())
        with pytest.raises(RemoteProtocolError, match="format 77, expected 2"):
            TauState.from_bytes(msgpack.packb([77, *fields[1:]]))
