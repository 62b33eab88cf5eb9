"""The sandbox: what it forbids works without it, what a compiler needs works inside, and it fails closed."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kernelmill.verify import sandbox

SCRIPT = """
import ctypes, fcntl, mmap, os, resource, signal, socket, sys, tempfile, threading, time
from pathlib import Path
from kernelmill.verify import sandbox
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
PRLIMIT = 302 if X86 else 261

def call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result

inside = Path(sys.argv[1])
os.chdir(inside)
reader, writer = os.pipe()
if sys.argv[2] == "yes":
    policy = sandbox.Policy(sandbox.system_paths(), inside, 512 << 20, 1 << 20, 5)
    assert sandbox.apply(policy) == []
try:
{code}
except OSError as error:
    sys.exit(f"errno {{error.errno}}")
except MemoryError:
    sys.exit("memory")
"""


def run(code: str, folder: Path, *, sandboxed: bool = True) -> tuple[int, str]:
    """Exit status and what was said, of ``code`` run in ``folder``."""
    script = SCRIPT.format(code=textwrap.indent(textwrap.dedent(code), "    "))
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), "yes" if sandboxed else "no"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={"KEY": "secret"},
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "own").write_text("own")
    (tmp_path / "outside").write_text("outside")
    return folder


# Works for any process of this user, so the sandbox alone is what forbids it.
ORDINARY = {
    "read a file outside": "Path('../outside').read_text()",
    "write a file outside": "Path('../new').write_text('x')",
    "change a file outside": "os.truncate('../outside', 0)",
    "remove a file outside": "os.unlink('../outside')",
    "list a folder outside": "os.listdir('..')",
    "rename out of the folder": "os.rename('own', '../own')",
    "make a folder": "os.mkdir('folder')",
    "make a symbolic link": "os.symlink('/etc/passwd', 'link')",
    "make a hard link": "os.link('own', 'link')",
    "make a pipe in the folder": "os.mkfifo('pipe')",
    "change a mode": "os.chmod('own', 0o4755)",
    "change a time": "os.utime('own', (0, 0))",
    "read its own environment": "Path('/proc/self/environ').read_bytes()",
    "read another process": "Path(f'/proc/{os.getppid()}/status').read_text()",
    "read a password file": "Path('/etc/passwd').read_text()",
    "list the root": "os.listdir('/')",
    "write to a device": "os.open('/dev/null', os.O_WRONLY)",
    "internet socket": "socket.socket(socket.AF_INET)",
    "unix socket": "socket.socket(socket.AF_UNIX)",
    "socket pair": "socket.socketpair()",
    "netlink socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "fork": "os.fork() or os._exit(0)",
    "run a program": "os.execv('/bin/true', ['true'])",
    "run a library as a program": "os.execv(sys.executable, [sys.executable, '-c', ''])",
    "signal its parent": "os.kill(os.getppid(), 0)",
    "signal a thread of its parent": "call(234 if X86 else 131, os.getppid(), os.getppid(), 0)",
    "own the signals of a file": "fcntl.fcntl(reader, 8, os.getppid())",
    "hold a process": "os.pidfd_open(os.getppid())",
    "memory file": "os.memfd_create('x')",
    "trace": "libc.ptrace(0, 0, 0, 0) < 0 and (_ for _ in ()).throw(OSError(ctypes.get_errno(), 'ptrace'))",
    "lower a limit": "call(PRLIMIT, 0, resource.RLIMIT_NOFILE, (ctypes.c_uint64 * 2)(10, 10), 0)",
    "outlive its parent": "libc.prctl(1, 0) < 0 and (_ for _ in ()).throw(OSError(ctypes.get_errno(), 'prctl'))",
    "keyring": "call(250 if X86 else 219, 0, -3, 0)",
}

# May be refused without the sandbox, too (privileges, kernel settings).
ALWAYS = {
    "io_uring": "call(425, 1, ctypes.create_string_buffer(120))",
    "bpf": "call(321 if X86 else 280, 0, 0, 0)",
    "performance counters": "call(298 if X86 else 241, 0, 0, -1, -1, 0)",
    "page faults": "call(323 if X86 else 282, 0)",
    "namespaces": "call(272 if X86 else 97, 0x10000000)",
    "mount": "call(165 if X86 else 40, b'x', b'/', b'tmpfs', 0, 0)",
    "change root": "os.chroot('.')",
    "become another user": "os.setuid(12345)",
    "read another's memory": "call(310 if X86 else 270, os.getppid(), 0, 0, 0, 0, 0)",
    "raise a limit": "call(PRLIMIT, 0, resource.RLIMIT_AS, (ctypes.c_int64 * 2)(-1, -1), 0)",
    "an unknown system call": "call(1000)",
    "a second filter": "call(317 if X86 else 277, 2, 0, b'1234')",
}


@pytest.mark.parametrize("what", [*ORDINARY, *ALWAYS])
def test_forbidden(what: str, inside: Path) -> None:
    status, said = run({**ORDINARY, **ALWAYS}[what], inside)
    refused = {f"errno {e}" for e in (errno.EPERM, errno.EACCES, errno.EXDEV)}
    assert status == 1 and said.strip() in refused, said
    assert sorted(p.name for p in inside.parent.iterdir()) == ["inside", "outside"]
    assert (inside.parent / "outside").read_text() == "outside"


@pytest.mark.parametrize("what", ORDINARY)
def test_and_it_is_the_sandbox_that_forbids_it(what: str, inside: Path) -> None:
    status, said = run(ORDINARY[what], inside, sandboxed=False)
    assert status == 0, said


ALLOWED = {
    "read and write in the folder": "Path('own').write_text('x'); Path('new').write_text('y'); os.unlink('own')",
    "rename in the folder": "os.rename('own', 'new')",
    "read libraries": "import xml.dom.minidom; ctypes.CDLL('libm.so.6').cos",
    "start threads": "t = threading.Thread(target=lambda: print('ran')); t.start(); t.join()",
    "executable memory": "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)",
    "temporary files": "tempfile.TemporaryFile(dir='.').write(b'x')",
    "clock and entropy": "time.sleep(0.01); os.urandom(8); Path('/dev/urandom').open('rb').read(1)",
    "limits of its own": "resource.getrlimit(resource.RLIMIT_AS)",
}


@pytest.mark.parametrize("what", ALLOWED)
def test_allowed(what: str, inside: Path) -> None:
    status, said = run(ALLOWED[what], inside)
    assert status == 0, said


def test_memory_is_bounded(inside: Path) -> None:
    assert run("bytearray(400 << 20)", inside)[0] == 0
    assert run("bytearray(600 << 20)", inside) == (1, "memory\n")


def test_file_size_is_bounded(inside: Path) -> None:
    status, said = run("Path('own').write_bytes(bytes(2 << 20))", inside)
    assert (status, said.strip()) == (1, f"errno {errno.EFBIG}")
    assert (inside / "own").stat().st_size <= 1 << 20


def test_processor_time_is_bounded(inside: Path) -> None:
    code = "resource.getrlimit(resource.RLIMIT_CPU) == (5, 5) or sys.exit('no limit')"
    assert run(code, inside) == (0, "")
    assert run(code, inside, sandboxed=False)[0] == 1


def test_a_crash_ends_the_process(inside: Path) -> None:
    assert run("os.abort()", inside)[0] == -signal.SIGABRT


BREAKS = {
    "landlock": "sandbox._CREATE_RULESET = 1000",
    "seccomp": "sandbox.platform.machine = lambda: 'mips'",
    "limits": "sandbox.resource.setrlimit = lambda *_: (_ for _ in ()).throw(ValueError('no'))",
}


@pytest.mark.parametrize("part", BREAKS)
@pytest.mark.parametrize("weak", [False, True])
def test_it_fails_closed(part: str, weak: bool, inside: Path) -> None:
    code = f"""
    {BREAKS[part]}
    try:
        print(sandbox.apply(sandbox.Policy(sandbox.system_paths(), inside, 1 << 29, 1 << 20, 5, weak={weak})))
    except sandbox.SandboxUnavailable as error:
        print("unavailable:", error)
    """
    _, said = run(code, inside, sandboxed=False)
    assert said.startswith(f"['{part}']" if weak else f"unavailable: {part}"), said


def test_probe_finds_everything_here() -> None:
    assert sandbox.probe() == {"landlock": True, "seccomp": True, "limits": True}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_it_works_for_an_ordinary_user(inside: Path) -> None:
    """Landlock and seccomp need no privileges. The interpreter may lie in a private home, so it is not read again."""
    code = """
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    policy = sandbox.Policy((Path("/usr/lib"),), Path("/tmp"), 1 << 29, 1 << 20, 5)
    print(sandbox.apply(policy))
    for attempt in (lambda: socket.socket(), lambda: os.listdir("/etc"), os.fork):
        try:
            attempt()
            print("worked")
        except PermissionError:
            print("refused")
    """
    assert run(code, inside, sandboxed=False) == (0, "[]\nrefused\nrefused\nrefused\n")


# The filter of both architectures, run by an interpreter of the BPF instructions that it uses.


def decide(machine: str, number: int, *arguments: int, arch: int | None = None, allow_exec: bool = False) -> int:
    """The filter's return value for a system call, pid 77."""
    program = sandbox._program(machine, pid=77, allow_exec=allow_exec)
    steps = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("iIQ6Q", number, sandbox._AUDIT_ARCH[machine] if arch is None else arch, 0, *words)
    at, accumulator = 0, 0
    while True:
        code, when, otherwise, value = steps[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("I", data, value)
        elif code == 0x06:
            return value
        else:
            true = accumulator == value if code == 0x15 else bool(accumulator & value)
            assert code in (0x15, 0x45)
            at += when if true else otherwise


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000


@pytest.mark.parametrize(
    ("machine", "number", "arguments", "expected"),
    [
        ("x86_64", 0, (), ALLOW),  # read
        ("aarch64", 63, (), ALLOW),
        ("x86_64", 41, (), EPERM),  # socket
        ("aarch64", 198, (), EPERM),
        ("x86_64", 56, (0x3D0F00,), ALLOW),  # clone as pthread_create calls it
        ("x86_64", 56, (17,), EPERM),  # clone as fork calls it
        ("aarch64", 220, (0x3D0F00,), ALLOW),
        ("aarch64", 220, (17,), EPERM),
        ("x86_64", 57, (), EPERM),  # fork
        ("x86_64", 435, (), ENOSYS),  # clone3
        ("aarch64", 435, (), ENOSYS),
        ("x86_64", 59, (), EPERM),  # execve
        ("aarch64", 221, (), EPERM),
        ("x86_64", 234, (77, 78, 6), ALLOW),  # tgkill to itself
        ("x86_64", 234, (1, 1, 9), EPERM),
        ("aarch64", 131, (1, 1, 9), EPERM),
        ("x86_64", 302, (0, 9, 0, 1), ALLOW),  # prlimit64, looking
        ("x86_64", 302, (0, 9, 1, 0), EPERM),
        ("x86_64", 302, (0, 9, 1 << 32, 0), EPERM),
        ("aarch64", 261, (0, 9, 1 << 32, 0), EPERM),
        ("x86_64", 157, (15,), ALLOW),  # prctl: set the thread's name
        ("x86_64", 157, (1,), EPERM),  # prctl: signal at the parent's death
        ("x86_64", 72, (3, 2, 1), ALLOW),  # fcntl: close on exec
        ("x86_64", 72, (3, 8, 1), EPERM),  # fcntl: owner
        ("x86_64", 0x40000000, (), EPERM),  # the x32 numbers
        ("x86_64", 1000, (), EPERM),
    ],
)
def test_the_filter(machine: str, number: int, arguments: tuple[int, ...], expected: int) -> None:
    assert decide(machine, number, *arguments) == expected


def test_the_filter_kills_calls_of_another_architecture() -> None:
    assert decide("x86_64", 0, arch=0x40000003) == KILL  # 32-bit x86, where 0 is restart_syscall
    assert decide("aarch64", 63, arch=sandbox._AUDIT_ARCH["x86_64"]) == KILL


def test_execve_is_for_policies_with_programs() -> None:
    assert decide("x86_64", 59, allow_exec=True) == ALLOW
    assert decide("aarch64", 221, allow_exec=True) == ALLOW
    assert decide("x86_64", 322, allow_exec=True) == EPERM  # execveat


def test_programs_are_the_only_ones_to_be_run(inside: Path) -> None:
    code = """
    true = Path("/bin/true").resolve()
    sandbox.apply(sandbox.Policy(sandbox.system_paths(), inside, 1 << 29, 1 << 20, 5, programs=(true,)))
    try:
        os.execv(sys.executable, ["python", "-c", "print('ran')"])
    except PermissionError:
        print("refused", flush=True)
    os.execv(true, ["true"])
    """
    assert run(code, inside, sandboxed=False) == (0, "refused\n")
