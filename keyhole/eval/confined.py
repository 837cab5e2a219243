"""The code inside the process that runs one program of a model (programs.py starts it). It imports no other package.

Before the program runs, the process gives up, one after another, the rights that a function under test does not need:

    namespaces    its own users and network: no interface is up, and root is nobody          where the kernel allows it
    limits        CPU seconds, address space, size of a file, processes, open files; no core dump
    Landlock      files can be written only in the working directory                          Linux 5.13 on
    seccomp       system calls for sockets, processes, threads, signals, priorities or limits of other processes,
                  tracing, mounting, and changes of a file's mode, owner or times fail         x86-64 and arm64
    audit hook    the same once more inside Python, refused by name; on other systems the only protection

The program cannot undo the kernel's restrictions; the audit hook alone could be evaded. Standard output and error are
discarded.

A program passes if it runs to its end: `exit()` in the middle is no success. The parent recognises the end by a random
word. No Python object holds it while the program runs: it waits in the C library's buffer for the parent's file, and
the C library writes it when the process ends regularly. `os._exit` and a signal lose it, and an exception, SystemExit
included, writes FAILED before it. This stops shortcuts, but not a program made to deceive: code in the same process can
forge the verdict, for instance by searching the process's memory. A test can be deceived as well (by an object that
equals everything). Such a program falsifies its score and nothing else.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable
from typing import Any

NEW_USER, NEW_NET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SIGKILL = 1, 4, 22, 38, 9
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, TRUNCATE = 1 << 0, 1 << 1, 1 << 14
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
MAKE_OTHERS = sum(1 << bit for bit in (6, 9, 10, 11, 12))  # devices, sockets, pipes, links
MOST_FILE_BYTES, MOST_FILES, MOST_WRITES = 2**20, 64, 64
FAILED = b"failed: "

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: the call's numbers on x86-64 and on arm64 (None: does not exist)
DENIED = {
    # sockets, processes, tracing, shared queues
    "socket": (41, 198), "socketpair": (53, 199), "clone": (56, 220), "fork": (57, None), "vfork": (58, None),
    "clone3": (435, 435), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "bpf": (321, 280),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "kcmp": (312, 272), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218),
    # signals to other processes, and their priority, cores and memory
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "setpgid": (109, 154), "setsid": (112, 157),
    # mounts and namespaces
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51),
    "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # owner, mode, times and attributes of a file, which a read-only descriptor can change; locks; flushes
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469), "mknod": (133, None),
    "mknodat": (259, 33), "flock": (73, 32), "sync": (162, 81), "syncfs": (306, 267),
}  # fmt: skip
# calls that are allowed with some values of one argument: numbers, index of the argument, values
LIMITED = {
    "prlimit64": ((302, 261), 0, (0,)),  # only for the process itself
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 1030)),  # duplicates and flags; no locks, leases, or signals to an owner
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)),  # terminal queries, and close-on-exec
}
MOST_CALLS = 512  # larger numbers are the x32 calls of x86-64
REFUSED = (
    "socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill",
    "os.symlink", "os.link", "os.chdir", "os.fchdir", "os.chmod", "os.chown", "os.lchown", "os.utime", "os.setxattr",
    "os.removexattr", "os.startfile", "os.setpriority", "os.nice", "resource.prlimit", "fcntl.", "pty.", "mmap.",
    "signal.pthread_kill", "sys.addaudithook", "syslog.", "webbrowser.", "_thread.start_new_thread",
)  # fmt: skip
WRITERS = ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.truncate", "shutil.")


def confine(directory: str, seconds: float, memory_bytes: int) -> None:
    """Applies all restrictions that the kernel supports."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_FSIZE, MOST_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MOST_FILES),
        (resource.RLIMIT_AS, memory_bytes),
        (getattr(resource, "RLIMIT_NPROC", resource.RLIMIT_CORE), 0),
    ):
        try:
            resource.setrlimit(number, (most, most))
        except (ValueError, OSError):
            pass  # macOS has no limit on the address space
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if libc.unshare(NEW_USER | NEW_NET) != 0:
            libc.unshare(NEW_NET)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # /proc/self/mem then belongs to root
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _landlock(libc, directory)
        _seccomp(libc)


def _landlock(libc: ctypes.CDLL, directory: str) -> None:
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return
    writes = WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | (TRUNCATE if version >= 3 else 0)
    rules = libc.syscall(LANDLOCK_CREATE, struct.pack("=Q", writes | MAKE_OTHERS | EXECUTE), 8, 0)
    for path, allowed in ((directory, writes), (os.devnull, writes & (WRITE_FILE | TRUNCATE))):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, place), 0)
        os.close(place)
    libc.syscall(LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _seccomp(libc: ctypes.CDLL) -> None:
    """A filter that returns EPERM for the system calls above, and ends a process of another architecture."""
    machine = platform.machine()
    if machine not in ARCH:
        return
    column = list(ARCH).index(machine)
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    code = [(load, 0, 0, 4), (equal, 1, 0, ARCH[machine]), (give, 0, 0, kill), (load, 0, 0, 0)]
    for numbers, argument, values in LIMITED.values():
        code += [(equal, 0, len(values) + 3, numbers[column]), (load, 0, 0, 16 + 8 * argument)]
        code += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)]
        code += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    denied = [number for numbers in DENIED.values() if (number := numbers[column]) is not None]
    code.append((above, len(denied) + 1, 0, MOST_CALLS))
    code += [(equal, len(denied) - i, 0, number) for i, number in enumerate(denied)]
    code += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(instructions))
    libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0)


def hook(directory: str) -> Callable[[str, tuple[object, ...]], None]:
    """The audit hook: PermissionError for operations that a function under test does not need."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    left = [MOST_WRITES]

    def is_inside(path: object) -> bool:
        text = path.decode("utf-8", "replace") if isinstance(path, bytes) else path if isinstance(path, str) else None
        if text is None:
            return path is None or isinstance(path, int)  # an open descriptor
        return ".." not in text.split("/") and (not text.startswith("/") or f"{text}/".startswith(f"{directory}/"))

    def watch(event: str, args: tuple[object, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is refused")
        if event == "open" and isinstance(args[0], str | bytes) and os.fsdecode(args[0]).startswith("/proc"):
            raise PermissionError(f"opening {args[0]!r:.80} is refused")
        creates = event == "open" and isinstance(args[2], int) and args[2] & writing and args[0] != os.devnull
        if creates or event == "os.mkdir":
            left[0] -= 1
            if not is_inside(args[0]) or left[0] < 0:
                raise PermissionError(f"writing to {args[0]!r:.80} is refused")
        elif event.startswith(WRITERS) and not all(is_inside(arg) for arg in args if isinstance(arg, str | bytes)):
            raise PermissionError(f"{event} is refused")

    return watch


def received() -> tuple[dict[str, Any], int]:
    """Reads the job from standard input, and returns it with the file that was standard output. The end mark goes into
    the C library's buffer for that file, and is written when the process ends by `exit`."""
    with os.fdopen(os.dup(0), "rb") as given:
        job = json.load(given)
    verdict, nothing, libc = os.dup(1), os.open(os.devnull, os.O_RDWR), ctypes.CDLL(None)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    libc.fdopen.restype = ctypes.c_void_p
    libc.fputs(job.pop("done").encode(), ctypes.c_void_p(libc.fdopen(verdict, b"w")))
    return job, verdict


def main() -> None:
    """Runs the job. Returning ends the process by `exit`, which signals that the program ran to its end."""
    job, verdict = received()
    directory = os.path.realpath(os.getcwd())
    confine(directory, job["seconds"], job["memory_bytes"])
    sys.addaudithook(hook(directory))
    write, leave, everything = os.write, os._exit, BaseException  # the program may replace them
    try:
        exec(compile(job["source"], "<program>", "exec", dont_inherit=True), {"__name__": "__main__"})
    except everything as error:
        write(verdict, FAILED)  # first: the rest calls methods of the program's exception
        try:
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            write(verdict, said[:300].encode("utf-8", "replace"))
        finally:
            leave(0)


if __name__ == "__main__":
    main()
