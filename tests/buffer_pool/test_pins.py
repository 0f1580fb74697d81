import pytest
import torch

from kvstore.buffer_pool import BufferPool, FramePinnedError, FrameStateError, GuardReleasedError
from kvstore.buffer_pool.events import NullEvent, event_recorder
from tests.buffer_pool.builders import Device, full_pool, held, put


def test_pinned_blocks_stay_until_their_guard_is_released():
    pool = full_pool(3)
    guard = pool.pin(pool.lookup([10, 99, 11]))
    assert guard.frames.tolist() == pool.lookup([10, 11]).tolist()
    put(pool, 20)
    assert held(pool) == [10, 11, 20]
    guard.release()
    pool._check()
    put(pool, 21)
    assert held(pool) == [11, 20, 21]


def test_a_frame_is_pinned_as_long_as_one_of_its_guards_lives():
    pool = full_pool(1)
    frames = pool.lookup([10])
    with pool.pin(frames), pool.pin(frames) as inner:
        inner.release()
        assert pool.reserve(1) is None
        pool._check()
    assert len(pool.reserve(1)) == 1


def test_a_frame_that_a_guard_names_twice_is_free_after_one_release():
    pool = full_pool(1)
    with pool.pin(pool.lookup([10, 10])):
        pool._check()
        assert pool.reserve(1) is None
    pool._check()
    assert len(pool.reserve(1)) == 1


def test_an_exception_releases():
    pool = full_pool(1)
    with pytest.raises(ZeroDivisionError), pool.pin(pool.lookup([10])):
        raise ZeroDivisionError
    pool._check()
    assert pool.stats().guards == 0


def test_a_guard_is_released_once():
    pool = full_pool(2)
    guard = pool.pin(pool.lookup([10]))
    guard.release()
    for use in (guard.release, lambda: guard.frames, guard.__enter__):
        with pytest.raises(GuardReleasedError, match="released"):
            use()
    pool._check()


def test_a_body_may_release_its_guard_early():
    pool = full_pool(1)
    with pool.pin(pool.lookup([10])) as guard:
        guard.release()
        put(pool, 20)
    pool._check()
    assert pool.resident().tolist() == [20]


@pytest.mark.parametrize("frames", [[0], [2], [3], [-2]])
def test_only_frames_with_a_block_can_be_pinned(frames):
    pool = full_pool(3)
    pool.drop([10])
    reserved = pool.reserve(1)
    assert reserved.tolist() == [0]
    pool.drop([12])
    with pytest.raises(FrameStateError):
        pool.pin(frames)
    pool._check()
    assert pool.stats().guards == 0


def test_a_pool_is_not_closed_under_its_guards():
    pool = full_pool(2)
    guard = pool.pin(pool.lookup([10]))
    with pytest.raises(FramePinnedError, match="1 guards pin frames"):
        pool.close()
    assert pool.lookup([10])[0] >= 0
    guard.release()
    pool.close()


# ---- devices that work behind Python's back ----


def test_a_released_frame_waits_for_the_device():
    device = Device()
    pool = full_pool(2, record_event=device.record)
    pool.pin(pool.lookup([10, 11])).release()
    pool._check()
    assert pool.reserve(1) is None
    device.finish()
    assert len(pool.reserve(1)) == 1
    pool._check()


def test_events_may_happen_out_of_order():
    device = Device()
    pool = full_pool(2, record_event=device.record)
    pool.pin(pool.lookup([10])).release()
    pool.pin(pool.lookup([11])).release()
    device.pending[1].done = True
    put(pool, 20)
    assert held(pool) == [10, 20]


def test_a_drop_waits_for_the_device_but_not_for_guards():
    device = Device()
    pool = full_pool(2, record_event=device.record)
    pool.pin(pool.lookup([10])).release()
    assert pool.drop([10]) == 1
    assert device.pending[0].done
    pool._check()
    with pool.pin(pool.lookup([11])), pytest.raises(FramePinnedError):
        pool.drop([11])


def test_closing_waits_for_the_device():
    device = Device()
    pool = full_pool(2, record_event=device.record)
    pool.pin(pool.lookup([10])).release()
    pool.close()
    assert device.pending[0].done


@pytest.mark.parametrize("call", ["query", "synchronize"])
def test_a_device_that_fails_while_it_is_waited_for_leaves_the_pins(monkeypatch, call):
    device = Device()
    pool = full_pool(2, record_event=device.record)
    for block in (10, 11):
        pool.pin(pool.lookup([block])).release()
    first, second = device.pending
    first.done = True

    def broken():
        """What an event says when its device has failed."""
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(second, call, broken)
        with pytest.raises(RuntimeError, match="gone"):
            pool.drop([10]) if call == "synchronize" else pool.reserve(1)
        pool._check()
    assert len(pool.reserve(1)) == 1
    assert pool.drop([11]) == 1
    pool._check()


def test_a_guard_whose_event_cannot_be_recorded_still_pins():
    def broken():
        raise RuntimeError("no stream")

    pool = full_pool(1, record_event=broken)
    guard = pool.pin(pool.lookup([10]))
    with pytest.raises(RuntimeError, match="no stream"):
        guard.release()
    pool._check()
    assert pool.reserve(1) is None
    assert guard.frames.tolist() == [0]


def test_the_event_of_a_cpu_has_always_happened():
    event = event_recorder(torch.device("cpu"))()
    assert isinstance(event, NullEvent)
    assert event.query()
    event.synchronize()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_a_frame_is_not_reused_while_a_kernel_reads_it():
    pool = BufferPool(1, 1 << 20, device="cuda", debug=True)
    pool.admit([1], [1], lambda block, frame: frame.fill_(7))
    with pool.pin(pool.lookup([1])):
        torch.cuda._sleep(200_000_000)
        total = pool.frames[0].sum(dtype=torch.int64)
    assert pool.reserve(1) is None, "the device cannot have finished"
    torch.cuda.synchronize()
    assert len(pool.reserve(1)) == 1
    assert total.item() == 7 << 20
    pool._check()
