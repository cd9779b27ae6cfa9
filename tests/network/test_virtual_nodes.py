"""What the tests over several nodes stand on: nodes are apart, and leave nothing."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import launching
import pytest
import virtual_nodes

PROGRAM = virtual_nodes.__file__
WAITING = """
import sys
import virtual_nodes

with virtual_nodes.VirtualNodes(2) as nodes:
    pids = [node.pid for node in nodes.nodes]
    job = nodes.start(1, [sys.executable, "-c", "import time; time.sleep(1000)"])
    for node in nodes.nodes:
        print(node.pid, flush=True)
    job.wait()
"""

# Written at once, so that lines of ranks do not mix
WHERE = """
import os, sys
os.write(1, f"{os.uname().nodename} {sys.argv[1]}\\n".encode())
"""

# A copy of the process stays. It does not run another program, so its command line
# is there as soon as it is; where a shell starts one, there is none for a moment.
STAYS = """
import os, time
if not os.fork():
    os.closerange(0, 3)
    time.sleep(1000)
"""

# The shortest time, in microseconds, from tcp_info of linux/tcp.h
ROUND_TRIP = """
import socket, struct
connection = socket.create_connection(("node1", 514))
info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 152)
print(struct.unpack_from("I", info, 148)[0])
"""


def test_each_node_has_its_own_name_memory_and_processes(network):
    nodes = network(2)
    first, second = nodes.nodes
    assert first.run("hostname") == "node0\n"
    assert second.run("hostname") == "node1\n"
    first.run("touch", "/dev/shm/of-node-0", "/run/tmp/of-node-0")
    assert first.shared_memory == first.temporary_files == ["of-node-0"]
    assert second.shared_memory == second.temporary_files == []
    first.run(sys.executable, "-I", "-c", STAYS)
    assert first.processes == [f"{sys.executable} -I -c {STAYS} "]
    assert second.processes == []


def test_a_folder_is_shared_until_it_is_hidden(network, tmp_path):
    nodes = network(2)
    nodes[0].run("touch", str(tmp_path / "file"))
    assert nodes[1].run("ls", str(tmp_path)) == "file\n"
    nodes[1].hide(tmp_path)
    assert nodes[1].run("ls", str(tmp_path)) == ""
    assert nodes[0].run("ls", str(tmp_path)) == "file\n"


def test_cables_delay_what_they_carry(network):
    """Nothing comes back earlier than four cables take: TCP has measured it."""
    nodes = network(2, "100mbit", 0.01)
    nodes.cut(1)
    nodes.mend(1)
    round_trip = nodes[0].run(sys.executable, "-I", "-c", ROUND_TRIP)
    assert int(round_trip) >= 40_000


def test_cables_have_the_rate_asked_for_and_can_be_cut(network):
    nodes = network(2, "100mbit")
    reach = ["-I", "-c", "import socket; socket.create_connection(('node1', 514), 1)"]
    nodes[0].run(sys.executable, *reach)
    assert "rate 100Mbit" in nodes[0].run("tc", "qdisc", "show", "dev", "eth0")
    nodes.cut(1)
    with pytest.raises(OSError, match=r"timed out|No route"):
        nodes[0].run(sys.executable, *reach)
    nodes.mend(1)
    nodes[0].run(sys.executable, *reach)


def test_a_lost_node_loses_all_its_processes(network):
    nodes = network(2)
    nodes[1].run("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &")
    (pid,) = children(nodes[1].pid)
    nodes.lose(1)
    assert not is_running(nodes[1].pid)
    assert not is_running(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_program_is_ended(network, number):
    """Not even where it can do nothing for it."""
    program = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(PROGRAM).parent,
        env=launching.clean_environment(),
    )
    assert program.stdout is not None
    with program.stdout as lines:
        nodes = [int(lines.readline()) for _ in range(2)]
    everything = nodes + [pid for node in nodes for pid in children(node)]
    program.send_signal(number)
    program.wait(launching.HANG_SECONDS)
    for pid in everything:
        descriptor = open_process(pid)
        if descriptor is not None:  # until it has ended
            assert wait_for_end(descriptor), pid


def test_the_program_starts_a_script_on_nodes(network, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WHERE)
    layout = ["--nodes=2", "--ranks-per-node=2", "--rate=1gbit"]
    ended = launching.run([sys.executable, PROGRAM, *layout, "--", str(script), "-x"])
    assert ended.returncode == 0, ended
    lines = ended.stdout.splitlines()
    assert [lines.count(f"node{number} -x") for number in range(2)] == [2, 2], ended


def test_the_exit_code_is_that_of_the_job(network, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)\n")
    ended = launching.run([sys.executable, PROGRAM, "--nodes=2", "--", str(script)])
    assert ended.returncode == 3, ended


def children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def is_running(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def open_process(pid):
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def wait_for_end(descriptor):
    try:
        return select.select([descriptor], [], [], launching.HANG_SECONDS)[0]
    finally:
        os.close(descriptor)
