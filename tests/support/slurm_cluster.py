"""A real Slurm on this machine: a controller and two virtual nodes.

`Cluster` starts slurmctld, two slurmd and munged in a folder of their own, and stops
exactly those; nothing outside the folder is read or changed. As a program,
`python tests/support/slurm_cluster.py`, this installs what it needs (Debian, as root).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import launching

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge", "libpmix2"]
NODES = ("node1", "node2")
ENDED = {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
SECONDS = 600  # ends true hangs only

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
# Credentials live briefly, because a job that is requeued waits until its have expired
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
# Each node has its own, where PMIx keeps the files of a step
TmpFS={folder}/tmp.%n
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=5
# Nodes may have more processors than the machine
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=10
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 "
    "RealMemory=1000 Gres=gpu:2 State=UNKNOWN"
)
# Any device file counts as a GPU: what is tested is which numbers ranks are told
GPUS = "NodeName=node[1-2] Name=gpu File=/dev/tty[0-1]\n"
# Messages of ranks take the loopback, and libraries look for no faster network
LOOPBACK = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_osc": "^ucx",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "lo",
}


def what_is_missing() -> str | None:
    """Return why no Slurm can be started here, or None."""
    if os.geteuid() != 0:
        return "a Slurm of several nodes needs root"
    programs = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        return (
            f"{', '.join(missing)} not installed; `python tests/support/"
            "slurm_cluster.py` installs Slurm on Debian, as root"
        )
    return None


def install() -> str | None:
    """Install Slurm with apt-get. Return why that cannot be done, or None."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    if what_is_missing() or not list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so.2")):
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        options = ["-y", "-qq", "--no-install-recommends"]
        for command in (["update", "-qq"], ["install", *options, *PACKAGES]):
            ended = subprocess.run(
                ["apt-get", *command], capture_output=True, text=True, env=quiet
            )
            if ended.returncode != 0:
                return f"apt-get {command[0]} failed: {ended.stderr.strip()[-500:]}"
    # Slurm's plugin asks for the name that only the development package has
    for library in Path("/usr/lib").glob("*/pmix2/lib/libpmix.so.2"):
        if not library.with_suffix("").exists():
            library.with_suffix("").symlink_to(library.name)
    return what_is_missing()


@dataclasses.dataclass
class Cluster:
    """A Slurm of two nodes with 8 processors and 2 GPUs each; used with `with`."""

    folder: Path = dataclasses.field(init=False)

    def __enter__(self) -> Cluster:
        # Not in pytest's folder: munge wants folders that every user may pass
        self.folder = Path(tempfile.mkdtemp(prefix="mpidist-slurm-"))
        self.folder.chmod(0o755)
        try:
            self._configure()
            self._start()
        except BaseException:
            print(self.logs(), file=sys.stderr)
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which Slurm's commands find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), **LOOPBACK}

    def _configure(self) -> None:
        ports = _free_ports(1 + len(NODES))
        nodes = [
            NODE.format(name=name, port=port)
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        text = CONFIGURATION.format(
            folder=self.folder, controller_port=ports[0], nodes="\n".join(nodes)
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(GPUS)
        (self.folder / "mpi.conf").write_text("PMIxEnv=PMIX_MCA_psec=native\n")
        for name in (
            "state",
            *(f"{kind}.{n}" for kind in ("spool", "tmp") for n in NODES),
        ):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _start(self) -> None:
        files = {"pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self.run(
            "munged",
            "--force",  # even if a folder above is one that others may write to
            f"--socket={self.folder}/munge.socket",
            f"--key-file={self.folder}/munge.key",
            *(f"--{name}={self.folder}/munged.{end}" for name, end in files.items()),
        )
        self.run("slurmctld")
        for node in NODES:
            # PMIx takes nodes of one name for one node
            self.run("slurmd", "-N", node, PMIX_HOSTNAME=node)
        self.wait_for(
            lambda: (
                self.run("sinfo", "-h", "-N", "-o", "%t").split()
                == ["idle"] * 2 * len(NODES)
            ),
            "both nodes are idle",
        )

    def stop(self) -> None:
        """End the daemons, and all that runs in jobs; remove the folder."""
        if (self.folder / "slurmctld.pid").exists():
            with contextlib.suppress(AssertionError):
                self.run("scancel", "--user=root")
                self.wait_for(lambda: not self.run("squeue", "-h"), "no job is left")
        names = ["slurmctld", *(f"slurmd.{node}" for node in NODES), "munged"]
        _end([self.folder / f"{name}.pid" for name in names])
        shutil.rmtree(self.folder)

    def logs(self) -> str:
        """Return the last lines that each daemon wrote."""
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """Run a command of Slurm's; return what it printed, or fail with its errors."""
        ended = self.start(command, cwd, environment)
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def start(
        self,
        command: Sequence[str],
        cwd: Path | None = None,
        environment: Mapping[str, str] = {},
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's; return how it ended. Daemons go on."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            # No pipes: daemons would keep them open
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env=launching.clean_environment() | self.environment | environment,
                timeout=SECONDS,
            ).returncode
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    def srun(
        self, *command: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a job of one step; the options of srun come first."""
        return self.start(["srun", "--immediate=300", *command], None, environment)

    def wait_for(
        self, condition: Callable[[], object], what: str, seconds: float = SECONDS
    ) -> None:
        """Return when `condition` holds; fail if it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not so: {what}\n{self.logs()}"
            time.sleep(0.05)

    def submit(self, *arguments: str, cwd: Path, **environment: str) -> Job:
        """Submit a batch job whose output goes to a file in `cwd`."""
        options = ["--parsable", "--output=%j.out"]
        out = self.run("sbatch", *options, *arguments, cwd=cwd, **environment)
        return Job(self, out.strip(), cwd)


@dataclasses.dataclass
class Job:
    """A batch job that was submitted."""

    cluster: Cluster
    number: str
    folder: Path

    @property
    def output(self) -> str:
        """What the job has written so far."""
        path = self.folder / f"{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def describe(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        text = self.cluster.run("scontrol", "show", "job", self.number)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    @property
    def state(self) -> str:
        """Slurm's name of the state."""
        return self.describe()["JobState"]

    def wait(self) -> dict[str, str]:
        """Return the fields of the job when it has ended."""
        self.wait_until(lambda: self.state in ENDED, "the job has ended")
        return self.describe()

    def wait_for_output(self, text: str, count: int = 1) -> None:
        """Return when the job has written `text` so many times."""
        self.wait_until(
            lambda: self.output.count(text) >= count or self.state in ENDED,
            f"{count} times {text!r} written",
        )
        assert self.output.count(text) >= count, self.output

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Return when `condition` holds; fail, and show the job's output, if not."""
        try:
            self.cluster.wait_for(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None


def _free_ports(count: int) -> list[int]:
    """Return numbers of ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _end(pid_files: Sequence[Path]) -> None:
    """End the processes whose numbers are in files, and wait until they have gone."""
    pids = []
    for path in pid_files:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pids.append(int(path.read_text()))
            os.kill(pids[-1], signal.SIGTERM)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            for _ in range(200):
                os.kill(pid, 0)
                time.sleep(0.05)
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    reason = install()
    sys.exit(f"Slurm cannot be installed: {reason}" if reason else None)
