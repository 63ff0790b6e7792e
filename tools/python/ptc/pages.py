"""The pages that have a file's bytes, where a mapping of the file in the mount is a copy of them."""
from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from typing import Optional

# tools/include/ptcfs/pages.h says what is asked, and when the answer is no.
_TICKET = struct.Struct("II16s104s")
_GET_PAGES = (2 << 30) | (_TICKET.size << 16) | (ord("P") << 8) | 0x74
_SECONDS = 5


def descriptor(file: int) -> Optional[int]:
    """A descriptor of the file in memory, open as `file` is, to be closed by the caller. None: there is none, or none is
    needed; `file` is to be mapped.
    """
    try:
        answer = fcntl.ioctl(file, _GET_PAGES, bytes(_TICKET.size))
        version, _, token, path = _TICKET.unpack(answer)
        if version != 1:
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(_SECONDS)
            link.connect(os.fsdecode(path.split(b"\0", 1)[0]))
            link.send(token)
            said, passed, _, _ = link.recvmsg(4, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    for level, kind, data in passed:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return array.array("i", data[:4])[0]
    return None
