"""Installs what the tests of this folder use: two Python environments and npm's packages, each exactly as its lock file says.

Run by `make test`; does nothing where all is there already. What cannot be installed (no network) is named, and the tests that
need it are skipped, or fail in CI.
"""

import hashlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
NODE = HERE / "node"
LIMIT_S = 600


def digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def python_state(name: str) -> tuple[Path, str]:
    """The file that tells what was installed, and what it has to say."""
    return ENVIRONMENTS / name / "installed", digest(HERE / "python" / f"{name}.lock")


def node_state() -> tuple[Path, str]:
    return NODE / "node_modules" / ".installed", digest(NODE / "package-lock.json")


def is_ready(state: tuple[Path, str]) -> bool:
    file, expected = state
    return file.exists() and file.read_text() == expected


def run(*command: str | Path, cwd: Path = HERE) -> None:
    subprocess.run(command, cwd=cwd, check=True, timeout=LIMIT_S)


def install_python(name: str) -> None:
    folder = ENVIRONMENTS / name
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    options = ("--quiet", "--disable-pip-version-check", "--no-compile", "--require-hashes", "--no-deps")
    run(folder / "bin" / "python", "-m", "pip", "install", *options, "-r", HERE / "python" / f"{name}.lock")


def install_node(npm: str) -> None:
    run(npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", cwd=NODE)


def main() -> int:
    wanted = [(name, python_state(name), install_python) for name in ("openai2", "openai3")]
    if npm := shutil.which("npm"):
        wanted.append((npm, node_state(), install_node))
    else:
        print("npm is not there: JavaScript's clients are not installed", file=sys.stderr)
    missing = [(name, state, install) for name, state, install in wanted if not is_ready(state)]
    if missing:
        print("Installing the clients that are tested ...")
    failed = 0
    with ThreadPoolExecutor(len(wanted)) as pool:
        runs = [(name, state, pool.submit(install, name)) for name, state, install in missing]
        for name, (file, expected), done in runs:
            try:
                done.result()
                file.write_text(expected)
            except (subprocess.SubprocessError, OSError) as error:
                print(f"{Path(name).name}: not installed: {error}", file=sys.stderr)
                failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
