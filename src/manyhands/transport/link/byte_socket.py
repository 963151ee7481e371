"""The bytes of a connection, sent and received by compiled code that holds no interpreter lock.

They go from and to the memory of whoever calls, in pieces as the kernel takes and has them, with no object for any of
them. Python is needed again when all of a message has come, at a deadline, or when the connection broke.
"""

from __future__ import annotations

from typing import Any, Final

from numba import int32, int64, types, uint32, uint64

from manyhands.native.atomics import clock_ns, load_u32, stack_pair, store_u32
from manyhands.native.decorators import helper, njit

ENDED: Final = -(1 << 30)  # beyond all numbers of errors

_MSG_DONTWAIT, _MSG_NOSIGNAL, _MSG_MORE = 0x40, 0x4000, 0x8000  # the same on all of Linux
_EINTR, _EAGAIN = 4, 11
_POLLIN, _POLLOUT = 1, 4
_NS_IN_MS: Final = 1_000_000

_send: Any = types.ExternalFunction("send", types.int64(types.int32, types.int64, types.uint64, types.int32))
_recv: Any = types.ExternalFunction("recv", types.int64(types.int32, types.int64, types.uint64, types.int32))
_poll: Any = types.ExternalFunction("poll", types.int32(types.int64, types.uint64, types.int32))
_errno_location: Any = types.ExternalFunction("__errno_location", types.int64())


@helper()
def _failed() -> int:
    """The number of the error after a call that failed; 0 where the call is to be made again later."""
    number = int64(load_u32(_errno_location()))
    return int64(0) if number in (_EINTR, _EAGAIN) else number  # type: ignore[no-any-return]


@helper()
def _comes(descriptor: int, events: int, until_ns: int) -> bool:
    """Wait until the descriptor is ready, or until that moment; 0 is not to wait. Whether to go on."""
    left_ns = until_ns - clock_ns() if until_ns != 0 else int64(0)
    if left_ns <= 0:
        return False
    # A pollfd: the descriptor, and half a word each of what is waited for and what came.
    waited_for = stack_pair()
    store_u32(waited_for, uint32(descriptor))
    store_u32(waited_for + 4, uint32(events))
    return _poll(waited_for, uint64(1), int32(max(1, left_ns // _NS_IN_MS))) > 0  # type: ignore[no-any-return]


@njit("int64(int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def write(
    descriptor: int,
    header: int,
    header_bytes: int,
    payload: int,
    payload_bytes: int,
    done: int,
    until_ns: int,
) -> int:
    """Send a header and a payload, of which `done` bytes are sent; how many are now, or the negative of an error.

    Waits until `until_ns` for the kernel to take more; 0 means not to wait.
    """
    total = header_bytes + payload_bytes
    while done < total:
        flags = _MSG_DONTWAIT | _MSG_NOSIGNAL
        if done < header_bytes:
            source, count = header + done, header_bytes - done
            if payload_bytes != 0:
                flags |= _MSG_MORE
        else:
            source, count = payload + done - header_bytes, total - done
        sent = _send(int32(descriptor), source, uint64(count), int32(flags))
        if sent >= 0:
            done += sent
            continue
        number = _failed()
        if number != 0:
            return -number  # type: ignore[no-any-return]
        if not _comes(descriptor, _POLLOUT, until_ns):
            break
    return done


@njit("int64(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def read(descriptor: int, target: int, num_bytes: int, done: int, until_ns: int) -> int:
    """Receive `num_bytes` to `target`, of which `done` are there; how many are now, or the negative of an error.

    ENDED where the peer has closed its end. With `until_ns` 0, one look, however fast the peer writes.
    """
    while done < num_bytes:
        came = _recv(int32(descriptor), target + done, uint64(num_bytes - done), int32(_MSG_DONTWAIT))
        if came > 0:
            done += came
            if until_ns == 0:
                break
            continue
        if came == 0:
            return ENDED
        number = _failed()
        if number != 0:
            return -number  # type: ignore[no-any-return]
        if not _comes(descriptor, _POLLIN, until_ns):
            break
    return done
