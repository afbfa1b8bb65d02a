"""Installs Ray for the tests of this folder: an environment of its own over the project's, as ray.lock says.

Run by `make test`; does nothing where all is there already. Where it cannot be installed (no network) the tests are skipped,
or fail in CI.
"""

import hashlib
import shutil
import site
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".venv-ray"
PYTHON = FOLDER / "bin" / "python"
LOCK = HERE / "ray.lock"
LIMIT_S = 600


def is_ready() -> bool:
    state = FOLDER / "installed"
    return state.exists() and state.read_text() == _digest()


def _digest() -> str:
    return hashlib.sha256(LOCK.read_bytes()).hexdigest()


def install() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True, timeout=LIMIT_S)
    options = ("--quiet", "--disable-pip-version-check", "--no-compile", "--require-hashes", "--no-deps")
    subprocess.run([PYTHON, "-m", "pip", "install", *options, "-r", LOCK], check=True, timeout=LIMIT_S)
    own = next(FOLDER.glob("lib/python*/site-packages"))
    beneath = [folder for folder in site.getsitepackages() if folder.startswith(sys.prefix)]
    (own / "beneath.pth").write_text("".join(f"import site; site.addsitedir({folder!r})\n" for folder in beneath))
    (FOLDER / "installed").write_text(_digest())


def main() -> int:
    if is_ready():
        return 0
    print("Installing Ray, which is tested ...")
    try:
        install()
    except (subprocess.SubprocessError, OSError) as error:
        print(f"Ray: not installed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
