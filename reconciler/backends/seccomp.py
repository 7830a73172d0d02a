"""Owns the system call filter of a sandbox, as a table and as the compiled program; does not load it into anything."""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass

NEW_NAMESPACES = 0x0002_0000 | 0x0200_0000 | 0x0400_0000 | 0x0800_0000 | 0x1000_0000 | 0x2000_0000 | 0x4000_0000 | 0x80
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME (sched.h)."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_LAST_FAMILY = socket.AF_INET6
_FAMILIES = frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6})
"""Not netlink: what waits in such a socket is charged to no control group (docs/decisions/0014)."""
_LOW_32_BITS = 0xFFFF_FFFF
LAST_REVIEWED = 462
"""The newest call looked at for this table (mseal, Linux 6.10); from 424 on numbers are the same everywhere."""
_X32_BIT = 0x4000_0000
_ERRNO_ACTION = 0x0005_0000


@dataclass(frozen=True, slots=True)
class Condition:
    """One argument's comparison: `equal`, `not_equal`, `greater`, or `masked` (equal in the bits of `mask`)."""

    argument: int
    comparison: str
    value: int
    mask: int = 0


@dataclass(frozen=True, slots=True)
class Denied:
    """One system call that ends in `error` (an errno) when all conditions hold; always, without any."""

    call: str
    error: int
    conditions: tuple[Condition, ...] = ()


_ALWAYS = {
    # Namespaces other than those that the fence is made of, and moving between them.
    errno.EPERM: (
        "setns",
        "mount",
        "umount2",
        "pivot_root",
        "chroot",
        "fsopen",
        "fsconfig",
        "fsmount",
        "fspick",
        "move_mount",
        "open_tree",
        "mount_setattr",
        # Other processes' memory and descriptors.
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "process_madvise",
        "pidfd_getfd",
        "kcmp",
        # Wide and rarely needed parts of the kernel.
        "bpf",
        "perf_event_open",
        "userfaultfd",
        "keyctl",
        "add_key",
        "request_key",
        # The ring does socket operations that a filter on socket calls never sees.
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
        "open_by_handle_at",
        "fanotify_init",
        "quotactl",
        "quotactl_fd",
        "syslog",
        "acct",
        "swapon",
        "swapoff",
        "reboot",
        "kexec_load",
        "kexec_file_load",
        "init_module",
        "finit_module",
        "delete_module",
        "iopl",
        "ioperm",
        "settimeofday",
        "clock_settime",
        "clock_adjtime",
        "adjtimex",
        "sethostname",
        "setdomainname",
        "lookup_dcookie",
        "nfsservctl",
        "vhangup",
    ),
    # clone3 has its flags behind a pointer that a filter cannot follow; libraries fall back to clone on this answer.
    # io_setup takes from one number for the whole host (fs.aio-max-nr), all of it in one call; programs fall back too.
    errno.ENOSYS: ("clone3", "io_setup"),
}


def table() -> tuple[Denied, ...]:
    """Give the whole filter, one row a denial; what no row names is left to the kernel's own checks."""
    rows = [Denied(call, error) for error, calls in _ALWAYS.items() for call in calls]
    # One row for each flag, as a row's mask must match whole. Seccomp sees 64 bits where the kernel reads 32: masked.
    for bit in (1 << number for number in range(32)):
        if bit & NEW_NAMESPACES:
            flag = Condition(0, "masked", bit, mask=bit)
            rows.append(Denied("unshare", errno.EPERM, (flag,)))
            if bit != 0x80:  # noqa: PLR2004 - CLONE_NEWTIME; in clone these bits are the exit signal
                rows.append(Denied("clone", errno.EPERM, (flag,)))
    rows += [
        Denied("ioctl", errno.EPERM, (Condition(1, "masked", command, mask=_LOW_32_BITS),))
        for command in (_TIOCSTI, _TIOCLINUX)
    ]
    rows.append(Denied("socket", errno.EAFNOSUPPORT, (Condition(0, "greater", _LAST_FAMILY),)))
    rows += [
        Denied("socket", errno.EAFNOSUPPORT, (Condition(0, "equal", family),))
        for family in range(_LAST_FAMILY + 1)
        if family not in _FAMILIES
    ]
    rows.append(Denied("socketpair", errno.EAFNOSUPPORT, (Condition(0, "not_equal", socket.AF_UNIX),)))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class NoSeccomp:
    """The library that compiles filters is not usable here; `message` says what to install."""

    message: str


def compile_filter() -> bytes | NoSeccomp:
    """Compile `table` for this machine's own architecture (any other is killed) as the kernel's BPF program."""
    try:
        import pyseccomp  # noqa: PLC0415 - it loads libseccomp when imported, which this host may lack
    except (ImportError, OSError, RuntimeError) as error:
        return NoSeccomp(f"libseccomp is not usable ({error}): install it (Debian: apt-get install libseccomp2)")
    compiled = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    compiled.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    operators = {
        "equal": pyseccomp.EQ,
        "not_equal": pyseccomp.NE,
        "greater": pyseccomp.GT,
        "masked": pyseccomp.MASKED_EQ,
    }
    compiled.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)  # a binary tree: seven comparisons a call instead of seventy
    for row in table():
        arguments = [
            pyseccomp.Arg(c.argument, operators[c.comparison], c.mask, c.value)
            if c.comparison == "masked"
            else pyseccomp.Arg(c.argument, operators[c.comparison], c.value)
            for c in row.conditions
        ]
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, row.call)
        # A negative number is a call that this architecture does not have.
        if number >= 0:
            compiled.add_rule(pyseccomp.ERRNO(row.error), number, *arguments)
    with os.fdopen(os.memfd_create("ringfence-seccomp", os.MFD_CLOEXEC), "w+b") as file:
        compiled.export_bpf(file)
        file.seek(0)
        return newer_calls() + file.read()


def newer_calls() -> bytes:
    """Give the program's first instructions: calls newer than the table answer ENOSYS, as on an older kernel.

    Jumps are relative, so a prefix changes nothing of what follows. Numbers of the x32 interface pass on to be killed.
    """
    load, jump_greater, jump_at_least, answer = (
        0x20,
        0x25,
        0x35,
        0x06,
    )  # linux/bpf_common.h: LD W ABS, JGT K, JGE K, RET K
    program = (
        (load, 0, 0, 0),  # seccomp_data.nr
        (jump_greater, 0, 2, LAST_REVIEWED),
        (jump_at_least, 1, 0, _X32_BIT),
        (answer, 0, 0, _ERRNO_ACTION | errno.ENOSYS),
    )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
