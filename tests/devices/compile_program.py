"""A program that compiles kernels for a GPU that is not there, in a process without Triton's interpreter."""

PROGRAM = """
import importlib, json, re, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

def build(asked):
    capability, (module, name, types, values, options) = asked
    fast, roomy = options.pop("fast", False), options.pop("roomy", False)
    kernel = getattr(importlib.import_module(f"text_generation_inference.kernels.triton.{module}"), name)
    signature = {parameter.name: types.get(parameter.name, "constexpr") for parameter in kernel.params}
    # What is passed is aligned: without that, loads are of single values.
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values()) if kind not in ("constexpr", "fp32") and not kind.startswith("tensordesc")
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\\d+) STACK:(\\d+)", usage.stdout + usage.stderr).groups()
    shown = f"{capability} {name}: {registers} registers, {stack} bytes spilled, {compiled.metadata.shared} shared"
    shown += " " + " ".join(f"{k}={v}" for k, v in values.items())
    # The larger tiles are only measured, on larger GPUs; tiles in bulk, of experts and of long rows are for those only.
    roomy |= values.get("BLOCK_N", 0) >= 128 or "bulk" in name or "grouped" in name
    roomy |= values.get("K_PAD", 0) > 16384 and values.get("BN", 0) > 1
    room = 64 if capability < 80 else 227 if roomy else 99
    assert compiled.metadata.shared <= room * 1024, "no room in the shared memory of smaller GPUs: " + shown
    assert not fast or capability < 90 or stack == "0", shown
    return shown

with ThreadPoolExecutor(2) as threads:
    for shown in threads.map(build, json.load(sys.stdin)):
        print(shown, flush=True)
"""
