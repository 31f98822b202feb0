"""Memory that workers hand batches over in: everything comes out as it went in, and nothing that is in use changes."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections import namedtuple
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from p2p_dmc.train.shared_buffers import SPARE, Desk, Loan, SharedBuffers

Pair = namedtuple("Pair", "x y")


@pytest.fixture
def buffers() -> Iterator[SharedBuffers]:
    made = SharedBuffers(2)
    yield made
    made.close()


@pytest.fixture
def desk() -> Desk:
    return Desk()


def lend(buffers: SharedBuffers) -> Loan:
    loan = buffers.lend()
    assert loan is not None
    return loan


def sent(desk: Desk, loan: Loan, made: Any) -> tuple[bytes, int]:
    """As torch's queue sends it; bytes of the buffer that are used."""
    parcel = desk.pack(made, desk.begin(loan))
    return bytes(ForkingPickler.dumps(parcel)), parcel._parts[1]


def handed(buffers: SharedBuffers, desk: Desk, made: Any) -> Any:
    return pickle.loads(sent(desk, lend(buffers), made)[0])


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return (
            (type(found), found.dtype, found.shape) == (type(wanted), wanted.dtype, wanted.shape)
            and (found.layout, found.requires_grad) == (wanted.layout, wanted.requires_grad)
            and (wanted.layout is not torch.strided or found.stride() == wanted.stride())
            and torch.equal(_plain(found), _plain(wanted))
        )
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return type(found) is type(wanted) and all(map(same, found, wanted)) and len(found) == len(wanted)
    if isinstance(wanted, np.ndarray):
        return bool((found == wanted).all())
    return bool(found == wanted)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()


KINDS: dict[str, Any] = {
    "numbers of all types": [
        torch.arange(3).to(kind)
        for kind in (
            torch.uint8,
            torch.bool,
            torch.int16,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.cfloat,
        )
    ],
    "shapes": (torch.tensor(7.0), torch.empty(0, 3), torch.ones(1, 1, 1)),
    "strides": {
        "turned": torch.arange(6).reshape(2, 3).T,
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "repeated": torch.ones(1).expand(4),
    },
    "nested": Pair({"x": [torch.ones(2), ("a", 1)]}, None),
    "no tensors": ("x", b"y" * 100_000, 3),
    "arrays": {"x": np.arange(5), "y": [torch.from_numpy(np.arange(5.0))]},
    "gradients": [torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(2))],
    "sparse": torch.eye(3).to_sparse(),
    "large": [torch.rand(1 << 18), torch.rand(1 << 19)],
    "in torch's shared memory": torch.rand(9).share_memory_(),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_out_as_it_went_in(buffers: SharedBuffers, desk: Desk, kind: str) -> None:
    assert same(handed(buffers, desk, KINDS[kind]), KINDS[kind])


ITEMS: dict[str, list[Any]] = {
    "tensors": [torch.rand(3, 4) for _ in range(5)],
    "mappings": [{"x": torch.tensor(i), "y": [np.arange(3), 1.5], "key": str(i)} for i in range(3)],
    "named tuples": [Pair(torch.rand(2), i) for i in range(3)],
    "empty": [torch.empty(0) for _ in range(3)],
    "turned": [torch.rand(3, 4).T for _ in range(2)],
}


@pytest.mark.parametrize("kind", ITEMS)
def test_a_batch_is_collated_as_by_torch(buffers: SharedBuffers, desk: Desk, kind: str) -> None:
    loan = lend(buffers)
    writer = desk.begin(loan)
    parcel = desk.pack(writer.collate(ITEMS[kind]), writer)
    assert same(pickle.loads(ForkingPickler.dumps(parcel)), default_collate(ITEMS[kind]))


@pytest.mark.parametrize(
    "items", [[torch.ones(2), torch.ones(3)], [torch.ones(2), "x"], [{"x": 1}, {"y": 1}], [object()]]
)
def test_what_torch_cannot_collate_raises_the_same(
    buffers: SharedBuffers, desk: Desk, items: list[Any]
) -> None:
    with pytest.raises(Exception) as torchs:
        default_collate(items)
    with pytest.raises(torchs.type):
        desk.begin(lend(buffers)).collate(items)


def test_tensors_that_share_memory_still_do(buffers: SharedBuffers, desk: Desk) -> None:
    line = torch.arange(10)
    x, y, again = handed(buffers, desk, (line[:-1], line[1:], line))
    x[1] = 77
    assert y[0] == again[1] == 77


def test_memory_that_is_shared_already_stays_so(buffers: SharedBuffers, desk: Desk) -> None:
    there = torch.zeros(3).share_memory_()
    handed(buffers, desk, there)[1] = 4
    assert there.tolist() == [0, 4, 0]


def test_each_tensor_begins_where_processors_like_it(buffers: SharedBuffers, desk: Desk) -> None:
    made = handed(buffers, desk, [torch.ones(n, dtype=torch.uint8) for n in (1, 63, 64, 65)])
    assert [x.data_ptr() % 64 for x in made] == [0] * 4


def test_memory_is_written_by_the_worker_and_not_sent(buffers: SharedBuffers, desk: Desk) -> None:
    data, used = sent(desk, lend(buffers), torch.rand(1 << 18))
    assert used == 1 << 20 and len(data) < 2000


def test_a_small_part_of_much_memory_does_not_take_it_along(buffers: SharedBuffers, desk: Desk) -> None:
    much = torch.arange(1 << 20)
    data, used = sent(desk, lend(buffers), [much[5:9], much[7:8]])
    assert used == 0
    assert same(pickle.loads(data), [much[5:9], much[7:8]])


def test_a_buffer_is_lent_again_when_nothing_refers_to_it(buffers: SharedBuffers, desk: Desk) -> None:
    gc.disable()  # it is told at once, without a search for garbage
    try:
        loan = lend(buffers)
        made = pickle.loads(sent(desk, loan, {"x": torch.ones(4), "y": torch.zeros(4)})[0])
        row = made["x"][1:].numpy()
        del made
        other = lend(buffers)
        assert other.number != loan.number
        assert row.tolist() == [1.0] * 3
        del row
        assert lend(buffers).number == loan.number
    finally:
        gc.enable()


def test_what_the_loop_keeps_never_changes(buffers: SharedBuffers, desk: Desk) -> None:
    """When it has all buffers, no more are lent."""
    kept = []
    for at in range(2 + SPARE):
        kept.append(handed(buffers, desk, torch.full((1000,), at)))
    assert buffers.lend() is None
    assert [x.unique().tolist() for x in kept] == [[at] for at in range(2 + SPARE)]
    kept.pop(0)
    assert handed(buffers, desk, torch.full((1000,), 9))[0] == 9
    assert [x.unique().tolist() for x in kept] == [[at] for at in range(1, 2 + SPARE)]


def test_a_child_may_look_at_what_was_in_use_when_it_was_forked(buffers: SharedBuffers, desk: Desk) -> None:
    batch = handed(buffers, desk, torch.full((100_000,), 5))
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(wait, 1)
        os._exit(int(batch[-1]))
    del batch
    for _ in range(10):
        assert handed(buffers, desk, torch.full((100_000,), 6))[-1] == 6
    os.write(go, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    os.close(wait)
    os.close(go)


def test_a_thread_may_fork_while_the_loop_goes_on(buffers: SharedBuffers, desk: Desk) -> None:
    """Each child sees what the thread has, and no buffer is closed twice or lost."""
    ended: list[int] = []
    mine = handed(buffers, desk, torch.full((1000,), 5))

    def forks() -> None:
        for _ in range(6):
            pid = os.fork()
            if pid == 0:
                os._exit(int(mine[0]))
            ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    thread = threading.Thread(target=forks)
    thread.start()
    while thread.is_alive():
        assert handed(buffers, desk, torch.full((1000,), 6))[0] == 6
    thread.join()
    assert ended == [5] * 6
    assert len(buffers._lent) == 0 and len(buffers._used) <= 1  # the last one may not have been taken back


def test_a_thread_may_open_what_came(buffers: SharedBuffers, desk: Desk) -> None:
    """Torch's does that where batches are pinned."""
    found: list[Any] = []
    data, _ = sent(desk, lend(buffers), torch.arange(5))
    thread = threading.Thread(target=lambda: found.append(pickle.loads(data).clone()))
    thread.start()
    thread.join()
    assert found[0].tolist() == [0, 1, 2, 3, 4]


def test_nothing_is_written_into_a_file_that_took_the_place_of_a_buffer(
    buffers: SharedBuffers, desk: Desk, tmp_path: Path
) -> None:
    """The loop's process may have closed the buffer, and opened something else under the same number."""
    path = tmp_path / "precious"
    path.write_bytes(b"precious")
    loan = lend(buffers)._replace(path=str(path))
    data, used = sent(desk, loan, torch.arange(5))
    assert path.read_bytes() == b"precious"
    assert used == 0 and pickle.loads(data).tolist() == [0, 1, 2, 3, 4]


def test_a_buffer_that_cannot_be_opened_is_done_without(buffers: SharedBuffers, desk: Desk) -> None:
    loan = lend(buffers)
    writer = desk.begin(loan._replace(path="/proc/self/fd/none"))
    parcel = desk.pack(writer.collate([torch.ones(3)] * 2), writer)
    assert writer.used == 0
    assert same(pickle.loads(ForkingPickler.dumps(parcel)), torch.ones(2, 3))
    assert lend(buffers).number == loan.number


def test_where_no_memory_can_be_had_none_is_lent(
    buffers: SharedBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert buffers.lend() is None
    monkeypatch.delattr(os, "memfd_create")
    assert buffers.lend() is None


def test_what_cannot_be_pickled_leaves_the_buffer_to_what_is_said_instead(
    buffers: SharedBuffers, desk: Desk
) -> None:
    writer = desk.begin(lend(buffers))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        desk.pack([torch.ones(3), lambda: None], writer)
    assert pickle.loads(ForkingPickler.dumps(desk.pack("failed", writer))) == "failed"
    assert len(buffers._lent) == 0


def test_at_the_end_the_loop_keeps_what_it_has_and_no_file_stays_open(desk: Desk) -> None:
    before = set(os.listdir("/proc/self/fd"))
    buffers = SharedBuffers(2)
    batch = handed(buffers, desk, torch.arange(1000))
    handed(buffers, desk, torch.arange(1000))
    lend(buffers), lend(buffers)
    buffers.close()
    assert batch.tolist() == list(range(1000))
    desk._memory.clear()
    del batch
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_worker_forgets_buffers_that_are_not_lent_any_more(buffers: SharedBuffers, desk: Desk) -> None:
    for _ in range(20):
        handed(buffers, desk, torch.arange(100))
        buffers.close()
    assert len(desk._memory) <= 2 + SPARE
