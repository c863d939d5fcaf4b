"""What torch asks CUDA for before it runs an operation there; a torch for the CPU has no answers.

Autograd needs a guard of the device, and the dispatcher the interface of CUDA's hooks. Both are registered by
a small library, which g++ compiles once for each version of torch.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>)
}

namespace at {
// Torch looks for the class by this name.
struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""


def load_hooks() -> None:
    """Load the library, which must happen before torch is imported."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already, and has asked for the hooks of CUDA")
    library = Path(tempfile.gettempdir()) / f"claimed-cuda-{os.getuid()}" / f"torch-{version('torch')}.so"
    if not library.is_file():
        _compile(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _compile(library: Path) -> None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    torch = Path(spec.origin).parent
    library.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        source, built = Path(scratch) / "hooks.cpp", Path(scratch) / "hooks.so"
        source.write_text(SOURCE)
        command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(built)]
        command += [f"-I{torch / 'include'}", f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
        command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        subprocess.run(command, check=True)
        built.replace(library)
