"""What packages are made of: metadata, recipes, the changelog, the release."""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import jinja2
import launching
import pytest
import yaml

import mpidist

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
RECIPES = ROOT / "docs" / "packaging"
needs_ci = pytest.mark.skipif(
    not (ROOT / ".ci").exists(), reason="an sdist has no scripts of the gate"
)


def dependencies():
    """Return name and lowest version of each package that mpidist needs."""
    block = re.search(r"^dependencies = \[\n(.*?)^\]$", PYPROJECT, re.M | re.S)[1]
    return dict(re.findall(r'"([\w-]+) >= ([\d.]+)"', block))


def test_the_version_is_set_once():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert dict(setup["metadata"]) == {"version": "attr: mpidist._version.__version__"}
    assert set(setup["options"]) == {"packages", "package_dir"}
    assert 'dynamic = ["version"]' in PYPROJECT
    for name in ("pyproject.toml", "setup.cfg", "CITATION.cff"):
        assert mpidist.__version__ not in (ROOT / name).read_text(), name


def test_files_that_are_no_modules_are_packed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packed = {
        f"{package.replace('.', '/')}/{name}"
        for package, names in setup["options.package_data"].items()
        for name in names.split()
    }
    top = Path(mpidist.__file__).parents[1]
    files = {
        str(path.relative_to(top))
        for path in (top / "mpidist").rglob("*.*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert files == packed


def test_a_script_beside_the_clone_finds_the_library(tmp_path):
    """There, Python sees the folder `mpidist` of the clone first."""
    (tmp_path / "mpidist").mkdir()
    script = tmp_path / "script.py"
    script.write_text("import mpidist\nprint(mpidist.__version__)\n")
    done = launching.run([sys.executable, str(script)])
    assert done.stdout.strip() == mpidist.__version__, done.stderr


def test_the_changelog_begins_with_this_version():
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    number = re.escape(mpidist.__version__)
    assert re.fullmatch(rf"{number} \((unreleased|\d{{4}}-\d\d-\d\d)\)", sections[0])
    numbers = [tuple(map(int, s.split()[0].split("."))) for s in sections]
    assert numbers == sorted(set(numbers), reverse=True)


def test_the_modules_that_are_imported_are_dependencies():
    imported = set()
    for path in Path(mpidist.__file__).parent.rglob("*.py"):
        # At the top of a module, where everybody needs it
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    others = imported - set(sys.stdlib_module_names) - {"mpidist"}
    assert others - {"torch", "jax", "keras"} == set(dependencies()) - {"ml_dtypes"}


def test_the_citation_can_be_read():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] in PYPROJECT
    assert {"message", "title", "authors", "type"} <= set(citation)
    assert citation["authors"][0]["name"] in PYPROJECT


def test_the_conda_recipe_needs_what_the_package_needs():
    folder = RECIPES / "conda"

    def load_file_regex(load_file, regex_pattern, from_recipe_dir):
        assert from_recipe_dir
        version = Path(mpidist.__file__).with_name("_version.py")
        if (ROOT / "mpidist").exists():  # else the package is installed elsewhere
            version = folder / load_file
        return re.search(regex_pattern, version.read_text())

    text = (folder / "meta.yaml").read_text()
    text = jinja2.Template(text).render(
        load_file_regex=load_file_regex, PYTHON="python"
    )
    recipe = yaml.safe_load(text)
    assert str(recipe["package"]["version"]) == mpidist.__version__
    run = dict(line.split(" >=") for line in recipe["requirements"]["run"])
    assert run == {"python": "3.10", **dependencies()}
    (script,) = recipe["build"]["entry_points"]
    name, target = script.split(" = ")
    assert f'{name} = "{target}"' in PYPROJECT


def test_the_spack_package_needs_what_the_package_needs():
    package = RECIPES / "spack" / "packages" / "py_mpidist" / "package.py"
    tree = ast.parse(package.read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "depends_on"
    ]
    always = [c for c in calls if "when" not in {k.arg for k in c.keywords}]
    specs = [call.args[0].value.rstrip(":").partition("@") for call in always]
    found = {
        name.removeprefix("py-").replace("-", "_"): version
        for name, _, version in specs
        if name not in ("mpi", "python", "py-setuptools")
    }
    assert found == dependencies()
    assert yaml.safe_load((RECIPES / "spack" / "repo.yaml").read_text())["repo"]


def test_the_apptainer_definition_has_known_sections():
    text = (RECIPES / "mpidist.def").read_text()
    head, *sections = re.split(r"^%", text, flags=re.M)
    keys = dict(
        line.split(": ") for line in head.splitlines() if line and line[0] != "#"
    )
    assert set(keys) == {"Bootstrap", "From"}
    bodies = dict(section.split("\n", 1) for section in sections)
    known = {"files", "post", "environment", "test", "runscript", "labels"}
    assert set(bodies) == known
    for name in ("post", "environment", "test", "runscript"):
        subprocess.run(["sh", "-n"], input=bodies[name], text=True, check=True)


@needs_ci
def test_links_become_absolute_for_pypi(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        "[a](docs/a.md#b) ![c](c.svg) [d](#d) [e](https://e.org) `[f](f)`\n"
        "```\n[g](g)\n```\n[h](LICENSE)\n"
    )
    script = [sys.executable, ROOT / ".ci" / "absolute_links"]
    subprocess.run([*script, page, "https://host.org/us/", "v1"], check=True)
    base = "https://host.org/us/blob/v1"
    assert page.read_text() == (
        f"[a]({base}/docs/a.md#b) ![c]({base}/c.svg) [d](#d) [e](https://e.org) "
        f"`[f](f)`\n```\n[g](g)\n```\n[h]({base}/LICENSE)\n"
    )


@needs_ci
def test_the_scripts_of_the_gate_are_sound():
    for name in ("release", "run", "versions"):
        subprocess.run(["bash", "-n", ROOT / ".ci" / name], check=True)


@needs_ci
def test_a_release_is_of_what_is_committed(tmp_path):
    """It refuses changes, and a tag without a date, before it builds anything."""
    for name in (".ci", "mpidist"):
        (tmp_path / name).mkdir()
    for name in (".ci/release", "mpidist/_version.py", "CHANGELOG.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())

    def git(*words):
        who = ["-c", "user.name=us", "-c", "user.email=us@localhost"]
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True)

    def release(*words):
        command = ["bash", ".ci/release", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    git("init", "-q")
    done = release()
    assert (done.returncode, "not committed" in done.stderr) == (1, True)
    log = tmp_path / "CHANGELOG.md"
    log.write_text(f"# Changelog\n\n## {mpidist.__version__} (unreleased)\n")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    done = release("--tag")
    assert (done.returncode, "has no date" in done.stderr) == (1, True), done.stderr
    log.write_text("# Changelog\n\n## 99.0 (2026-01-01)\n")
    git("commit", "-q", "-a", "-m", "another")
    done = release()
    assert (done.returncode, "CHANGELOG.md" in done.stderr) == (1, True)
