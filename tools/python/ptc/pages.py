"""The memory that has a file's bytes, where a mapping of the file in the mount is a copy of them."""
from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import socket
import struct
from typing import NamedTuple, Optional

# tools/include/ptcfs/pages.h says what is asked, and when the answer is no.
_TICKET = struct.Struct("=II16s80s16sQ")
_GET_PAGES = (2 << 30) | (_TICKET.size << 16) | (ord("P") << 8) | 0x74
_HOST, _CUDA = 0, 1
_SECONDS = 5
_TMPFS = 0x01021994


class Found(NamedTuple):
    """What a process can map that has a file open. A descriptor is to be closed by who asked."""
    descriptor: int  # of the stored file, or of a GPU's memory, as its driver takes it; -1: the file in the mount is as good
    gpu: bytes  # which one, for all processes of the machine; empty: it is a file in the host's memory (tmpfs)
    size: int  # bytes of a GPU's memory


def ask(file: int) -> Optional[Found]:
    """None: nothing of that; `file` is to be read."""
    try:
        answer = fcntl.ioctl(file, _GET_PAGES, bytes(_TICKET.size))
    except OSError as error:
        if error.errno == errno.EALREADY or (error.errno in (errno.ENOTTY, errno.EINVAL) and _is_tmpfs(file)):
            return Found(-1, b"", 0)
        return None
    version, kind, token, path, gpu, size = _TICKET.unpack(answer)
    if version != 1 or kind not in (_HOST, _CUDA):
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(_SECONDS)
            link.connect(os.fsdecode(path.split(b"\0", 1)[0]))
            link.send(token)
            _, passed, _, _ = link.recvmsg(4, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    for level, what, data in passed:
        if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found = Found(array.array("i", data[:4])[0], gpu if kind == _CUDA else b"", size)
            if found.gpu or _is_tmpfs(found.descriptor):
                return found
            os.close(found.descriptor)
    return None


def _is_tmpfs(file: int) -> bool:
    facts = (ctypes.c_long * 64)()  # struct statfs, which begins with the type
    try:
        return ctypes.CDLL(None).fstatfs(ctypes.c_int(file), facts) == 0 and facts[0] == _TMPFS
    except (AttributeError, OSError):
        return False
