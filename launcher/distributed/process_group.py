"""How this process was started, and its place in the job: rank, world, device, process group.

Owns every read of RANK and related variables, the choice of device, the threads, and the lifetime of the
process group. Importing it imports no torch, so that a bad config is refused before torch is loaded.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.messages import first_line
from launcher.distributed import nccl
from launcher.distributed.last_words import LastWords
from launcher.distributed.torch_build import refuse_missing_kernels, refuse_unusable_driver
from launcher.errors import (
    LauncherError,
    PreemptedError,
    PreflightError,
    StalledError,
    counted,
    described,
    whole_text,
)

TIMED_OUT = re.compile(r"timed out|(wait|application) timeout", re.IGNORECASE)  # in Gloo's words
# Errors of a rank that failed because another one did: of Gloo, NCCL or the store. Matched against the
# error's message only.
OF_ANOTHER = re.compile(
    r"gloo|nccl|DistBackendError|DistNetworkError|DistStoreError|Wait timeout|Broken pipe|"
    r"Application timeout|Connection (closed|reset)",
    re.IGNORECASE,
)
ASSEMBLE_S = 2.0  # between the first and the last rank that give up on a collective
PRINT_S = 0.3
LEADER = 0  # the rank that writes files, and has what is gathered for them
LEAVE_S = 4.0  # for an answer of the store, after this rank has failed

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class LaunchEnv:
    """This process according to torchrun, or a scheduler that sets the same variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0
    run_id: str = "none"
    launched: bool = False  # by a launcher that sets RANK

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> LaunchEnv:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, ...; without RANK this process is alone.

        Raises PreflightError for variables that contradict each other.
        """
        if "RANK" not in environ:
            return cls()
        numbers = {}
        for key, default in (
            ("RANK", None),
            ("WORLD_SIZE", None),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
        ):
            text = environ.get(key, default)
            if text is None or not text.isdecimal():
                raise PreflightError(
                    f"{key}={text!r} in the environment, but RANK is set, so {key} must be a whole number. "
                    "Start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
                )
            numbers[key] = int(text)
        if numbers["RANK"] >= numbers["WORLD_SIZE"]:
            raise PreflightError(
                f"RANK={numbers['RANK']} with WORLD_SIZE={numbers['WORLD_SIZE']}: ranks count from 0."
            )
        return cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_world_size=numbers["LOCAL_WORLD_SIZE"],
            restart_count=numbers["TORCHELASTIC_RESTART_COUNT"],
            run_id=environ.get("TORCHELASTIC_RUN_ID", "none"),
            launched=True,
        )


@dataclass(frozen=True)
class WorkerEnv:
    """One rank's place in a running job. `group` is None for a job of one process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def is_leader(self) -> bool:
        """Whether this rank writes files and console output. Never a reason to skip a collective."""
        return self.rank == LEADER


def is_of_another(error: BaseException) -> bool:
    """Whether an exception, by its class and text, is that of a rank which lost another one."""
    text = f"{type(error).__name__}: {whole_text(error)}"
    return bool(OF_ANOTHER.search(text)) and not nccl.is_own(text)


def open_store(launch: LaunchEnv, timeout_s: float) -> dist.Store | None:
    """The key-value store that the ranks of this launch share; None for one process.

    Under torchrun it is the agent's; under a plain scheduler rank 0 hosts it on MASTER_ADDR:MASTER_PORT and
    waits for no other rank. Keys are private to this attempt of this launch, so a restart never reads keys of
    an earlier attempt. Raises PreflightError, or StalledError where no store answers within the time.
    """
    if launch.world_size == 1:
        return None
    import torch.distributed as dist

    address, port = _meeting_place(launch)
    timeout = timedelta(seconds=timeout_s)
    try:
        if _has_agent_store():
            store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
        elif launch.rank == 0:
            listening = _listening(port)
            store = dist.TCPStore(
                address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening
            )
        else:
            _wait_for_listener(address, port, timeout_s)
            store = dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    except (dist.DistError, OSError) as error:
        raise StalledError(
            f"rank {launch.rank} could not reach rank 0 within {timeout_s:g} s: {first_line(error)} Rank 0 "
            f"was not started, has died, or MASTER_ADDR={address} and MASTER_PORT={port} do not point to it."
        ) from error
    store.set_timeout(timeout)
    return dist.PrefixStore(f"launcher/{launch.run_id}/{launch.restart_count}", store)


def _meeting_place(launch: LaunchEnv) -> tuple[str, int]:
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(key):
            raise PreflightError(f"{key} is not set, so rank {launch.rank} cannot find the others.")
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise PreflightError(f"MASTER_PORT={port!r} in the environment must be a port: 1 to 65535.")
    return os.environ["MASTER_ADDR"], int(port)


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listening(port: int) -> int:
    """Descriptor of a socket for the store, bound here because torch's error is a page of C++ frames."""
    both = _has_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both).detach()
    except OSError as error:
        raise PreflightError(
            f"MASTER_PORT={port} cannot be used on this machine: {os.strerror(error.errno or 0)}. If another "
            "launch uses it, give this one another port, the same on all its ranks."
        ) from error


def _has_ipv6() -> bool:
    """Whether an interface has an address of IPv6: the kernel may support it and be told not to use it."""
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as addresses:
        return socket.has_dualstack_ipv6() and bool(addresses.read())
    return False


def _wait_for_listener(address: str, port: int, timeout_s: float) -> None:
    """In Python, so that a signal ends it. Raises OSError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((address, port), 1.0).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def memory(store: dist.Store | None, launch: LaunchEnv) -> dist.Store | None:
    """A store that outlives an attempt, for keys that a restart must find again.

    Only under torchrun, whose agent keeps its store between attempts, also for a single process.
    """
    import torch.distributed as dist

    if store is None and _has_agent_store():
        store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size))
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return None if store is None else dist.PrefixStore(f"launcher/{launch.run_id}/memory", store)


def claim_first_failure(
    store: dist.Store | None, job: str, rank: int, words: LastWords | None = None
) -> None:
    """Record that this rank failed, before others can notice. The first claim counts.

    Clocks of different machines cannot tell which rank failed first; the store can. On one machine, where
    there are `words`, the store is not used: a rank that has just died may have left it unreadable.
    """
    if words is not None:
        return words.fail(rank)
    if store is None:
        return
    from torch.distributed import DistError

    limit_silence(LEAVE_S)
    with suppress(DistError):  # if the store is gone, the other ranks notice by themselves
        store.compare_set(f"job/{job}/first_failure", "", str(rank))


def limit_silence(seconds: float) -> None:
    """Limit how long the store's machine may stay silent before a store call fails.

    The timeouts of a TCPStore apply to waiting for a key. For the answer to a request it waits as long as the
    kernel retransmits the request to a machine that is gone: a quarter of an hour.
    """
    port = os.environ.get("MASTER_PORT", "")
    for descriptor in map(int, os.listdir("/proc/self/fd") if port else ()):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                _limit_silence(os.dup(descriptor), int(port), seconds)


def _limit_silence(descriptor: int, port: int, seconds: float) -> None:
    """Only if the socket is connected to that port. Closes the descriptor."""
    with socket.socket(fileno=descriptor) as end:
        if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] == port:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                end.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds / 3)))
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def first_failure(store: dist.Store, job: str) -> int | None:
    """The rank that failed first, if any has recorded a failure."""
    key = f"job/{job}/first_failure"
    return int(store.get(key)) if store.check([key]) else None


def failure_of_another(
    store: dist.Store, job: str, rank: int, words: LastWords | None
) -> LauncherError | None:
    """The failure that ended the job, with its rank and exit code, if another rank than `rank` had it.

    Waits briefly for the departure of the rank that failed first. None if there is none.
    """
    from torch.distributed import DistError

    with suppress(DistError, ValueError):
        first = first_failure(store, job) if words is None else words.first_failure()
        if first is None or first == rank:
            return None
        if words is None:
            store.wait([key := f"job/{job}/left/{first}"], timedelta(seconds=ASSEMBLE_S))
            text = store.get(key).decode()
        else:
            text = _awaited(words, first)
        said = json.loads(text)
        if said["error"] and not said["lost"] and said["exit_code"] != PreemptedError.exit_code:
            own = "" if said["shared"] else f"rank {first} failed: "
            failure = LauncherError(f"{own}{said['error']}")
            failure.exit_code, failure.traceback = said["exit_code"], said.get("traceback", "")
            return failure
    return None


def _awaited(words: LastWords, rank: int) -> str:
    """What the rank records as it leaves; empty if it does not within ASSEMBLE_S."""
    deadline = time.monotonic() + ASSEMBLE_S
    while not (text := words.of(rank)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return text


def give_reason(store: dist.Store | None, job: str, rank: int, error: BaseException) -> None:
    """Record why this rank fails, for ranks whose main thread cannot find out: see `reason_of`."""
    if store is None:
        return
    from torch.distributed import DistError

    exit_code = error.exit_code if isinstance(error, LauncherError) else 1
    text = str(error) if isinstance(error, LauncherError) else described(error)
    with suppress(DistError):
        store.set(f"job/{job}/reason/{rank}", json.dumps([text, exit_code]))


def reason_of(store: dist.Store, job: str, rank: int) -> tuple[str, int]:
    """Why a rank that has claimed the first failure failed, and its exit code. Raises DistError."""
    key = f"job/{job}/reason/{rank}"
    if not store.check([key]):
        return f"rank {rank} failed. Its log and its stderr say why.", LauncherError.exit_code
    text, exit_code = json.loads(store.get(key))
    return text if text.startswith("rank ") else f"rank {rank} failed: {text}", exit_code


def leave_word(store: dist.Store, job: str, launch: LaunchEnv, text: str, exit_code: int) -> None:
    """Record, in place of the main thread, that this rank leaves for good and is not to be waited for.

    Returns when all ranks but 0 have done so, or after ASSEMBLE_S. torchrun ends the remaining ranks once the
    first has ended, including rank 0, which might not yet have printed why it failed.
    """
    from torch.distributed import DistError

    limit_silence(LEAVE_S)
    said = {"rank": launch.rank, "time_s": time.time(), "error": text, "exit_code": exit_code}
    said |= {"shared": True, "gone": True, "lost": False}  # the text names the rank at fault
    with suppress(DistError):
        store.set(f"job/{job}/left/{launch.rank}", json.dumps(said))
        store.set(f"heard/{launch.rank}", "")
        others = [f"job/{job}/left/{rank}" for rank in range(1, launch.world_size)]
        store.wait(others, timedelta(seconds=ASSEMBLE_S))
        time.sleep(PRINT_S)


def stall_of(
    error: BaseException, store: dist.Store | None, job: str, launch: LaunchEnv
) -> StalledError | None:
    """The ranks that did not join a collective, if `error` is a timeout; None for other errors.

    Ranks that waited record it in the store; those that have not done so shortly after are the ones that
    hang.
    """
    if store is None or not (isinstance(error, RuntimeError) and TIMED_OUT.search(whole_text(error))):
        return None
    from torch.distributed import DistError

    deadline, missing = time.monotonic() + ASSEMBLE_S, list(range(launch.world_size))
    try:
        store.set(f"job/{job}/gave_up/{launch.rank}", "")
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            missing = [rank for rank in missing if not store.check([f"job/{job}/gave_up/{rank}"])]
    except DistError:
        return StalledError(
            f"rank {launch.rank} waited too long for a collective, and rank 0's machine "
            f"({os.environ.get('MASTER_ADDR')}), which hosts the store, does not answer: that machine, or "
            "the link to it, is gone. launch.stall_s says how long a collective may take."
        )
    if not missing:
        return StalledError("a collective took too long although all ranks joined it: the network stalls.")
    return StalledError(
        f"rank {', '.join(map(str, missing))} did not join a collective in time: it hangs or has been "
        "stopped. launch.stall_s (before the first step launch.init_timeout_s) says how long others wait."
    )


@contextmanager
def join(launch: LaunchEnv, store: dist.Store | None, job: str, timeout_s: float) -> Iterator[WorkerEnv]:
    """Join a job as one rank: bind the device, divide threads, open the process group; always close it.

    `timeout_s` holds until `tighten` shortens it: start-up and compiling may take minutes, a step may not.
    """
    import torch.distributed as dist

    device = _device(launch)
    refuse_unusable_driver(launch.rank, device)
    refuse_missing_kernels(launch.rank, device)
    _refuse_shared_gpu(launch, store, job, device)
    _divide_threads(launch)
    if store is None:
        yield WorkerEnv(0, 1, 0, 1, device, None)
        return
    nccl.prepare(os.environ, one_machine=launch.local_world_size == launch.world_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        # A fresh prefix per job: a second group in one launch would otherwise read the first one's keys.
        store=dist.PrefixStore(f"group/{job}", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    group = dist.group.WORLD
    try:
        yield WorkerEnv(
            launch.rank, launch.world_size, launch.local_rank, launch.local_world_size, device, group
        )
    except BaseException as error:
        _close_after(error, device)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _close_after(error: BaseException, device: torch.device) -> None:
    """Close the group of a rank that fails. What that raises is noted on the error and does not replace it.

    After an error of CUDA every further call of it fails, those that close the group among them.
    """
    import torch.distributed as dist

    # Others may wait in a collective that this rank will never join: a clean shutdown over NCCL would hang.
    abort = dist.distributed_c10d._abort_process_group
    try:
        if dist.is_initialized():
            abort() if device.type == "cuda" else dist.destroy_process_group()
    except Exception as another:
        error.add_note(f"Its process group could not be closed either: {described(another)}")


def tighten(env: WorkerEnv, timeout_s: float) -> None:
    """Set the timeout of collectives from now on."""
    if env.group is not None:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(timedelta(seconds=timeout_s), env.group)


def _device(launch: LaunchEnv) -> torch.device:
    """GPU number `local_rank` of the visible ones, or the only one if a scheduler shows each task its own."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_rank >= count > 1:
        raise PreflightError(
            f"rank {launch.rank} is number {launch.local_rank} on this machine, which has "
            f"{counted(count, 'GPU')}. Start at most {count} processes per machine "
            f"(torchrun --nproc-per-node={count})."
        )
    device = torch.device("cuda", launch.local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _refuse_shared_gpu(launch: LaunchEnv, store: dist.Store | None, job: str, device: torch.device) -> None:
    """Raise PreflightError if another rank uses this rank's GPU: NCCL cannot connect the two.

    Ranks that see one GPU each may see the same or different ones; only the UUID distinguishes these cases.
    """
    if store is None or device.type != "cuda":
        return
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    first = int(store.compare_set(f"job/{job}/gpu/{uuid}", "", str(launch.rank)))
    if first != launch.rank:
        count = torch.cuda.device_count()
        raise PreflightError(
            f"ranks {first} and {launch.rank} use the same GPU ({uuid}); each rank needs its own, and rank "
            f"{launch.rank} sees {counted(count, 'GPU')}. Start at most as many processes per machine as it "
            "has GPUs, and show each process all of them or a different one."
        )


def _divide_threads(launch: LaunchEnv) -> None:
    """Share the cores among the ranks of this machine, unless the user has set OMP_NUM_THREADS."""
    import torch

    if not own_thread_count():
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.local_world_size))


def own_thread_count() -> str:
    """OMP_NUM_THREADS, if it is the user's own; else empty.

    torchrun sets it to 1 for its workers if it is unset. What torchrun itself was started with is in /proc.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return given
    try:
        inherited = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return given if b"OMP_NUM_THREADS=1" in inherited else ""
