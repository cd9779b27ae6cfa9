"""The commands: their help, the console script, `run`, `config`, completion."""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import launching
import pytest
from mpi4py import MPI

import mpidist
from mpidist.__main__ import main
from mpidist.comm.transports.tuning import METHODS, Layout, write_table
from mpidist.launch import commands
from mpidist.tools.cli import make_parser
from mpidist.util.settings import SETTINGS

ROOT = Path(__file__).parents[2]
MODULE = [sys.executable, "-m", "mpidist"]
RUN = [*MODULE, "run", "-n", "2", "--oversubscribe"]


def names_of_commands():
    parser = make_parser()
    (action,) = (
        a for a in parser._actions if isinstance(a, argparse._SubParsersAction)
    )
    return dict(action.choices)


NAMES = names_of_commands()


def test_the_commands_are_there():
    assert {"run", "doctor", "plan", "tune", "diff", "config", "version"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_has_an_example_that_is_one(name, capsys):
    """It parses, also what another command is to run."""
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    examples = re.search(r"^Example:\n((?:  .*\n)+)", text, re.M)[1]
    for line in examples.splitlines():
        program, *words = shlex.split(line)
        assert program == "mpidist"
        given = make_parser().parse_args(words)
        if words[:1] == ["run"] and "mpidist" in words:
            assert given.module[0] == "mpidist"
            given = make_parser().parse_args(given.module[1:])
            assert given.run is NAMES[name].get_default("run")


@pytest.fixture
def console_script(tmp_path):
    """What pip makes of the entry point in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    scripts = re.search(r"^\[project.scripts\]\n(.*?)^$", text, re.M | re.S)[1]
    name, module, function = re.fullmatch(
        r'(\w+) = "([\w.]+):(\w+)"\n', scripts
    ).groups()
    script = tmp_path / "bin" / name
    script.parent.mkdir()
    script.write_text(
        f"#!{sys.executable}\n# -*- coding: utf-8 -*-\nimport re\nimport sys\n"
        f"from {module} import {function}\nif __name__ == '__main__':\n"
        "    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])\n"
        f"    sys.exit({function}())\n"
    )
    script.chmod(0o755)
    return str(script)


def test_the_console_script_needs_no_mpi(console_script, without_mpi, tmp_path):
    for words in (["--help"], ["config"], ["run", "--help"], ["version"]):
        ended = without_mpi(console_script, *words)
        assert ended.returncode == 0, ended.stderr
    assert "there is no MPI here" in ended.stdout
    for words, status, text in [
        (["report", tmp_path], 1, "MPIDIST_TIMELINE"),
        (["config", "x"], 2, "usage: mpidist config"),
        (["run", "-n", "2", "-m", "job"], 2, "mpi4py finds no MPI library ("),
    ]:
        ended = without_mpi(console_script, *words)
        assert ended.returncode == status
        assert text in ended.stderr


def test_a_program_of_that_name_is_no_command(tmp_path, monkeypatch):
    script = tmp_path / "mpidist"
    monkeypatch.setattr(sys, "argv", [str(script), "config"])
    assert not commands.is_command()
    script.write_text("import mpidist\n")
    assert not commands.is_command()
    script.write_text("from mpidist.__main__ import main\n")
    assert commands.is_command()
    monkeypatch.setattr(sys, "argv", [])
    assert not commands.is_command()


@pytest.mark.parametrize("status", [0, 7])
def test_the_exit_status_is_passed_on(tmp_path, status):
    script = tmp_path / "job.py"
    script.write_text(
        "import sys\nfrom mpi4py import MPI\n"
        "print(MPI.COMM_WORLD.size, sys.argv[1], flush=True)\n"
        f"MPI.Finalize()\nsys.exit({status})\n"
    )
    ended = launching.run([*RUN, str(script), "a b"])
    assert ended.returncode == status, ended.stderr
    assert "2 a b" in ended.stdout


def test_a_module_is_run_too(tmp_path):
    (tmp_path / "some_job.py").write_text("import sys\nprint(sys.argv[1:])\n")
    ended = launching.run([*RUN, "-m", "some_job", "-n", "3"], PYTHONPATH=str(tmp_path))
    assert "['-n', '3']" in ended.stdout, ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(tmp_path, number):
    script = tmp_path / "job.py"
    script.write_text(
        "import threading\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 0:\n    print('ready', flush=True)\n"
        "threading.Event().wait()\n"
    )
    process = subprocess.Popen(
        [*RUN, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=launching.clean_environment(),
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(launching.HANG_SECONDS) != 0
        process.stdout.read()  # until all ranks have closed it
    finally:
        process.stdout.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "name a script"),
        (["-m"], "name a script"),
        (["none.py"], "there is no file none.py"),
        (["-n", "0", "x"], "must be >= 1"),
        (["-n", "100000", "-m", "x"], "oversubscribe"),
    ],
)
def test_what_cannot_be_started_is_said(words, text):
    ended = launching.run([*MODULE, "run", *words])
    assert ended.returncode == 2
    assert text in ended.stderr
    assert ended.stdout == ""


def config(*words, **environment):
    ended = launching.run([*MODULE, "config", "--json", *words], **environment)
    rows = json.loads(ended.stdout)
    return ended.returncode, {row.pop("name"): row for row in rows}


def test_config_says_what_holds_and_why(tmp_path):
    path = tmp_path / "transports.json"
    rows = [(0, "mpi"), (4096, "shared")]
    layout = Layout("MPICH 5.0.2", (2, 4), "CPU")
    write_table(path, layout, dict.fromkeys(METHODS, rows), {})
    status, found = config(
        "MPIDIST_LOG=debug,json",
        MPIDIST_LOG="error",
        MPIDIST_HANG_SECONDS="0",
        MPIDIST_BANNER="",
        MPIDIST_TRANSPORTS=str(path),
    )
    assert status == 0
    assert [name for name in found if name != "transports"] == [
        setting.name for setting in SETTINGS
    ]
    why = {name: (row["value"], row["source"]) for name, row in found.items()}
    assert why["MPIDIST_LOG"] == ("debug,json", "argument")
    assert why["MPIDIST_HANG_SECONDS"] == ("for ever", "environment")
    assert why["MPIDIST_BANNER"] == ("1", "default")
    assert why["MPIDIST_TRANSPORTS"] == (str(path), "environment")
    text = launching.run([*MODULE, "config"], MPIDIST_TRANSPORTS=str(path)).stdout
    table = "mpi, shared from 4 KiB"
    assert f"transports = allreduce by {table}; allgatherv by {table}" in text
    assert "(tuning file)\n    On nodes of 2 + 4 ranks, CPU, MPICH 5.0.2" in text


def test_config_fails_where_no_strategy_could_be_made(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("no JSON")
    status, found = config(
        MPIDIST_BANER="0", MPIDIST_CUDA_AWARE="yes", MPIDIST_TRANSPORTS=str(bad)
    )
    assert status == 1
    assert "did you mean MPIDIST_BANNER" in found["MPIDIST_BANER"]["meaning"]
    assert "must be 0 or 1, not 'yes'" in found["MPIDIST_CUDA_AWARE"]["meaning"]
    assert "not a tuning file" in found["transports"]["meaning"]
    assert [found[name]["source"] for name in ("MPIDIST_BANER", "transports")] == [
        *("error", "error"),
    ]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("MPIDIST_BANER=1", "did you mean MPIDIST_BANNER"),
        ("MPIDIST_BANNER=2", "must be 0 or 1"),
        ("BANNER=1", "'BANNER' is not a setting"),
    ],
)
def test_arguments_that_are_no_settings(word, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["config", word])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.mpirun
def test_one_rank_of_a_job_prints_the_settings():
    ended = launching.run([*launching.mpirun_command(2), *MODULE, "config"])
    assert ended.stdout.count("MPIDIST_BANNER = 1") == 1


def test_versions():
    ended = launching.run([*MODULE, "version", "--json"])
    found = json.loads(ended.stdout)
    assert found["mpidist"] == mpidist.__version__
    assert found["MPI"].split()[0] in MPI.Get_library_version()
    assert Path(found["MPI library"]).exists()


def complete(script, *words):
    """Return what bash offers for the last word."""
    shell = (
        f"source {script}; COMP_WORDS=({shlex.join(['mpidist', *words])}); "
        f"COMP_CWORD={len(words)}; _shtab_mpidist; echo ${{COMPREPLY[@]}}"
    )
    ended = launching.run(["bash", "-c", shell])
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_bash_completes(tmp_path):
    pytest.importorskip("shtab")
    ended = launching.run([*MODULE, "--completion", "bash"])
    assert ended.returncode == 0, ended.stderr
    script = tmp_path / "completion"
    script.write_text(ended.stdout)
    assert complete(script, "d") == ["doctor", "diff"]
    assert complete(script, "run", "--over") == ["--oversubscribe"]
    assert complete(script, "run", "--launcher", "s") == ["srun"]


def test_zsh_has_a_completion():
    pytest.importorskip("shtab")
    ended = launching.run([*MODULE, "--completion", "zsh"])
    assert ended.stdout.startswith("#compdef mpidist")
    if zsh := shutil.which("zsh"):
        checked = subprocess.run(
            [zsh, "-n", "/dev/stdin"], input=ended.stdout, text=True, check=False
        )
        assert checked.returncode == 0


def test_without_shtab_it_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        main(["--completion", "bash"])
    assert ended.value.code == 1
    assert "pip install shtab" in capsys.readouterr().err
