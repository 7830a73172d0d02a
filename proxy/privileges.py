"""Owns giving up root, for good, before anything from outside is read."""

from __future__ import annotations

import os
import pwd

_PR_SET_NO_NEW_PRIVS = 38


def drop(user: str) -> str | None:
    """Become this user (a name or a number) without groups or a way back; a message where that is not possible.

    Raises OSError when the kernel refuses a step.
    """
    import ctypes  # noqa: PLC0415 — costs a tenth of the start-up, and most proxies are started without `--user`

    libc = ctypes.CDLL(None, use_errno=True)
    by_number = user.isascii() and user.isdecimal()
    try:
        entry = pwd.getpwuid(int(user)) if by_number else pwd.getpwnam(user)
        uid, gid = entry.pw_uid, entry.pw_gid
    except KeyError:
        if not by_number:
            return f"there is no user {user!a} on this host"
        uid = gid = int(user)
    if uid == 0 or gid == 0:
        return f"{user!a} is root or in root's group; name a user without rights"
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid) or os.getgroups():
        return "root was not given up"
    return None
