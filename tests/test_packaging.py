"""What a package index is told, what the distributions hold, and that the wheel works without this checkout."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.documents import README, ROOT

pytest.importorskip("hatchling", reason="hatchling, which builds the package, is in the extra `dev`")

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from hatch_build import without_relative_links

SECONDS = 120  # for a program
# In distributions, but not in the checkout.
MADE = {"PKG-INFO"}
# In the checkout, but of no use to who has a distribution.
LEFT_OUT = (".ci/", ".github/")


def run(*words: str | Path, folder: Path, **environment: str) -> str:
    """What a program prints that knows nothing of this checkout, with the ranks that it starts."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(word) for word in words]
    with subprocess.Popen(
        command, cwd=folder, env={**inherited, "OMP_NUM_THREADS": "1", **environment}, start_new_session=True,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, built without a network."""
    folder = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, folder=ROOT)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.fixture(scope="module")
def unpacked(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is in the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(distributions["sdist"]) as archive:
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # there is none before Python 3.11.4
        archive.extractall(folder, **safe)
    (inside,) = folder.iterdir()
    return inside


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def tracked() -> list[str]:
    """Return the files of this checkout that belong to it; others may lie beside them, and be packed."""
    words = ["git", "ls-files", "--cached"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip("this is no checkout of git")
    return [name for name in found.stdout.splitlines() if (ROOT / name).exists()]


def test_the_description_has_no_links_into_the_repository() -> None:
    text = without_relative_links(README.read_text())
    assert re.findall(r"\]\((?!https?:)", text) == []
    assert "(all measurements, with intervals and commands)" in text
    assert "see large\nmodels." in text  # a link over two lines
    assert "# lightning_hybrid" in text


def test_the_package_takes_that_description() -> None:
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    assert metadata.core.readme == without_relative_links(README.read_text())
    assert metadata.core.readme_content_type == "text/markdown"
    assert metadata.version


def test_the_distributions_hold_every_file(distributions: dict[str, Path], unpacked: Path) -> None:
    """The wheel has the package, the sdist the tests and documents too."""
    package = {name for name in tracked() if name.startswith("lightning_hybrid/")}
    in_wheel = contents(distributions["wheel"])
    assert {name for name in in_wheel if name in tracked()} == package
    licences = [name for name in in_wheel if name.endswith("dist-info/licenses/LICENSE")]
    assert [in_wheel[name] for name in licences] == [(ROOT / "LICENSE").read_bytes()]

    in_sdist = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    kept = {name for name in tracked() if not name.startswith(LEFT_OUT)}
    assert in_sdist & set(tracked()) - MADE == kept


def test_the_sdist_builds_the_same_wheel(distributions: dict[str, Path], unpacked: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, folder=unpacked)
    (again,) = tmp_path.glob("*.whl")
    assert again.name == distributions["wheel"].name
    assert contents(again) == contents(distributions["wheel"])


@pytest.mark.distributed
@pytest.mark.slow
def test_an_installed_wheel_trains_the_demo(distributions: dict[str, Path], tmp_path: Path) -> None:
    """In an environment that has what the package requires, and not this checkout."""
    pytest.importorskip("sklearn")
    home, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet",
        distributions["wheel"], folder=elsewhere)  # fmt: skip
    # What this file lists is found, without the links to checkouts that lie beside it.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    where = "import lightning_hybrid, sys; print(lightning_hybrid.__file__, *sys.path, sep='\\n')"
    file, *path = run(python, "-c", where, folder=elsewhere).splitlines()
    assert Path(file).is_relative_to(packages)
    assert str(ROOT) not in path

    steps = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.enable_progress_bar=false"]
    out = run(home / "bin" / "lightning-hybrid", "demo", "--ranks", "2", *steps, folder=elsewhere)
    assert "data 1 x tensor 1 x pipeline 2 = 2 processes" in out
    assert "`max_steps=2` reached" in out
    assert re.search(r"train_loss \d\.\d+", out.splitlines()[-1])
    (checkpoint,) = elsewhere.rglob("*.ckpt")
    assert "step=2" in checkpoint.name
    shutil.rmtree(home)
