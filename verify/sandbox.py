"""The sandbox of every child that touches a candidate's Python, native code or PTX. Fails closed.

Landlock: a read allow-list, one folder to write files in, no TCP, no signals or abstract sockets outside. seccomp: an
allow-list of system calls, without sockets, processes, tracing, mounts, keys, io_uring, owners, modes or limits.
Capabilities dropped, own user, network and IPC namespaces where the kernel grants them, rlimits, no environment. The
uid stays: another could not read a Python that lives under a private home.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

_LOADERS = (Path("/lib64/ld-linux-x86-64.so.2"), Path("/lib/ld-linux-aarch64.so.1"))
"""What the kernel loads to start a dynamically linked program."""

# Landlock (linux/landlock.h); the system call numbers are the same on x86-64 and aarch64.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_MIN_ABI = 3
_FS_EXECUTE, _FS_READ_FILE, _FS_READ_DIR, _FS_IOCTL_DEV = 1 << 0, 1 << 2, 1 << 3, 1 << 15
_FS_ALL_V3 = (1 << 15) - 1
_FS_READ = _FS_READ_FILE | _FS_READ_DIR
_FS_WRITE_FILE, _FS_REMOVE_FILE, _FS_MAKE_FILE, _FS_TRUNCATE = 1 << 1, 1 << 5, 1 << 8, 1 << 14
# No folders: the watcher of the folder's size then needs no recursion that a child could make deep.
_FS_WRITE = _FS_READ | _FS_WRITE_FILE | _FS_REMOVE_FILE | _FS_MAKE_FILE | _FS_TRUNCATE
_FS_OF_A_FILE = _FS_EXECUTE | _FS_READ_FILE | _FS_WRITE_FILE | _FS_TRUNCATE
_NET_ALL, _SCOPE_ALL = 3, 3

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_THREAD = 0x08000000, 0x10000000, 0x40000000, 0x00010000


class SandboxUnavailable(Exception):
    """The machine cannot set the sandbox up. One line: which part and why."""


@dataclass(frozen=True)
class Policy:
    """What a child may touch: it may read beneath ``read`` and make, change and remove files in ``write``.

    ``programs``: files that the child may turn into (execve); without any, execve is forbidden. ``weak``: go on where a
    part cannot be set up. Sizes in bytes, ``cpu_seconds`` of processor time; ``memory_bytes`` beyond what is mapped
    already."""

    read: tuple[Path, ...]
    write: Path
    memory_bytes: int
    file_bytes: int
    cpu_seconds: int
    programs: tuple[Path, ...] = ()
    weak: bool = False


def system_paths() -> tuple[Path, ...]:
    """What any Python child must read: the interpreter, its packages, system libraries, and entropy."""
    paths = {Path(sys.prefix), Path(sys.base_prefix), Path(sysconfig.get_paths()["purelib"])}
    paths |= {Path(p) for p in ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache")}
    paths |= {Path(p) for p in ("/dev/null", "/dev/zero", "/dev/urandom", "/usr/share/zoneinfo")}
    return tuple(sorted(p for p in paths if p.exists()))


def apply(policy: Policy) -> list[str]:
    """Restrict this process for good. Returns what was left out (only ever with ``weak``).

    Raises SandboxUnavailable when Landlock, seccomp or limits cannot be set and the policy is not weak."""
    missing = []
    for part in (_limits, _identity, _landlock, _seccomp):
        try:
            part(policy)
        except (OSError, ValueError, SandboxUnavailable) as error:
            if not policy.weak:
                raise SandboxUnavailable(f"{part.__name__.strip('_')}: {error}") from None
            missing.append(part.__name__.strip("_"))
    return missing


def probe() -> dict[str, bool]:
    """What this machine can enforce. Tried for real, in a forked child."""
    parts = {"landlock": _landlock, "seccomp": _seccomp, "limits": _limits}
    found = {}
    for name, part in parts.items():
        pid = os.fork()
        if pid == 0:
            code = 1
            with suppress(BaseException):
                _no_new_privileges()
                part(Policy((), Path("/tmp"), 1 << 34, 1 << 30, 60))
                code = 0
            os._exit(code)
        found[name] = os.waitpid(pid, 0)[1] == 0
    return found


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise SandboxUnavailable(f"{what}: {os.strerror(number)}")
    return result


def _no_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _limits(policy: Policy) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, value in (
        (resource.RLIMIT_AS, mapped + policy.memory_bytes),
        (resource.RLIMIT_FSIZE, policy.file_bytes),
        (resource.RLIMIT_CPU, policy.cpu_seconds),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _identity(policy: Policy) -> None:
    """No new privileges, die with the parent, own namespaces where granted, no capabilities."""
    _no_new_privileges()
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0:
        # Some kernels grant the namespace but no mapping. File access goes by the real ids either way.
        with suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    # capset(2), version 3: two words each of effective, permitted, inheritable, all empty.
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    _check(_libc.capset(header, ctypes.create_string_buffer(24)), "capset")
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def _landlock(policy: Policy) -> None:
    abi = _check(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), "Landlock")
    if abi < _MIN_ABI:
        raise SandboxUnavailable(f"the kernel's Landlock is version {abi}, {_MIN_ABI} is needed")
    handled = _FS_ALL_V3 | (_FS_IOCTL_DEV if abi >= 5 else 0)
    attributes = struct.pack("QQQ", handled, _NET_ALL if abi >= 4 else 0, _SCOPE_ALL if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    buffer = ctypes.create_string_buffer(attributes[:size], size)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, buffer, ctypes.c_size_t(size), 0), "Landlock ruleset")
    try:
        for path in policy.read:
            _allow(ruleset, path, _FS_READ)
        for path in (*policy.programs, *(_LOADERS if policy.programs else ())):
            if path.exists():
                _allow(ruleset, path, _FS_READ | _FS_EXECUTE)
        _allow(ruleset, policy.write, _FS_WRITE)
        _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock restrict")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not path.is_dir():
            access &= _FS_OF_A_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, fd))
        _check(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock rule for {path}")
    finally:
        os.close(fd)


# seccomp. The calls that a child may make, with their numbers (x86-64, aarch64; None: no such call there). Everything
# else is refused with EPERM. Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # Files that are open, and opening what Landlock allows.
    "read": (0, 63),
    "write": (1, 64),
    "open": (2, None),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "lseek": (8, 62),
    "ioctl": (16, 29),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "flock": (73, 32),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "umask": (95, 166),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "fadvise64": (221, 223),
    "openat": (257, 56),
    "openat2": (437, 437),
    "newfstatat": (262, 79),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fallocate": (285, 47),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "statx": (332, 291),
    "close_range": (436, 436),
    # Memory.
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "msync": (26, 227),
    "mincore": (27, 232),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    # Threads, signals to oneself, waiting, time.
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "futex": (202, 98),
    "set_tid_address": (218, 96),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "rseq": (334, 293),
    "arch_prctl": (158, None),
    "restart_syscall": (219, 128),
    "sched_yield": (24, 124),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "times": (100, 153),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "wait4": (61, 260),
    # About this process and machine.
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getrandom": (318, 278),
}
_EXECVE = (59, 221)
_CLONE, _CLONE3, _TGKILL = (56, 220), (435, 435), (234, 131)
_PRLIMIT64, _PRCTL, _FCNTL = (302, 261), (157, 167), (72, 25)
_SECCOMP = (317, 277)
_HARMLESS_PRCTL = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
_SIGNALLING_FCNTL = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a signal to whom it pleases
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_EPERM, _ENOSYS = 1, 38
_LOAD, _JEQ, _JSET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; an argument is eight bytes, low word first

Step = tuple[int, int, int, int]
"""A BPF instruction: code, how far to jump when true and when false, value."""
_ALLOW: Step = (_RETURN, 0, 0, 0x7FFF0000)
_REFUSE: Step = (_RETURN, 0, 0, 0x00050000 | _EPERM)
_MISSING: Step = (_RETURN, 0, 0, 0x00050000 | _ENOSYS)
_KILL: Step = (_RETURN, 0, 0, 0x80000000)


def _program(machine: str, *, pid: int, allow_exec: bool) -> bytes:
    """The BPF program. Beside the list: clone only for threads, tgkill only to ``pid``, prlimit64 only to look, prctl
    and fcntl only what is harmless. clone3 hides its flags in memory: ENOSYS, whereupon glibc uses clone."""
    column = list(_AUDIT_ARCH).index(machine)
    steps: list[Step] = [(_LOAD, 0, 0, _ARCH), (_JEQ, 1, 0, _AUDIT_ARCH[machine]), _KILL, (_LOAD, 0, 0, _NUMBER)]
    for numbers in (*_ALLOWED.values(), *([_EXECVE] if allow_exec else [])):
        if (number := numbers[column]) is not None:
            steps += [(_JEQ, 0, 1, number), _ALLOW]
    conditional: tuple[tuple[tuple[int, int], list[Step]], ...] = (
        (_CLONE3, [_MISSING]),
        (_CLONE, [(_LOAD, 0, 0, _ARGUMENT), (_JSET, 1, 0, _CLONE_THREAD), _REFUSE, _ALLOW]),
        (_TGKILL, _one_of(0, (pid,), _ALLOW, _REFUSE)),
        (_PRCTL, _one_of(0, _HARMLESS_PRCTL, _ALLOW, _REFUSE)),
        (_FCNTL, _one_of(1, _SIGNALLING_FCNTL, _REFUSE, _ALLOW)),
        # The third argument is the address of the new limit.
        (
            _PRLIMIT64,
            [
                (_LOAD, 0, 0, _ARGUMENT + 16),
                (_JEQ, 0, 2, 0),
                (_LOAD, 0, 0, _ARGUMENT + 20),
                (_JEQ, 1, 0, 0),
                _REFUSE,
                _ALLOW,
            ],
        ),
    )
    for both, then in conditional:
        steps += [(_JEQ, 0, len(then), both[column]), *then]
    return b"".join(struct.pack("HBBI", *step) for step in (*steps, _REFUSE))


def _one_of(argument: int, values: tuple[int, ...], then: Step, otherwise: Step) -> list[Step]:
    """Return ``then`` when the argument's low word is one of ``values``."""
    tests = [(_JEQ, len(values) - n, 0, value) for n, value in enumerate(values)]
    return [(_LOAD, 0, 0, _ARGUMENT + 8 * argument), *tests, otherwise, then]


def _seccomp(policy: Policy) -> None:
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise SandboxUnavailable(f"no seccomp filter for {machine}")
    program = _program(machine, pid=os.getpid(), allow_exec=bool(policy.programs))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    number = _SECCOMP[list(_AUDIT_ARCH).index(machine)]
    _check(_libc.syscall(number, 1, 0, ctypes.create_string_buffer(header)), "seccomp")


def close_other_files(keep: Iterable[int]) -> None:
    """Close every file descriptor but 0, 1, 2 and ``keep``."""
    kept = {0, 1, 2, *keep}
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in kept:
            with suppress(OSError):
                os.close(int(entry.name))
