"""What membership's records say to placement: who counts, with which weight and which failure domain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_dmc.agent.presence import present, storing
from p2p_dmc.core.membership import MemberState
from p2p_dmc.core.membership_messages import MAX_META_BYTES
from p2p_dmc.core.placement import MAX_WEIGHT, StoringPeer
from p2p_dmc.wire.messages import REPLACED_TOLD, PeerMeta, decode_meta, encode_meta
from tests.agent.helpers import peer, record, run_meta


def test_who_is_here_counts_with_weight_and_domain() -> None:
    records = [
        record(1, weight=5, domain="rack1"),
        record(2, weight=0, domain="rack1"),  # means to leave
        record(3, weight=7, state=MemberState.SUSPECT),
        record(4, weight=9, state=MemberState.DEAD),
        replace(record(5), meta=b"another version's"),
    ]
    assert present(records) == ((peer(1), 5), (peer(2), 0), (peer(3), 7))
    assert storing(records) == (
        StoringPeer(peer_id=peer(1), weight=5, domain="rack1"),
        StoringPeer(peer_id=peer(3), weight=7),
    )


@pytest.mark.parametrize("domain", ["", "r", "rack1", "house-3/rack_2.b", "d" * 64])
def test_a_domain_travels(domain: str) -> None:
    told = decode_meta(encode_meta(PeerMeta(weight=1, domain=domain, runs=())))
    assert told is not None and told.domain == domain


@pytest.mark.parametrize("domain", ["d" * 65, "größer", "rack 1", "rack:1", "/rack", "rack1\n", " "])
def test_what_is_no_name_of_a_domain_is_not_taken(domain: str) -> None:
    with pytest.raises(ValueError, match="no failure domain"):
        PeerMeta(weight=1, domain=domain, runs=())
    whole = PeerMeta(weight=1, domain="x" * 20, runs=())
    object.__setattr__(whole, "domain", domain)
    assert decode_meta(encode_meta(whole)) is None


def test_the_most_that_a_peer_can_say_of_itself_fits() -> None:
    run = run_meta(
        name="n" * 64,
        boot=1 << 62,
        history=b"h" * 16,
        view_epoch=1 << 62,
        samples=1 << 62,
        quorum="majority",
        backend="gloo",
        on_lost="skip",
        replaced=(b"h" * 16,) * REPLACED_TOLD,
    )
    most = encode_meta(PeerMeta(weight=MAX_WEIGHT, domain="d" * 64, runs=(run,) * 8))
    assert len(most) <= MAX_META_BYTES and decode_meta(most) is not None
