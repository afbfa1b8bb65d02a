#!/usr/bin/env python3
"""An environment with the torch of one of Gaudi's releases and NumPy 1.26, on a machine without any card: what
`make test-gaudi-torch` and `make check-gaudi-torch` run the stand-in's tests in.

torch's public wheels for x86-64 are builds for CUDA and want gigabytes of libraries that nothing here calls. So torch
is installed alone; of those libraries it gets the one that is called as torch is imported (CUDA's run time, 1 MB), and
for the others empty ones of the same names, which a C compiler makes. Functions are looked up when they are first
called, so what would be missing is never asked for. All other packages are those of .venv. What CI installs has its
hashes in tests/devices/torch-VERSION.lock.

Where no such torch is offered (another machine or Python, no network) that is said, and nothing is run. In CI that is a
failure if the index answers at all. What became of each is a line of the file that TORCHES_TESTED names, which .ci/run
shows last: a run that is green says by itself whether anything was tested.

    gaudi_torch.py FOLDER TORCH [arguments of its Python ...]
"""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution
from pathlib import Path

NUMPY = "1.26.4"
LOCKS = Path(__file__).parents[1] / "tests" / "devices"
OF_THE_SYSTEM = re.compile(rb"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so|ld-linux")
CHECK = "import numpy, torch; print(torch.__version__, numpy.__version__, torch.from_numpy(numpy.ones(1)).item())"


class NotOfferedError(Exception):
    """pip knows of no such file for this machine."""

    def __init__(self, said: str) -> None:
        listed = re.search(r"\(from versions: ([^)]*)\)", said)
        self.offered = [] if listed is None else [each for each in listed[1].split(", ") if each != "none"]
        self.index_answers = len(self.offered) > 5  # an index has dozens of versions, a folder of files a few
        super().__init__(", ".join(self.offered) or "nothing")


def main(folder: Path, torch: str, *arguments: str) -> int:
    try:
        make_environment(folder, torch)
    except NotOfferedError as error:
        print(f"torch {torch} with NumPy {NUMPY} is not offered for this machine and Python; offered: {error}")
        print("Nothing was tested with it.")
        if arguments:
            note(f"NOT TESTED with torch {torch}: {'not offered' if error.index_answers else 'no index'}")
        return 1 if error.index_answers and os.environ.get("CI") == "true" else 0
    python = folder / "bin" / "python"
    subprocess.run([python, "-c", CHECK], check=True)
    if not arguments:
        return 0
    status = subprocess.run([python, *arguments], check=False).returncode
    note(f"{'FAILED' if status else 'tested'} with torch {torch}")
    return status


def note(line: str) -> None:
    if name := os.environ.get("TORCHES_TESTED"):
        with Path(name).open("a") as file:
            file.write(f"{line}\n")


def make_environment(folder: Path, torch: str) -> None:
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    if (folder / ".ready").exists():
        return
    venv.create(folder, clear=True, symlinks=True, with_pip=False)
    lock = LOCKS / f"torch-{torch}.lock"
    if lock.exists():
        install(packages, "--require-hashes", "-r", str(lock))
    else:
        install(packages, f"torch=={torch}", f"numpy=={NUMPY}")
        install(packages, *runtime_of(packages))
    make_empty_libraries(packages)
    (packages / "a_lazy.pth").write_text("import sys; sys.setdlopenflags(1)\n")  # functions by their first call
    # Gaudi's software has none, and that of .venv is made for a newer torch.
    (packages / "b_no_triton.pth").write_text('import sys; sys.modules["triton"] = None\n')
    (packages / "z_others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (folder / ".ready").touch()


def install(packages: Path, *requirements: str) -> None:
    """By the pip of this Python, which is the same version."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--no-compile", "--ignore-installed", "--target", str(packages)]
    done = subprocess.run([*command, *options, *requirements], stderr=subprocess.PIPE, text=True, check=False)
    if "No matching distribution found" in done.stderr:
        raise NotOfferedError(done.stderr)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(done.returncode)


def runtime_of(packages: Path) -> list[str]:
    """CUDA's run time in the version that torch asks for."""
    of_torch = Distribution.at(next(packages.glob("torch-*.dist-info")))
    asked = [text.partition(";")[0].strip() for text in of_torch.requires or []]
    toolkit = next((found for text in asked if (found := re.match(r"cuda-toolkit\[.*\]==(\d+\.\d+)", text))), None)
    if toolkit is not None:  # since 2.11: a package that asks for one of that version
        return [f"nvidia-cuda-runtime=={toolkit[1]}.*"]
    return [text for text in asked if text.startswith("nvidia-cuda-runtime")]


def make_empty_libraries(packages: Path) -> None:
    """For what torch's own libraries need, and nobody has installed."""
    libraries = packages / "torch" / "lib"
    for runtime in (packages / "nvidia").rglob("libcudart.so.*"):
        (libraries / runtime.name).write_bytes(runtime.read_bytes())
    for library in sorted(libraries.glob("*.so")):
        for name in needed_by(library):
            target = libraries / name
            if not target.exists():
                command = ["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", f"-Wl,-soname,{name}", "-o", target]
                subprocess.run(command, check=True)


def needed_by(library: Path) -> list[str]:
    """The libraries that a library is loaded with, without those of the system."""
    said = subprocess.run(["objdump", "-p", library], capture_output=True, check=True).stdout
    found = re.findall(rb"NEEDED\s+(\S+)", said)
    return [name.decode() for name in found if not OF_THE_SYSTEM.match(name)]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), *sys.argv[2:]))
