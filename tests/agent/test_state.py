"""The agent's states: slots and their pins, what is current, what is served, adopted and written."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load_file

from p2p_dmc.agent import state_keeper
from p2p_dmc.agent.adoption import ANCHOR, HEAD
from p2p_dmc.agent.checkpoints import list_checkpoints
from p2p_dmc.agent.home import MemoryFolder
from p2p_dmc.agent.run_files import load_run
from p2p_dmc.agent.state import Held, SlotPool, decode_head, encode_head, file_digest, state_digest
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.core.adacomm import TauPolicy, start
from p2p_dmc.core.agreement_messages import Promises, Replaced, StateRef
from p2p_dmc.core.ledger import Ledger, Stretch
from p2p_dmc.core.outer import parse
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import BulkKind, BulkRequest
from tests.agent.helpers import DATASET, NUMEL, PARAMETERS, POLICY, Around, fill, state, surroundings

OLD = b"o" * 16
PROMISES = Promises(history=b"h" * 16, replaced=(Replaced(history=OLD, lineage=(2, 5), evicted=True),))
"""Of a peer that went on under a new history from round 5 of view 2 of the old one."""


@pytest.fixture
def around(tmp_path: Path) -> Around:
    return surroundings(tmp_path)


@pytest.fixture
def memory(around: Around) -> MemoryFolder:
    return around.services.memory


@pytest.fixture
def keeper(around: Around, tmp_path: Path) -> StateKeeper:
    made = StateKeeper("r", tmp_path / "run", around.services, PROMISES)
    made.open(PARAMETERS)
    return made


def pins(slots: SlotPool) -> Counter[Path]:
    return +slots._pins


# -- slots ------------------------------------------------------------------------------------------------------------


def test_a_pinned_slot_is_never_handed_out(memory: MemoryFolder) -> None:
    slots = SlotPool(memory, NUMEL)
    one, two = slots.take(), slots.take()
    assert one != two and one.stat().st_size == two.stat().st_size == slots.size_bytes == 28
    slots.pin(one)
    slots.unpin(one)
    assert slots.take() not in (one, two)  # still pinned once
    slots.unpin(one)
    assert slots.take() == one  # used again
    assert pins(slots)[one] == 1


def test_unpinning_too_often_is_our_own_bug(memory: MemoryFolder) -> None:
    slots = SlotPool(memory, NUMEL)
    slot = slots.take()
    slots.unpin(slot)
    with pytest.raises(AssertionError, match="unpinned more often than pinned"):
        slots.unpin(slot)
    assert slots.take() == slot  # and nothing is out of balance by it


def test_a_slot_without_room_is_the_users_error(
    memory: MemoryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = SlotPool(memory, NUMEL)
    folder = slots.take().parent
    before = sorted(folder.iterdir())

    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("p2p_dmc.agent.state.os.posix_fallocate", full)
    with pytest.raises(UserError, match=r"no room for 28 bytes of parameters in .*No space left"):
        slots.take()
    assert sorted(folder.iterdir()) == before
    assert SlotPool(memory, 0).size_bytes == 4


def test_slots_are_made_before_they_are_wanted(memory: MemoryFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = SlotPool(memory, NUMEL)
    one = slots.take()

    async def both() -> None:
        await asyncio.gather(slots.prepare(2), slots.prepare(2))  # asked for twice, made once

    asyncio.run(both())
    assert len(slots._slots) == 3 and pins(slots) == Counter([one])
    assert {slots.take(), slots.take()} == set(slots._slots) - {one}
    slots.unpin(one)
    asyncio.run(slots.prepare(1))
    assert len(slots._slots) == 3  # there is one

    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("p2p_dmc.agent.state.os.posix_fallocate", full)
    asyncio.run(slots.prepare(5))
    assert len(slots._slots) == 3 and len(list(one.parent.glob("anchor-*"))) == 3


def test_of_slots_that_nobody_uses_only_some_are_kept(memory: MemoryFolder) -> None:
    slots = SlotPool(memory, NUMEL)
    taken = [slots.take() for _ in range(6)]
    for slot in taken[1:]:
        slots.unpin(slot)
    slots.trim(2)
    assert sorted(taken[0].parent.glob("anchor-*")) == sorted(taken[:3]) and pins(slots) == Counter(taken[:1])
    assert not set(taken[3:]) & set(slots._pins), "nothing of them is left"
    assert {slots.take(), slots.take()} == set(taken[1:3])
    assert slots.take() not in taken
    slots.trim(0)
    assert len(list(taken[0].parent.glob("anchor-*"))) == 4, "all are in use"


# -- digests ----------------------------------------------------------------------------------------------------------


def test_a_states_digest_tells_all_its_parts_apart() -> None:
    ledger = Ledger.start(DATASET, [10], 1, 2)
    tau = start(POLICY)
    states = [
        (b"a" * 16, ledger, tau),
        (b"b" * 16, ledger, tau),
        (b"a" * 16, ledger.advance([Stretch(shard=0, lo=0, hi=1)]), tau),
        (b"a" * 16, ledger, replace(tau, elapsed_us=1)),
        (b"", ledger, tau),
    ]
    digests = [state_digest(*parts) for parts in states]
    assert len(set(digests)) == len(states) and {len(d) for d in digests} == {16}
    assert digests == [state_digest(*parts) for parts in states]


def test_a_head_is_taken_only_with_the_digest_that_was_agreed(memory: MemoryFolder) -> None:
    held = state(SlotPool(memory, NUMEL), (1, 2))
    packed = encode_head(held)
    head, ledger, tau = decode_head(packed, held.ref.digest)
    assert (head.anchor_digest, head.anchor_bytes) == (held.anchor_digest, 28)
    assert ledger == held.ledger and tau == held.tau
    for wrong, digest in (
        (packed, b"x" * 16),
        (packed[:-1], held.ref.digest),
        (codec.pack_value(replace(head, anchor_digest=b"y" * 16)), held.ref.digest),
        (
            codec.pack_value(replace(head, ledger=held.ledger.skip(held.ledger.remaining()).to_bytes())),
            held.ref.digest,
        ),
        (codec.pack_value(replace(head, tau=b"")), held.ref.digest),
        (codec.pack_value(replace(head, ledger=b"\x93")), held.ref.digest),
    ):
        with pytest.raises(RemoteProtocolError):
            decode_head(wrong, digest)


# -- what is current --------------------------------------------------------------------------------------------------


def held_by(keeper: StateKeeper) -> list[Held]:
    return list(keeper._recent.values())


def balanced(keeper: StateKeeper) -> bool:
    """Each remembered state has its slot pinned once, the scratch slot is pinned once, and nothing else is."""
    expected = Counter(h.slot for h in held_by(keeper))
    if keeper._scratch is not None:
        expected[keeper._scratch] += 1
    return pins(keeper.pool()) == expected


def test_a_few_states_are_remembered_and_all_pins_balance(keeper: StateKeeper) -> None:
    slots = keeper.pool()
    for i in range(10):
        held = state(slots, (1, i), value=i)
        keeper.hold(held)
        assert keeper.current is held and held in held_by(keeper)
        assert balanced(keeper) and len(held_by(keeper)) <= state_keeper.CACHED
    assert len(slots._slots) <= state_keeper.CACHED + 1  # so memory does not grow with the rounds


def test_the_same_bits_under_a_new_lineage_are_held_once(keeper: StateKeeper) -> None:
    """A round in which nobody had anything to add: the slot is pinned for it once more, and given back."""
    slots = keeper.pool()
    first = state(slots, (1, 1))
    keeper.hold(first)
    slots.pin(first.slot)
    keeper.hold(replace(first, ref=StateRef(lineage=(1, 2), digest=first.ref.digest)))
    assert keeper.current is not None and keeper.current.ref.lineage == (1, 2)
    assert len(held_by(keeper)) == 1 and balanced(keeper)


def test_the_scratch_slot_stays_until_its_candidate_is_held(keeper: StateKeeper) -> None:
    scratch = keeper.scratch()
    assert keeper.scratch() == scratch
    keeper.hold(state(keeper.pool(), (1, 1)))  # another slot's
    assert keeper.scratch() == scratch and balanced(keeper)
    anchor = fill(scratch, 5.0)
    ledger, tau = Ledger.start(DATASET, [10], 1, 2), start(POLICY)
    ref = StateRef(lineage=(1, 2), digest=state_digest(anchor, ledger, tau))
    keeper.hold(Held(ref=ref, slot=scratch, anchor_digest=anchor, ledger=ledger, tau=tau))
    assert keeper.scratch() != scratch and balanced(keeper)
    assert file_digest(scratch) == anchor


def test_the_founders_state_is_lineage_zero(keeper: StateKeeper) -> None:
    slot = keeper.pool().take()
    ledger = Ledger.start(DATASET, [10], 1, 2)
    keeper.found(slot, fill(slot, 1.0), ledger, start(POLICY))
    assert keeper.current is not None and keeper.current.ref.lineage == (0, 0) and balanced(keeper)


def test_an_agreed_state_becomes_current_under_its_agreed_lineage(keeper: StateKeeper) -> None:
    first, second = state(keeper.pool(), (1, 1)), state(keeper.pool(), (1, 2), value=3)
    keeper.hold(first)
    keeper.hold(second)
    agreed = StateRef(lineage=(4, 1), digest=first.ref.digest)
    held = keeper.make_current(agreed)
    assert held == keeper.current and held.ref == agreed and held.slot == first.slot and balanced(keeper)
    keeper.hold(state(keeper.pool(), (4, 2), value=9))
    assert balanced(keeper)


def test_before_the_parameters_are_known_there_is_no_pool(around: Around, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not known yet"):
        StateKeeper("r", tmp_path, around.services, PROMISES).pool()


# -- serving ----------------------------------------------------------------------------------------------------------


def asked(held: Held, part: int, offset: int = 0, size: int = 1 << 20) -> BulkRequest:
    return BulkRequest(
        request=1, kind=BulkKind.STATE, name="r", digest=held.ref.digest, part=part, offset=offset, size=size
    )


def test_ranges_of_head_and_anchor_are_served(keeper: StateKeeper) -> None:
    held = state(keeper.pool(), (1, 1))
    keeper.hold(held)
    head, bits = encode_head(held), held.slot.read_bytes()
    assert keeper.provide(asked(held, HEAD)) == (len(head), head)
    assert keeper.provide(asked(held, HEAD, 3, 4)) == (len(head), head[3:7])
    assert keeper.provide(asked(held, ANCHOR)) == (28, bits)
    assert keeper.provide(asked(held, ANCHOR, 20, 100)) == (28, bits[20:])
    assert keeper.provide(asked(held, 2)) is None
    other = state(keeper.pool(), (1, 2), value=1)
    assert keeper.provide(asked(other, HEAD)) is None  # not held


@pytest.mark.parametrize("offset", [28, 29, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_range_beyond_the_end_is_empty_however_far(keeper: StateKeeper, offset: int) -> None:
    """Offsets come from the network; one that the disk does not take must not cost the bulk server."""
    held = state(keeper.pool(), (1, 1))
    keeper.hold(held)
    assert keeper.provide(asked(held, ANCHOR, offset)) in (None, (28, b""))
    found = keeper.provide(asked(held, HEAD, offset + 1000 if offset < 1000 else offset))
    assert found is None or found[1] == b""


# -- disk -------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_written_found_and_loaded(
    keeper: StateKeeper, around: Around, tmp_path: Path
) -> None:
    held = state(keeper.pool(), (3, 7), value=2, tau=start(TauPolicy(kind="adacomm", tau0=9)))
    keeper.hold(held)
    assert keeper.checkpoint_due(held, 60.0)  # the first of its view
    assert asyncio.run(keeper.checkpoint(held, b"h" * 16, closed=False, keep=3))
    assert keeper.checkpoint_due(held, 0.0) and not keeper.checkpoint_due(held, 60.0)
    assert balanced(keeper) and [e["lineage"] for e in around.named("checkpoint")] == [[3, 7]]
    again = StateKeeper("r", tmp_path / "run", around.services, PROMISES)
    again.open(PARAMETERS)
    found = again.current
    assert found is not None and balanced(again)
    assert (found.ref, found.anchor_digest, found.ledger, found.tau) == (
        held.ref, held.anchor_digest, held.ledger, held.tau,
    )  # fmt: skip
    assert found.slot.read_bytes() == held.slot.read_bytes()


def test_two_checkpoints_of_one_state_do_not_meet(keeper: StateKeeper, tmp_path: Path) -> None:
    """The periodic one is on its way when the run is closed at the same state: closed is what stays."""
    held = state(keeper.pool(), (3, 7))
    keeper.hold(held)

    async def both() -> None:
        for _ in range(5):
            periodic = keeper.checkpoint(held, b"h" * 16, closed=False, keep=3)
            closing = keeper.checkpoint(held, b"h" * 16, closed=True, keep=3)
            assert await asyncio.gather(periodic, closing) == [True, True]
            (found,) = list_checkpoints(tmp_path / "run")
            assert found.meta["closed"] is True

    asyncio.run(both())
    assert balanced(keeper)


@pytest.mark.parametrize(
    ("step", "refusal"),
    [
        ("save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
        ("_sync_file", OSError(28, "No space left on device")),
        ("write_json", OSError(28, "No space left on device")),
    ],
)
def test_a_disk_that_refuses_costs_a_word_and_no_pin(
    keeper: StateKeeper,
    around: Around,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    refusal: Exception,
) -> None:
    held = state(keeper.pool(), (3, 7))
    keeper.hold(held)

    def full(*args: object, **kwargs: object) -> None:
        raise refusal

    monkeypatch.setattr(f"p2p_dmc.agent.checkpoints.{step}", full)
    assert not asyncio.run(keeper.checkpoint(held, b"h" * 16, closed=False, keep=3))
    assert balanced(keeper) and keeper.checkpoint_due(held, 0.0)
    assert "No space left on device" in around.said[0] and len(around.named("checkpoint_failed")) == 1
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("damage", ["model", "meta", "parameters", "no parameters", "ledger gone"])
def test_a_damaged_checkpoint_is_skipped_for_an_older_one_with_a_reason(
    keeper: StateKeeper, around: Around, tmp_path: Path, damage: str
) -> None:
    for i in (1, 2):
        held = state(keeper.pool(), (1, i), value=i)
        keeper.hold(held)
        asyncio.run(keeper.checkpoint(held, b"h" * 16, closed=False, keep=3))
    newest = tmp_path / "run" / "checkpoints" / "1-2"
    meta = newest / "meta.json"
    if damage == "model":
        bits = bytearray((newest / "model.safetensors").read_bytes())
        bits[-1] ^= 1
        (newest / "model.safetensors").write_bytes(bits)
    elif damage == "meta":
        meta.write_text(meta.read_text().replace('"tau": "', '"tau": "zz'))
    elif damage == "parameters":
        meta.write_text(meta.read_text().replace('"bias"', '"scale"'))
    elif damage == "no parameters":
        meta.write_text(meta.read_text().replace('"parameters"', '"paramaters"'))
    else:
        (newest / "ledger.msgpack").unlink()
    again = StateKeeper("r", tmp_path / "run", around.services, PROMISES)
    again.open(PARAMETERS)
    assert again.current is not None and again.current.ref.lineage == (1, 1) and balanced(again)
    (skipped,) = around.named("checkpoint_skipped")
    assert skipped["path"] == str(newest) and skipped["reason"]
    assert str(newest) in around.said[0]


@pytest.mark.parametrize(
    ("history", "lineage", "fits"),
    [
        (b"h" * 16, (9, 9), True),
        (OLD, (2, 5), True),
        (OLD, (1, 99), True),
        (OLD, (2, 6), False),
        (OLD, (3, 1), False),
        (b"x" * 16, (1, 1), False),
        (b"", (1, 1), False),
    ],
)
def test_a_state_of_a_history_that_was_given_up_is_not_taken_up_again(
    keeper: StateKeeper, around: Around, tmp_path: Path, history: bytes, lineage: tuple[int, int], fits: bool
) -> None:
    held = state(keeper.pool(), lineage)
    keeper.hold(held)
    asyncio.run(keeper.checkpoint(held, history, closed=False, keep=3))
    again = StateKeeper("r", tmp_path / "run", around.services, PROMISES)
    again.open(PARAMETERS)
    assert (again.current is not None) == fits
    reasons = [e["reason"] for e in around.named("checkpoint_skipped")]
    assert reasons == ([] if fits else ["it is of a history of this run that was given up"])
    newcomer = StateKeeper("r", tmp_path / "run", around.services, Promises())
    newcomer.open(PARAMETERS)
    assert (newcomer.current is not None) == (history == b"")


def test_without_a_checkpoint_there_is_no_state(keeper: StateKeeper) -> None:
    assert keeper.current is None and balanced(keeper)


def test_the_final_model_and_the_end_of_the_run(keeper: StateKeeper, tmp_path: Path) -> None:
    held = state(keeper.pool(), (3, 7), value=2)
    keeper.hold(held)
    path = asyncio.run(keeper.write_final(held))
    assert path == tmp_path / "run" / "final" / "model.safetensors"
    tensors = load_file(path)
    assert tensors["weight"].tolist() == [[2, 3, 4], [5, 6, 7]] and tensors["bias"].tolist() == 8
    facts = load_run(tmp_path / "run")
    assert facts["finished"] == {"lineage": [3, 7], "digest": held.anchor_digest.hex()}
    assert Ledger.from_bytes(bytes.fromhex(facts["ledger"])) == held.ledger and balanced(keeper)


def test_the_end_of_a_run_names_the_model_alone_without_the_outer_momentum(
    around: Around, tmp_path: Path
) -> None:
    keeper = StateKeeper("r", tmp_path / "run", around.services, PROMISES)
    keeper.open(PARAMETERS, parse("block(beta=0.3)"))
    held = state(keeper.pool(), (3, 7), value=2)
    assert held.slot.stat().st_size == 8 * NUMEL
    keeper.hold(held)
    path = asyncio.run(keeper.write_final(held))
    assert load_file(path)["bias"].tolist() == 8
    model = np.arange(2, 2 + NUMEL, dtype="<f4")
    assert load_run(tmp_path / "run")["finished"]["digest"] == xxhash.xxh3_128(model.data).hexdigest()
