"""Compiles the CUDA files of what the example `sources` wrote, with NVRTC and without a GPU.

kernels/cuda_check.py FOLDER [regular expression of files]

NVRTC and CUDA's headers come from `pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl`,
or from CUDA_PATH. Prints what does not compile, with the compiler's words, and ends with 1 then.
"""

import csv
import ctypes
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# As CubeCL has them.
FLAGS = ["--gpu-architecture=sm_90a", "-lineinfo"]


def cuda_folder():
    """The folder with include/ and lib/, of CUDA_PATH or of pip's packages."""
    if "CUDA_PATH" in os.environ:
        return Path(os.environ["CUDA_PATH"])
    for place in map(Path, sys.path):
        found = sorted(place.glob("nvidia/cu*/lib/libnvrtc.so*"))
        if found:
            return found[-1].parent.parent
    sys.exit("no NVRTC: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl")


class Compiler:
    def __init__(self, folder):
        found = lambda name: next(p for lib in ("lib", "lib64") for p in sorted(folder.glob(f"{lib}/{name}.so*")))
        # NVRTC asks for the second by its name alone.
        ctypes.CDLL(str(found("libnvrtc-builtins")))
        self.nvrtc = ctypes.CDLL(str(found("libnvrtc")))
        includes = [f"--include-path={folder / path}" for path in ("include", "include/cccl")]
        self.flags = [flag.encode() for flag in [*FLAGS, *includes]]

    def errors(self, path):
        """What the compiler says of a file that it refuses; nothing of one that it takes."""
        program = ctypes.c_void_p()
        source = path.read_bytes()
        self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, path.name.encode(), 0, None, None)
        flags = (ctypes.c_char_p * len(self.flags))(*self.flags)
        refused = self.nvrtc.nvrtcCompileProgram(program, len(self.flags), flags)
        size = ctypes.c_size_t()
        self.nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.nvrtc.nvrtcGetProgramLog(program, log)
        self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return log.value.decode(errors="replace") if refused else None


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder, pattern = Path(sys.argv[1]), re.compile(sys.argv[2] if len(sys.argv) > 2 else "")
    with open(folder / "manifest.csv", newline="") as manifest:
        files = [row["file"] for row in csv.DictReader(manifest)]
    files = [file for file in files if file.endswith(".cu") and pattern.search(file)]
    compiler = Compiler(cuda_folder())
    with ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
        errors = list(pool.map(lambda file: compiler.errors(folder / file), files))
    refused = [(file, why) for file, why in zip(files, errors) if why is not None]
    for file, why in refused:
        print(f"{file}\n{why}")
    print(f"{len(files) - len(refused)} of {len(files)} compile")
    sys.exit(1 if refused or not files else 0)


main()
