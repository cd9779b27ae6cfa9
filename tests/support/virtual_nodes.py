r"""Virtual nodes: Linux namespaces on one machine, joined by a network of TCP alone.

    python tests/support/virtual_nodes.py --nodes 2 --ranks-per-node 2 --rate 1gbit \
        -- script.py ARGUMENT...

Each node has its own network interface, host name, processes, IPC, mounts, /dev/shm and
TMPDIR, so ranks on different nodes cannot share memory. Other folders are shared, until
`hide` mounts an empty one over one node's. A switch joins the nodes by cables of
limited bandwidth, which can be cut and mended; a node can be lost with all its
processes.

Everything lives in namespaces, which end with their first process, and that ends with
this one, however this one ends: nothing has to be cleaned up. Needs root and iproute2;
`python tests/support/virtual_nodes.py --install` installs the latter on Debian.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import launching

_PACKAGE = "iproute2"
_FUSE_PACKAGE = "bindfs"  # for `Node.delay_names`
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
_REMOTE_SHELL = Path(__file__).with_name("remote_shell.py")
_DELAYED_CABLES = Path(__file__).with_name("delayed_cables.py")
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
# Launchers name files of their daemons by process numbers, which nodes may share
_TMPDIR = {"TMPDIR": "/run/tmp"}
_SECONDS = launching.HANG_SECONDS  # ends true hangs only

# $1 is the host name, $2 the text of /etc/hosts, $3 and $4 start the remote shell. The
# process's own number is read before /proc becomes that of the node
_START_NODE = """\
set -e
read pid rest < /proc/self/stat
hostname "$1"
mount -t proc proc /proc
mount -t tmpfs -o size=2g shm /dev/shm
mount -t tmpfs run /run
printf %s "$2" > /run/hosts
mount --bind /run/hosts /etc/hosts
rm /run/hosts
mkdir /run/tmp
# TCP gives up on a silent node after 25 s, not after 15 minutes: so long Open MPI's
# launcher waits for a node that is lost
echo 6 > /proc/sys/net/ipv4/tcp_retries2
exec "$3" -I -S "$4" --serve "$pid"
"""
_START_SWITCH = (
    "ip link add switch type bridge && ip link set switch up && echo 0 && cat"
)
_IN_FOLDER = 'cd "$1" && shift && exec "$@"'


def what_is_missing() -> str | None:
    """Return why there can be no virtual nodes here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "virtual nodes need Linux and root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return (
            f"{', '.join(missing)} not installed; `python tests/support/"
            f"virtual_nodes.py --install` installs {_PACKAGE} on Debian, as root"
        )
    ended = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "true"], capture_output=True, text=True
    )
    return ended.stderr.strip() or None  # containers may be forbidden to


def install() -> str | None:
    """Install what is missing with apt-get. Return why that cannot be done, or None."""
    if what_is_missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", _PACKAGE]):
            subprocess.run(["apt-get", *command], check=True)
    if os.path.exists("/dev/fuse") and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "-qq", _FUSE_PACKAGE])
    return what_is_missing()


def can_delay_names() -> bool:
    """Return whether `Node.delay_names` works here."""
    return os.path.exists("/dev/fuse") and shutil.which("bindfs") is not None


@dataclasses.dataclass
class Node:
    """A node that runs.

    Args:
      name: of the host.
      address: in the virtual network.
      pid: of its first process, as numbered outside the node.
      process: whose end ends it.
    """

    name: str
    address: str
    pid: int
    process: subprocess.Popen[str]

    def command(self, *command: str, folder: Path | None = None) -> list[str]:
        """Return a command line that runs a command on the node, in a folder."""
        enter = ["nsenter", f"--target={self.pid}", *_NAMESPACES]
        folder = folder or Path.cwd()
        return [*enter, "sh", "-c", _IN_FOLDER, "sh", str(folder), *command]

    def run(self, *command: str) -> str:
        """Run a command on the node; return what it printed, or fail."""
        return _run(*self.command(*command, folder=Path("/")))

    def hide(self, folder: Path) -> None:
        """Mount an empty file system over a folder that the nodes have shared."""
        self.run("mount", "-t", "tmpfs", "own", str(folder))

    def delay_names(self, folder: Path, seconds: int) -> None:
        """Let the node remember for a while which names a folder has, and has not.

        As NFS does: files of other nodes appear late, and removed ones stay. What is
        in the folder is shared, through a file system in user space.
        """
        kept = ("entry_timeout", "negative_timeout", "attr_timeout")
        options = ",".join(f"{name}={seconds}" for name in kept)
        self.run("bindfs", "-o", options, str(folder), str(folder))

    @property
    def root(self) -> Path:
        """The node's root directory, as seen from outside."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def processes(self) -> list[str]:
        """The command lines of the node's processes, but for the first one."""
        found = []
        for process in (self.root / "proc").glob("[0-9]*"):
            if process.name == "1":
                continue
            with contextlib.suppress(OSError):
                text = (process / "cmdline").read_bytes()
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                # A zombie has no command line, nor has for a moment a process that
                # starts another program
                if text or state != "Z":
                    found.append(text.replace(b"\0", b" ").decode(errors="replace"))
        return found

    def wait_until_idle(self) -> None:
        """Return when no process is left on the node; fail if some stay."""
        end = time.monotonic() + _SECONDS
        while self.processes:
            assert time.monotonic() < end, f"{self.name} still runs {self.processes}"
            time.sleep(0.05)

    def kill(self, text: str) -> None:
        """Kill the node's processes in whose command line there is a text."""
        self.run("pkill", "--signal=KILL", "--full", text)

    @property
    def shared_memory(self) -> list[str]:
        """The names of the files in the node's /dev/shm."""
        return sorted(os.listdir(self.root / "dev/shm"))

    @property
    def temporary_files(self) -> list[str]:
        """The files in the node's TMPDIR."""
        folder = self.root / "run/tmp"
        return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))

    def end(self) -> None:
        """Kill all processes of the node at once; return when they have ended."""
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # the kernel kills the others
        self.process.communicate()


class VirtualNodes:
    """Nodes of one network; used with `with`.

    Args:
      count: how many.
      rate: of each cable, in each direction, in the words of tc, like "1gbit"; None
        for as much as the machine carries.
      delay_seconds: how long a packet takes through a cable, two of which are between
        two nodes. See `delayed_cables`.
      burst: what passes a cable at once after a pause, in the words of tc.
      buffer: what can wait in front of a cable; more is lost.
    """

    def __init__(
        self,
        count: int,
        rate: str | None = None,
        delay_seconds: float = 0.0,
        burst: str = "256kb",
        buffer: str = "6mb",
    ):
        self._count = count
        self._rate = rate
        self._delay_seconds = delay_seconds
        self._burst = burst
        self._buffer = buffer
        self._held = contextlib.ExitStack()
        self._switch = 0
        self.nodes: list[Node] = []

    def __enter__(self) -> VirtualNodes:
        with contextlib.ExitStack() as held:
            process, _ = _begin(["unshare", "--net", "sh", "-c", _START_SWITCH])
            held.callback(process.communicate)  # which ends its input
            self._switch = process.pid
            if self._delay_seconds:
                cables = [sys.executable, "-I", "-S", str(_DELAYED_CABLES)]
                numbers = [str(self._count), str(self._delay_seconds)]
                process, _ = _begin([*self._at_switch, *cables, *numbers])
                held.callback(process.communicate)
            addresses = [f"10.77.0.{10 + number}" for number in range(self._count)]
            hosts = "127.0.0.1 localhost\n" + "".join(
                f"{address} node{i}\n" for i, address in enumerate(addresses)
            )
            for number, address in enumerate(addresses):
                node = _start_node(f"node{number}", address, hosts)
                held.callback(node.end)
                self.nodes.append(node)
                self._connect(number, node)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _connect(self, number: int, node: Node) -> None:
        """Put a cable between the switch and a node."""
        port, inside = f"port{number}", f"eth0 netns {node.pid}"
        cable = f"link add {port} type veth peer name {inside}"
        if self._delay_seconds:
            cable = f"link set wire{number} name {inside}"
        self._in_switch(cable, f"link set {port} master switch up")
        enter = ["nsenter", f"--target={node.pid}", "--net"]
        links = f"addr add {node.address}/24 dev eth0\nlink set eth0 up\nlink set lo up"
        _run(*enter, "ip", "-batch", "-", text=links)
        if self._rate is not None:
            limit = ["root", "tbf", "rate", self._rate, "burst", self._burst]
            limit += ["limit", self._buffer]
            _run(*enter, "tc", "qdisc", "add", "dev", "eth0", *limit)
            _run(*self._at_switch, "tc", "qdisc", "add", "dev", port, *limit)

    @property
    def _at_switch(self) -> list[str]:
        return ["nsenter", f"--target={self._switch}", "--net"]

    def _in_switch(self, *commands: str) -> None:
        _run(*self._at_switch, "ip", "-batch", "-", text="\n".join(commands))

    @property
    def running(self) -> list[Node]:
        """The nodes that are not lost."""
        return [node for node in self.nodes if node.process.poll() is None]

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    def cut(self, number: int) -> None:
        """Pull the cable of a node."""
        self._in_switch(f"link set port{number} down")

    def mend(self, number: int) -> None:
        """Plug the cable of a node in again."""
        self._in_switch(f"link set port{number} up")

    def lose(self, number: int) -> None:
        """End a node as a power failure does: nobody is told of it."""
        self.cut(number)
        self[number].end()

    def mpirun(
        self,
        ranks_per_node: int,
        script: str,
        *arguments: str,
        options: Sequence[str] = (),
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python script on all nodes; return how it ended.

        Args:
          ranks_per_node: how many.
          script: a path, or the text of one if it holds a newline.
          arguments: of the script.
          options: of mpirun.
          environment: variables for mpirun and all ranks.
        """
        code = ["-c", script] if "\n" in script else [script]
        command = [sys.executable, *code, *arguments]
        return self.start(ranks_per_node, command, options, **environment).wait()

    def start(
        self,
        ranks_per_node: int,
        command: Sequence[str],
        options: Sequence[str] = (),
        echo: bool = False,
        **environment: str,
    ) -> Job:
        """Start a command on all nodes, by mpirun on the first one."""
        launch = self._launch(ranks_per_node, environment)
        ranks = str(self._count * ranks_per_node)
        mpirun = [*launch, *options, "-n", ranks, *command]
        # Launchers find their daemons, and this Python, by PATH
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return Job(
            self[0].command(*mpirun), _TMPDIR | {"PATH": path, **environment}, echo
        )

    def _launch(self, ranks_per_node: int, names: Iterable[str]) -> list[str]:
        """Return the command line of mpirun, but for the number of ranks."""
        mpirun, *_ = launching.mpirun_command(1)
        hosts = [node.name for node in self.nodes]
        if not launching.is_open_mpi():
            shell = ["-launcher", "ssh", "-launcher-exec", str(_REMOTE_SHELL)]
            layout = ["-hosts", ",".join(hosts), "-ppn", str(ranks_per_node)]
            return [mpirun, *shell, *layout]
        slots = ",".join(f"{host}:{ranks_per_node}" for host in hosts)
        exported = [word for name in names for word in ("-x", name)]
        return [
            *(mpirun, "--prtemca", "plm_ssh_agent", str(_REMOTE_SHELL)),
            *("--host", slots, "--map-by", f"ppr:{ranks_per_node}:node"),
            *("--bind-to", "none", "-x", "PATH", *exported),
        ]


class Job:
    """A command that runs on nodes. What it prints, errors too, is read at once.

    Args:
      command: which runs here.
      environment: variables for it.
      echo: whether to print here what it prints, too.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], echo: bool
    ):
        self._echo = echo
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=launching.clean_environment() | environment,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._is_over = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if self._echo:
                    print(line, end="", flush=True)
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @property
    def output(self) -> str:
        """What the job has printed so far."""
        return "".join(self._lines)

    def wait_for(self, text: str, count: int = 1) -> None:
        """Return when the job has printed `text` so many times; fail if it does not."""

        def is_there() -> bool:
            return self.output.count(text) >= count

        with self._changed:
            self._changed.wait_for(lambda: is_there() or self._is_over, _SECONDS)
        assert is_there(), f"not {count} times {text!r}:\n{self.output}"

    def wait(
        self, seconds: float | None = _SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Return how the job ended; end it, and fail, if it lasts longer."""
        process = self._process
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(
                f"{process.args} still ran after {seconds} s:\n{self.output}"
            ) from None
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, _SECONDS)
        return subprocess.CompletedProcess(
            process.args, process.returncode, self.output, ""
        )


def _start_node(name: str, address: str, hosts: str) -> Node:
    shell = [sys.executable, str(_REMOTE_SHELL)]
    command = ["sh", "-c", _START_NODE, "sh", name, hosts, *shell]
    unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child"]
    process, pid = _begin([*unshare, *command])
    return Node(name, address, pid, process)


def _begin(command: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """Start a process that namespaces need; return it, and the number it prints.

    It ends at the end of its input, so with this process at the latest.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=launching.clean_environment() | _TMPDIR,
        start_new_session=True,  # a Ctrl-C is for this process alone
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.strip().isdecimal():
        process.terminate()
        raise OSError(f"no virtual nodes can be made: {line}{process.stdout.read()}")
    return process, int(line)


def _run(*command: str, text: str | None = None) -> str:
    ended = subprocess.run(command, input=text, capture_output=True, text=True)
    if ended.returncode:
        raise OSError(f"{' '.join(command)}: {ended.stdout}{ended.stderr}")
    return ended.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--install", action="store_true", help="what virtual nodes need, and end")
    add("--nodes", type=int, default=2)
    add("--ranks-per-node", type=int, default=1)
    add("--rate", help="of each cable, as tc writes it: 1gbit")
    add("--delay", type=float, default=0.0, help="seconds that a cable takes")
    add("command", nargs="*", metavar="ARGUMENT", help="a Python script and its own")
    options = parser.parse_args(arguments)
    missing = install() if options.install else what_is_missing()
    if missing or options.install:
        print(missing or "virtual nodes can be made", file=sys.stderr)
        return int(missing is not None)
    if not options.command:
        parser.error("a Python script is missing")
    with VirtualNodes(options.nodes, options.rate, options.delay) as nodes:
        command = [sys.executable, *options.command]
        job = nodes.start(options.ranks_per_node, command, echo=True)
        return job.wait(None).returncode


if __name__ == "__main__":
    sys.exit(main())
