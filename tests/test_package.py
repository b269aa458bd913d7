"""The package as a user gets it: built, installed with the core dependencies only, imported."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nalaformer_hf
from nalaformer_hf._torchvision import torchvision_mismatch_explained

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# The tests that share the built wheel run in one process under pytest-xdist.
shares_the_build = pytest.mark.xdist_group("package")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with this process's environment, less PYTHONPATH, plus the variables given."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=inherited | environment, text=True, capture_output=True, check=False
    )


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist of the working tree, and the wheel that is built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return {"sdist": next(folder.glob("*.tar.gz")), "wheel": next(folder.glob("*.whl"))}


@pytest.fixture(scope="module")
def core_python(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that holds the wheel and what its core dependencies need, linked in."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    asked = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    site = Path(asked.stdout.strip())
    for name in core_distributions():
        link_distribution(name, site)
    pip = [sys.executable, "-m", "pip", "--python", python]
    installed = run(*pip, "install", "--no-deps", "--no-index", distributions["wheel"], cwd=folder)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return python


def core_distributions() -> set[str]:
    """Everything that the dependencies without extras bring, but triton: torch brings that on Linux only."""
    found: set[str] = set()
    pending = [Requirement(line) for line in PROJECT["dependencies"]]
    while pending:
        requirement = pending.pop()
        if requirement.marker and not requirement.marker.evaluate():
            continue
        name = canonicalize_name(requirement.name)
        if name in found or name == "triton":
            continue
        found.add(name)
        pending += requirements_of(name, requirement.extras)
    return found


def requirements_of(name: str, extras: set[str]) -> Iterator[Requirement]:
    """What an installed distribution requires, with the extras asked for."""
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            requirement.marker = None
            yield requirement


def link_distribution(name: str, site: Path) -> None:
    """Make one of this environment's distributions importable from another site-packages folder."""
    distribution = importlib.metadata.distribution(name)
    for entry in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        link = site / entry
        if not link.exists():
            link.symlink_to(Path(str(distribution.locate_file(entry))))


@shares_the_build
def test_wheel_holds_the_whole_package_and_nothing_else(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        names = set(wheel.namelist())
    info = f"nalaformer_hf-{nalaformer_hf.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"nalaformer_hf", info}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "nalaformer_hf").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith("nalaformer_hf/")} == package
    assert "nalaformer_hf/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names


@shares_the_build
def test_sdist_holds_what_a_packager_needs(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "tests/test_package.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "dist", "build"))]


@shares_the_build
def test_wheel_imports_with_the_core_dependencies_alone(core_python: Path, tmp_path: Path) -> None:
    optional = ["accelerate", "datasets", "fla", "lm_eval", "matplotlib", "timm", "torchvision", "triton"]
    program = f"""
import importlib.util, nalaformer_hf
present = [name for name in {optional} if importlib.util.find_spec(name)]
print(nalaformer_hf.__version__, nalaformer_hf.__file__, present, sep="\\n")
"""
    imported = run(core_python, "-I", "-c", program, cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    version, file, present = imported.stdout.splitlines()
    assert version == nalaformer_hf.__version__
    assert Path(file).is_relative_to(core_python.parent.parent)
    assert present == "[]"


def test_every_import_is_a_declared_dependency() -> None:
    lines = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    owners = importlib.metadata.packages_distributions() | {"fla": ["fla-core"]}
    undeclared = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in (ROOT / "nalaformer_hf").rglob("*.py")
        for module in third_party_imports(path)
        if not declared & {canonicalize_name(owner) for owner in owners.get(module, [])}
    }
    assert not undeclared


def third_party_imports(path: Path) -> set[str]:
    """The top-level modules that a file imports, anywhere in it, less the standard library and ourselves."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    return modules - sys.stdlib_module_names - {"nalaformer_hf"}


def test_tracked_files_name_no_machine_path_and_no_registry_host() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    private = re.compile(
        rb"(?<![\w.-])/(?:tmp|work|root|home)/|\.\./shared|pypi\.org|pythonhoste[d]\.org|npmjs\.(?:org|com)"
    )
    tracked = run("git", "ls-files", "-z", cwd=ROOT).stdout.rstrip("\0").split("\0")
    assert "tests/test_package.py" in tracked
    contents = {name: (ROOT / name).read_bytes() for name in tracked if (ROOT / name).is_file()}
    found = {name: matches for name, content in contents.items() if (matches := private.findall(content))}
    assert not found


def test_ill_fitting_torchvision_is_told_in_words(tmp_path: Path) -> None:
    # A torchvision built for another torch cannot load its operators, so the first fake registration fails.
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\ntorch.library.register_fake('torchvision::nms')(lambda *_: None)\n"
    )
    metadata = tmp_path / "torchvision-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1.0\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    imported = run(sys.executable, "-c", "import nalaformer_hf", cwd=tmp_path, PYTHONPATH=path)
    assert imported.returncode == 1
    assert "operator torchvision::nms does not exist" in imported.stderr
    last_line = imported.stderr.splitlines()[-1]
    assert last_line.startswith("ImportError: the installed torchvision 0.1.0 was not built for")
    assert "pip install --upgrade torch torchvision" in last_line


def test_other_import_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="another riddle"), torchvision_mismatch_explained():
        raise RuntimeError("another riddle")
