"""What takes rights from a process before untrusted code runs in it: namespaces, mounts, users, resource limits.

Linux; standard library only. Each is used where the kernel allows it; `supervisor` copes without any of them.
"""

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Collection
from pathlib import Path

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2 | 4, 8, 1 << 12, 1 << 14, 1 << 18
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 24, 38, 47, 2
_CAPABILITY_VERSION_3, _READ_ALL = 0x20080522, 2
_TO_CHANGE_USER = 1 << 0 | 1 << 6 | 1 << 7 | 1 << 8
"""CAP_CHOWN, CAP_SETGID, CAP_SETUID and CAP_SETPCAP, the last to drop the others."""
_FIRST_UID = 0x70000000
"""Far above the accounts of any machine. Every run gets a user of its own, so that a limit of processes, which the
kernel keeps per user, counts that run alone."""
_SCRATCH_MB = 64
_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> bool:
    """Puts the children to come into namespaces of their own without a network; False where that is not allowed.

    The first child is the parent of all: when it ends, the kernel kills the rest.
    """
    flags = _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    if os.geteuid() == 0:
        return bool(_libc.unshare(flags) == 0)
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(flags | _NEWUSER):
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True


def seal(keep: Collection[str], uid: int | None, hidden: str | None) -> bool:
    """Makes all files read-only for this process and its children, but for an empty /tmp; False where not allowed.

    `keep` are folders that stay visible where they are. `uid` is the user to come: what stands between it and `keep`
    is replaced by empty folders, home folders above all. So is `hidden`.
    """
    if _libc.unshare(_NEWNS) or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    owner = "" if uid is None else f",uid={uid},gid={uid}"
    covers = {"/tmp": f"mode=0700,size={_SCRATCH_MB}m,nr_inodes=8192{owner}"}
    closed = [closed_to_others(path) for path in keep] if uid is not None else []
    for folder in filter(None, [*closed, hidden]):
        if not any(f"{folder}/".startswith(f"{cover}/") for cover in covers):  # else it is gone already
            covers[folder] = "mode=0755,size=1m"
    kept = {path: os.open(path, os.O_PATH) for path in sorted(map(os.path.realpath, keep))}
    os.umask(0o022)
    for cover, options in covers.items():
        _mount(b"tmpfs", cover, _MS_NOSUID_NODEV, options)
    for path, handle in kept.items():
        if any(path.startswith(cover + "/") for cover in covers):
            os.makedirs(path, exist_ok=True)  # noqa: PTH103
            _mount(f"/proc/self/fd/{handle}".encode(), path, _MS_BIND | _MS_REC)
    # Kernels before 5.12 cannot do it at once; what the program does not own is closed to it there all the same.
    _read_only("/", recursive=True)
    _read_only("/tmp", on=False)
    if _libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID_NODEV | _MS_NOEXEC, None):
        _mount(b"tmpfs", "/proc", _MS_NOSUID_NODEV | _MS_NOEXEC)
    return True


def _mount(source: bytes, target: str, flags: int, options: str = "") -> None:
    if _libc.mount(source, os.fsencode(target), b"tmpfs", flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"cannot mount {target}")


def _read_only(path: str, *, on: bool = True, recursive: bool = False) -> None:
    change = (ctypes.c_uint64 * 4)(_ATTR_RDONLY * on, _ATTR_RDONLY * (not on), 0, 0)
    flags = _AT_RECURSIVE * recursive
    _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, change, 32)


def closed_to_others(path: str) -> str | None:
    """The topmost folder on the way to `path` that other users may not enter, None if they may enter all."""
    parts = os.path.realpath(path).split("/")
    for end in range(2, len(parts) + 1):
        folder = "/".join(parts[:end])
        if not os.stat(folder).st_mode & 0o001:  # noqa: PTH116
            return folder
    return None


def spare_user() -> int | None:
    """A user that nobody else is while this process lives; None unless we may become it."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if os.geteuid() != 0 or _TO_CHANGE_USER & ~int(status["CapEff"], 16):
        return None
    uid = _FIRST_UID + os.getpid()
    mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return uid if any(first <= uid < first + count for first, _, count in mapped) else None


def most_processes(wanted: int, *, alone: bool) -> int:
    """Where the kernel shall refuse to fork: a little above `wanted`, so that it is the supervisor that ends it.

    Threads count as well. If the program is not `alone` in what the kernel counts, all that its user runs is added.
    """
    others = 0
    if not alone:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                others += len(list((process / "task").iterdir())) if process.stat().st_uid == os.getuid() else 0
        others += 512  # what they may start meanwhile
    return others + 2 * wanted + 64


def counted_by_namespace() -> bool:
    """Whether the kernel counts the processes of each user namespace by themselves, which it does since 5.14."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


def limit_resources(*, seconds: float, memory_mb: int, processes: int) -> None:
    """Limits that the kernel holds for each process by itself. They lie above those that the supervisor watches.

    So that passing a limit is told as such, and not as an error of some call inside the program.
    """
    limits = {
        resource.RLIMIT_AS: memory_mb * 2 * 2**20 + 2**30,
        resource.RLIMIT_CPU: int(seconds + 2) * (os.cpu_count() or 1),
        resource.RLIMIT_FSIZE: _SCRATCH_MB * 2**20,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (least, least))


def drop_rights(uid: int | None, *, may_read_all: bool) -> None:
    """Becomes `uid` for good, where there is one. No right comes back, not by a program that has the setuid bit.

    With `may_read_all` it keeps the right to read what it does not own, for an interpreter in a closed home folder.
    """
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    kept = _READ_ALL if may_read_all and uid is not None else None
    for capability in range(64):
        if capability != kept:
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if uid is not None:
        _libc.prctl(_PR_SET_KEEPCAPS, kept is not None, 0, 0, 0)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if kept is not None:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        sets = (ctypes.c_uint32 * 6)(*[1 << kept] * 3, 0, 0, 0)
        if _libc.capset(header, sets) or _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, kept, 0, 0):
            raise OSError(ctypes.get_errno(), "cannot keep the right to read the interpreter")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps what is ignored
        signal.signal(number, signal.SIG_DFL)
