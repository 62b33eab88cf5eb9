"""The sandbox of every child that touches a candidate's Python, native code or PTX. Fails closed.

Landlock: a read allow-list, one writable folder, no TCP, no signals or abstract sockets outside. seccomp: no sockets,
processes, tracing, mounts, keys, io_uring, changes of owners or limits. Capabilities dropped, own user, network and IPC
namespaces where the kernel grants them, rlimits, no environment. The uid stays: another could not read a Python that
lives under a private home.
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

# Landlock (linux/landlock.h); the system call numbers are the same on x86-64 and aarch64.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_MIN_ABI = 3
_FS_EXECUTE, _FS_READ_FILE, _FS_READ_DIR, _FS_IOCTL_DEV = 1 << 0, 1 << 2, 1 << 3, 1 << 15
_FS_ALL_V3 = (1 << 15) - 1
_FS_READ = _FS_READ_FILE | _FS_READ_DIR
_FS_WRITE = _FS_READ | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 14  # file, remove, make dir and file, truncate
_NET_ALL, _SCOPE_ALL = 3, 3

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_THREAD = 0x08000000, 0x10000000, 0x40000000, 0x00010000


class SandboxUnavailable(Exception):
    """The machine cannot set the sandbox up. One line: which part and why."""


@dataclass(frozen=True)
class Policy:
    """What a child may touch: ``read`` and ``execute`` beneath these paths, everything inside ``write``.

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
            _allow(ruleset, path, _FS_READ | _FS_EXECUTE)
        for path in policy.programs:
            _allow(ruleset, path, _FS_READ | _FS_EXECUTE)
        _allow(ruleset, policy.write, _FS_WRITE)
        _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock restrict")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not path.is_dir():
            access &= _FS_EXECUTE | 1 << 1 | _FS_READ_FILE | 1 << 14
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, fd))
        _check(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock rule for {path}")
    finally:
        os.close(fd)


# seccomp. Calls by name with their numbers (x86-64, aarch64); None where the architecture has no such call.
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kill": (62, 129),
    "tkill": (200, 130),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "personality": (135, 92),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "setrlimit": (160, 164),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "msgget": (68, 186),
    "semget": (64, 190),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "mq_open": (240, 180),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "capset": (126, 91),
    "sched_setaffinity": (203, 122),
    "setpriority": (141, 140),
    "ioperm": (173, None),
    "iopl": (172, None),
    "modify_ldt": (154, None),
}
_EXEC = {"execve": (59, 221), "execveat": (322, 281)}
_CLONE, _CLONE3, _PRLIMIT64 = (56, 220), (435, 435), (302, 261)
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def _program(machine: str, allow_exec: bool) -> bytes:
    """The BPF program: refuse the calls above with EPERM, clone3 with ENOSYS (glibc then uses clone), clone unless it
    makes a thread, prlimit64 when it sets."""
    column = list(_AUDIT_ARCH).index(machine)
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":  # The x32 numbers.
        code += [(_JGE, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    refused = [
        n[column] for n in (*_FORBIDDEN.values(), *(() if allow_exec else _EXEC.values())) if n[column] is not None
    ]
    for number in refused:
        code += [(_JEQ, 0, 1, int(number or 0)), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    code += [(_JEQ, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    # clone: the flags are the first argument's low word.
    code += [(_JEQ, 0, 4, _CLONE[column]), (_LOAD, 0, 0, 16), (_JSET, 0, 1, _CLONE_THREAD)]
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    # prlimit64: a new limit (third argument, either half) is refused.
    code += [(_JEQ, 0, 5, _PRLIMIT64[column]), (_LOAD, 0, 0, 32), (_JEQ, 0, 2, 0), (_LOAD, 0, 0, 36)]
    code += [(_JEQ, 1, 0, 0), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in code)


def _seccomp(policy: Policy) -> None:
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise SandboxUnavailable(f"no seccomp filter for {machine}")
    program = _program(machine, allow_exec=bool(policy.programs))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    seccomp = 317 if machine == "x86_64" else 277
    _check(_libc.syscall(seccomp, 1, 0, ctypes.create_string_buffer(header)), "seccomp")


def close_other_files(keep: Iterable[int]) -> None:
    """Close every file descriptor but 0, 1, 2 and ``keep``."""
    kept = {0, 1, 2, *keep}
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in kept:
            with suppress(OSError):
                os.close(int(entry.name))
