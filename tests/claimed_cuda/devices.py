"""Devices that are only claimed: a tensor says 'cuda:1', and its values lie on the CPU.

The code takes its branches for CUDA, autograd and autocast run as on CUDA, and an operation on tensors of two
devices raises, as a kernel would. Values are real. Kernels, their speed, their memory and their rounding are
not those of a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
MAX_DEVICES = 8
GIB = 2**30
CPU = torch.device("cpu")
COPIES = {aten._to_copy, aten.copy, aten.copy_, aten._foreach_copy_}
"""Operations whose result is on another device than what they read."""
INDEXING = {
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten._unsafe_index,
    aten._unsafe_index_put,
}
"""Operations that take indices on the CPU too."""
PRODUCTS = {aten.mm: 0, aten.addmm: 1, aten.addmm_: 1}
"""Products of linear layers, and the position of their left factor. Attention is one kernel on a GPU."""
NONDETERMINISTIC = {
    "torch.nn.AvgPool3d": {aten.avg_pool3d_backward},
    "torch.nn.AdaptiveAvgPool2d": {aten._adaptive_avg_pool2d_backward},
    "torch.nn.AdaptiveAvgPool3d": {aten._adaptive_avg_pool3d_backward},
    "torch.nn.AdaptiveMaxPool2d": {aten.adaptive_max_pool2d_backward},
    "torch.nn.FractionalMaxPool2d": {aten.fractional_max_pool2d_backward},
    "torch.nn.FractionalMaxPool3d": {aten.fractional_max_pool3d_backward},
    "torch.nn.MaxUnpool1d": {aten.max_unpool2d},
    "torch.nn.MaxUnpool2d": {aten.max_unpool2d},
    "torch.nn.MaxUnpool3d": {aten.max_unpool3d},
    "torch.nn.functional.interpolate": {
        aten.upsample_linear1d_backward,
        aten.upsample_bilinear2d_backward,
        aten.upsample_bicubic2d_backward,
        aten.upsample_trilinear3d_backward,
    },
    "torch.nn.ReflectionPad1d": {aten.reflection_pad1d_backward},
    "torch.nn.ReflectionPad2d": {aten.reflection_pad2d_backward},
    "torch.nn.ReflectionPad3d": {aten.reflection_pad3d_backward},
    # The kernel with one dimension of positions has no atomic sums.
    "torch.nn.NLLLoss": {aten.nll_loss2d_forward, aten.nll_loss2d_backward},
    "torch.nn.CTCLoss": {aten._ctc_loss_backward},
    "torch.nn.EmbeddingBag": {aten._embedding_bag_dense_backward},
    "torch.Tensor.put_": {aten.put, aten.put_},
    "torch.histc": {aten.histc},
    "torch.bincount": {aten.bincount},
    "torch.median": {aten.median, aten.nanmedian},
    "torch.nn.functional.grid_sample": {aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward},
    "torch.cumsum": {aten.cumsum, aten.cumsum_},
    "torch.Tensor.scatter_reduce": {aten.scatter_reduce, aten.scatter_reduce_},
    "torch.Tensor.resize_": {aten.resize_},
}
"""Operations without a deterministic kernel on CUDA, by their names in torch's documentation."""
ONLY_OF_TYPE: dict[Any, Callable[[torch.Tensor], bool]] = {
    aten.cumsum: torch.is_floating_point,
    aten.cumsum_: torch.is_floating_point,
    aten.resize_: lambda tensor: tensor.is_quantized,
}
"""Those of them that are deterministic except for such tensors."""
MISMATCHES: list[str] = []
"""The operations that mixed devices, also those whose error was caught."""


DRAWING = threading.Lock()
"""Held while an operation draws from the generator of the CPU in place of a device's."""
UNREPEATABLE: list[str] = []
"""The operations without a deterministic kernel that ran, which torch would refuse on a GPU."""


class DeviceMismatch(RuntimeError):
    """Tensors of an operation are on different devices."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        MISMATCHES.append(message)


class Record:
    """What ran on claimed devices: operations by device, products by the type of their factors, and those
    in fp32 by the precision that is set."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.products: Counter[str] = Counter()
        self.precisions: Counter[str] = Counter()

    def clear(self) -> None:
        self.operations.clear()
        self.products.clear()
        self.precisions.clear()


RECORD = Record()


class ClaimedTensor(torch.Tensor):
    """A tensor that claims a device; `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> ClaimedTensor:
        with torch.inference_mode(False):  # also a view of a tensor that is none of inference mode
            tensor: ClaimedTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                layout=held.layout,
                device=device,
                requires_grad=False,
            )
        tensor.held = held
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"{self.held!r} as on {self.device}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr:
            return args[0].held.data_ptr()
        if func is torch.Tensor.untyped_storage:
            return args[0].held.untyped_storage()
        if func is torch.Tensor.tolist:
            return args[0].cpu().tolist()
        if func is torch.Tensor.numpy and args[0].is_cuda:
            raise TypeError(f"a tensor on {args[0].device} is no array: copy it to the CPU first")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__ and isinstance(args[1], ClaimedTensor):
            args[0].held = args[1].held
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Claims(TorchDispatchMode):
    """Intercepts what makes tensors on claimed devices, in one thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values, and claim the device of its result.

    Raises:
        DeviceMismatch: CUDA would refuse the devices of its arguments.
    """
    if torch.is_inference_mode_enabled() and _is_composite(func):
        with Claims():
            return func.decompose(*args, **kwargs)
    if func.overloadpacket in (aten.pin_memory, aten._pin_memory):
        return args[0]
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}  # there is none
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    target = _device(kwargs.get("device"))
    generators = [_claimed(leaf) for leaf in leaves if isinstance(leaf, torch._C.Generator)]
    device = _device_of(func, args, tensors, target)
    if any(generator.type != device.type for generator in generators):
        raise DeviceMismatch(f"{func}: a generator on {generators[0]} for a tensor on {device}")
    if device.type == "cpu" and not any(isinstance(tensor, ClaimedTensor) for tensor in tensors):
        return func(*args, **kwargs)
    return _claim_result(func, args, kwargs, device)


def _claim_result(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    packet = func.overloadpacket
    _record(packet, args, device)
    held_args, held_kwargs = tree_map_only(ClaimedTensor, lambda one: one.held, (args, kwargs))
    if held_kwargs.get("device") is not None:
        held_kwargs["device"] = CPU
    if "dtype" in func._overloadname and packet in (aten.mm, aten.addmm):
        result = _wide_product(held_args, held_kwargs)
    else:
        with _own_numbers(func, held_args, held_kwargs, device):
            result = func(*held_args, **held_kwargs)
    if packet is aten._to_copy and result.data_ptr() == held_args[0].data_ptr():
        result = result.clone()
    if device.type == "cpu":
        return args[0] if packet is aten.copy_ else result
    claimed = tree_map_only(torch.Tensor, lambda one: ClaimedTensor(one, device), result)
    return return_and_correct_aliasing(func, args, kwargs, claimed)


@contextlib.contextmanager
def _own_numbers(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Let an operation that draws random numbers, such as dropout, draw them from the device's generator."""
    leaves = tree_leaves((args, kwargs))
    given = any(isinstance(leaf, torch._C.Generator) for leaf in leaves)
    if torch.Tag.nondeterministic_seeded not in func.tags or given or device.type != "cuda":
        yield
        return
    own = torch.cuda.default_generators[device.index]
    with DRAWING:
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(state)


def _wide_product(args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """The product of half-precision factors in fp32, which only CUDA has (mm and addmm with a type)."""
    *added, left, right, _ = args
    if left.dtype != right.dtype or left.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"a product with another type needs two halves: {left.dtype}, {right.dtype}")
    product = left.float() @ right.float()
    result = product + added[0] if added else product
    return kwargs["out"].copy_(result) if kwargs.get("out") is not None else result


def _device_of(
    func: Any, args: Any, tensors: list[torch.Tensor], target: torch.device | None
) -> torch.device:
    """The device of the result."""
    packet = func.overloadpacket
    if packet in COPIES:
        first = args[0][0] if isinstance(args[0], list) else args[0]
        return target or first.device
    if packet in INDEXING:
        _check_indices(func, args)
        return args[0].device
    if not tensors:
        return target or CPU
    device = _common_device(func, tensors)
    return target or device


def _check_indices(func: Any, args: Any) -> None:
    device = args[0].device
    places = {index.device for index in args[1] if index is not None}
    if len(args) > 2 and args[2].dim() > 0:
        places |= {args[2].device} if args[2].device != CPU else set()
        if args[2].device != device:
            raise DeviceMismatch(f"{func}: values on {args[2].device} for a tensor on {device}")
    if places - {device, CPU}:
        raise DeviceMismatch(f"{func}: indices on {places} of a tensor on {device}")


def _common_device(func: Any, tensors: list[torch.Tensor]) -> torch.device:
    """The one device of tensors; numbers (tensors without dimensions) on the CPU go with any."""
    devices = {tensor.device for tensor in tensors if tensor.dim() > 0 or tensor.device != CPU} or {CPU}
    if len(devices) > 1:
        shapes = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise DeviceMismatch(f"{func}: {shapes}")
    (device,) = devices
    return device


def _is_unrepeatable(packet: Any, args: Any) -> bool:
    listed = any(packet in packets for packets in NONDETERMINISTIC.values())
    return listed and (packet not in ONLY_OF_TYPE or ONLY_OF_TYPE[packet](args[0]))


def _record(packet: Any, args: Any, device: torch.device) -> None:
    if device.type == "cuda":
        RECORD.operations[str(device)] += 1
        if _is_unrepeatable(packet, args):
            UNREPEATABLE.append(str(packet))
        if packet in PRODUCTS:
            dtype = args[PRODUCTS[packet]].dtype
            RECORD.products[str(dtype).removeprefix("torch.")] += 1
            if dtype == torch.float32:
                RECORD.precisions[torch.backends.cuda.matmul.fp32_precision] += 1


def _device(name: Any) -> torch.device | None:
    """A device with its number."""
    if name is None:
        return None
    device = torch.device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an operation consists of others, into which autograd divides it except in inference mode."""
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    return has_kernel


GENERATORS: dict[int, torch.device] = {}
"""The devices of generators by address: operations get another Python object of a generator."""
CpuGenerator = torch.Generator


class ClaimedGenerator(torch.Generator):
    """A generator that claims a device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        place = _device(device)
        if place is None or place.type != "cuda":
            return CpuGenerator(device)
        generator = super().__new__(cls)
        GENERATORS[generator._cdata] = place
        return generator

    def __del__(self) -> None:
        GENERATORS.pop(self._cdata, None)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _claimed(self)


def _claimed(generator: torch._C.Generator) -> torch.device:
    return GENERATORS.get(generator._cdata, CPU)


def _visible(count: int) -> int:
    """The number of devices that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if named is None else len([name for name in named.split(",") if name])


def _cuda_functions(count: int) -> dict[str, Any]:
    """What torch.cuda says of so many devices of 80 GiB."""
    generators = tuple(ClaimedGenerator(f"cuda:{n}") for n in range(MAX_DEVICES))
    current = threading.local()

    def index(device: Any) -> int:
        place = _device("cuda" if device is None else device)
        return 0 if place is None else place.index

    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="claimed", total_memory=80 * GIB, major=8, minor=0, multi_processor_count=108, gcnArchName=""
        )

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: _visible(count) > 0,
        "is_initialized": lambda: True,
        "device_count": lambda: _visible(count),
        "current_device": lambda: getattr(current, "index", 0),
        "set_device": lambda device: setattr(current, "index", index(device)),
        "get_device_properties": properties,
        "get_device_name": lambda device=None: "claimed",
        "get_device_capability": lambda device=None: (8, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (70 * GIB, 80 * GIB),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "default_generators": generators,
        "manual_seed": lambda seed: generators[0].manual_seed(seed),
        "manual_seed_all": lambda seed: [one.manual_seed(seed) for one in generators],
        "get_rng_state": lambda device="cuda": generators[index(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[index(device)].set_state(state),
        "get_rng_state_all": lambda: [one.get_state() for one in generators],
    }


@contextlib.contextmanager
def claimed_devices(count: int) -> Iterator[Record]:
    """Let this thread, and threads that start meanwhile, find so many CUDA devices."""
    start: Callable[[threading.Thread], None] = threading.Thread.run

    def run_thread(thread: threading.Thread) -> None:
        with _lifted_on_the_cpu(), Claims():
            start(thread)

    RECORD.clear()
    with contextlib.ExitStack() as stack:
        for name, value in _cuda_functions(count).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", ClaimedGenerator))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_thread))
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # Module.to keeps the ties of parameters
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        stack.enter_context(_lifted_on_the_cpu())
        stack.enter_context(Claims())
        yield RECORD


@contextlib.contextmanager
def _lifted_on_the_cpu() -> Iterator[None]:
    """Let torch.tensor make values on the CPU before it copies them to a device."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
