#!/usr/bin/env python3
"""An environment with the torch of one of Gaudi's releases and NumPy 1.26, on a machine without any card: what
`make test-gaudi-torch` runs the stand-in's tests in.

torch's public wheels for x86-64 are builds for CUDA and want gigabytes of libraries that nothing here calls. So torch
is installed alone; of those libraries it gets the one that is called as torch is imported (CUDA's run time, 1 MB), and
for the others empty ones of the same names, which a C compiler makes. Functions are looked up when they are first
called, so what would be missing is never asked for. All other packages are those of .venv.

    gaudi_torch.py FOLDER TORCH [NUMPY]
"""

import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution
from pathlib import Path

OF_THE_SYSTEM = re.compile(rb"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so|ld-linux")


def main(folder: Path, torch: str, numpy: str = "1.26.4") -> None:
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    if not (folder / ".ready").exists():
        venv.create(folder, with_pip=True)
        install(folder, f"torch=={torch}", f"numpy=={numpy}")
        install(folder, *runtime_of(packages))
        make_empty_libraries(packages)
        (packages / "a_lazy.pth").write_text("import sys; sys.setdlopenflags(1)\n")  # functions by their first call
        (packages / "z_others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        (folder / ".ready").touch()
    check = "import numpy, torch; print(torch.__version__, numpy.__version__, torch.from_numpy(numpy.ones(1)).item())"
    subprocess.run([folder / "bin" / "python", "-c", check], check=True)


def install(folder: Path, *requirements: str) -> None:
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, *requirements], check=True)


def runtime_of(packages: Path) -> list[str]:
    """CUDA's run time in the version that torch asks for."""
    of_torch = Distribution.at(next(packages.glob("torch-*.dist-info")))
    asked = [text.partition(";")[0].strip() for text in of_torch.requires or []]
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
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
