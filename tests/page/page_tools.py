"""Installs what the tests of the page use: npm's packages as the lock file says, and Chromium.

Run by `make test`; does nothing where all is there already. Chromium comes from the system's packages, which needs apt and root;
TGI_TEST_CHROMIUM names one that is elsewhere. What cannot be installed is named, and the tests are skipped, or fail in CI.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOCK = HERE / "package-lock.json"
INSTALLED = HERE / "node_modules" / ".installed"
LIMIT_S = 600
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    return os.environ.get("TGI_TEST_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


def is_installed() -> bool:
    return INSTALLED.exists() and INSTALLED.read_text() == hashlib.sha256(LOCK.read_bytes()).hexdigest()


def what_is_missing() -> str:
    """In words; nothing if the tests can run."""
    missing = []
    if shutil.which("node") is None:
        missing.append("node")
    if not is_installed():
        missing.append("npm's packages")
    if find_chromium() is None:
        missing.append("Chromium")
    return f"not there: {', '.join(missing)} (python tests/page/page_tools.py)" if missing else ""


def run(*command: str, **environment: str) -> None:
    subprocess.run(command, cwd=HERE, check=True, timeout=LIMIT_S, env={**os.environ, **environment})


def install_packages() -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not there")
    run(npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
    INSTALLED.write_text(hashlib.sha256(LOCK.read_bytes()).hexdigest())


def install_chromium() -> None:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise OSError("Chromium is not there, and only root can install it, with apt")
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", DEBIAN_FRONTEND="noninteractive")


def main() -> int:
    failed = 0
    wanted = [("npm's packages", is_installed(), install_packages), ("Chromium", find_chromium(), install_chromium)]
    for name, there, install in wanted:
        if there:
            continue
        print(f"Installing {name} for the tests of the page ...")
        try:
            install()
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{name}: not installed: {error}", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
