"""What torch asks CUDA for before it runs an operation there; a torch for the CPU has no answers.

Autograd needs a guard of the device, and the dispatcher the interface of CUDA's hooks. Both are registered by
a small library, which g++ compiles for the torch of this process.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
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


LIBRARY = "CLAIMED_CUDA_LIBRARY"
"""Environment variable: the path of the compiled library, which processes of Ray load too."""


def load_hooks(library: str) -> None:
    """Load the library, which must happen before torch is imported."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already, and has asked for the hooks of CUDA")
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def compile_hooks(folder: Path) -> str:
    """Compile the library for the torch of this environment, and return its path."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    torch = Path(spec.origin).parent
    source, library = folder / "hooks.cpp", folder / "hooks.so"
    source.write_text(SOURCE)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
    command += [f"-I{torch / 'include'}", f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    subprocess.run(command, check=True)
    return str(library)
