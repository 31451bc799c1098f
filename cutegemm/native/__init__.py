"""Host code in C++ for repeated calls of plain CUDA tensors, and Python where it is not there; see docs/host.md.

`gemm`, `linear`, `grouped_gemm`, `quantize`, `nn.SwiGLU`, `nn.Fp8Linear`, `nn.Fp8SwiGLU`, `moe` and `nn.Fp8MoE` ask the
functions here first. These look up the launches that were prepared for a call with such shapes, dtypes and options. If
there are any, they enqueue them. Otherwise they return None, and Python computes the call. The operators
torch.ops.cutegemm.gemm, gemm_program, grouped_gemm, scaled_gemm, quantize, quantize_given, quantized_linear,
quantized_mlp and moe are served in the same way. The extension is compiled against the torch that is installed, once,
by a thread in the background that the first call of a kernel starts; no call waits for it.

Python tells it what may be done in its place: `tell` of launches that were planned, `forget` when plans are dropped,
`lend` of a workspace and `take_back`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from cutegemm import locks
from cutegemm.run.environment import is_on

gemm: Callable[..., Any] | None = None
"""gemm(a, b, c, alpha, beta, bias, activation, out, out_dtype, *how) -> D, or None: not here. how: as in `run.how`."""
linear: Callable[..., Any] | None = None
"""linear(x, weight, bias, activation, *how) -> D, or None: not here."""
program: Callable[..., Any] | None = None
"""program(number, a, b, operands, out_dtype, *how) -> the results of `gemm` with the epilogue program of that number,
which Python chooses, above 0. A product in groups has a number of its own, and its arrays in front of the operands.

None: not here. NotImplemented: not yet, because `tell` has not told of such a call.
"""
quantize: Callable[..., Any] | None = None
"""quantize(x, dtype, scaling, scale, backend) -> (values, scales), along the last dimension, in blocks of 1 x 128; None
and NotImplemented as `program`."""
scaled: Callable[..., Any] | None = None
"""scaled(a, b, scale_a, scale_b, bias, activation, out_dtype, *how) -> act(scales (a b) + bias), likewise."""
quantized_linear: Callable[..., Any] | None = None
"""quantized_linear(x, weight, weight_scale, input_scale, bias, scaling, activation, *how) -> the two in a row, with new
scales or the one given; None and NotImplemented as `program`. Both of its steps are told of by themselves."""
gated_mlp: Callable[..., Any] | None = None
"""gated_mlp(x, gate_up, down, number, *how) -> the result of `nn.SwiGLU`, whose gating is the program of that number,
likewise. Both products are told of by themselves."""
quantized_mlp: Callable[..., Any] | None = None
"""quantized_mlp(x, gate_up, gate_up_scale, down, down_scale, scaling, activation, *how) -> the result of
`nn.Fp8SwiGLU`, likewise."""
mixture: Callable[..., Any] | None = None
"""mixture(x, experts, weights, w_gate_up, w_down, b_gate_up, b_down, s_gate_up, s_down, activation, precision, backend)
-> the result of `moe`, and with scales of both weights of `nn.Fp8MoE`, likewise. activation: a name, or the number of
what is computed (`gating.number_of`)."""

FUNCTIONS = (
    "gemm", "linear", "program", "quantize", "scaled", "quantized_linear", "gated_mlp", "quantized_mlp", "mixture",
)  # fmt: skip
"""The names above, which are None while no extension serves."""

names: tuple[tuple[str | None, ...], ...] = ()
"""The activations that `gemm` takes, and what it takes as each of the options in `How`, of which it serves the calls;
`cutegemm.run.call` puts them here."""
gates: tuple[str, ...] = ()
"""The further activations of `quantized_linear`; `cutegemm.layer_operator` puts them here."""
of_quantize: tuple[tuple[str | None, ...], ...] = ()
"""What `quantize` takes as `scaling` and `backend`; `cutegemm.run.quantizing` puts it here."""
in_python: dict[str, Callable[..., Any]] = {}
"""What the extension calls in Python; the modules that have these functions put them here when they are imported. It
finds what it needs by name.

    plan(_, a, b, c, alpha, beta, bias, activation, out, out_dtype, *how)
        plans a call that `tell` has not told of, and tells it
    compute(_, a, b, c, alpha, beta, bias, activation, out, out_dtype, *how) -> D
        the operator gemm below autograd, without `out`
    record(keys, a, b, c, alpha, beta, bias, activation, out, out_dtype, *how) -> D
        the operator gemm for autograd, without `out`; keys: the number of a torch._C.DispatchKeySet
    gradients(...) -> (dA, dB, dC, dbias)
        see `cutegemm.pytorch.autograd.gradients_of_saved`
    scaled(tell, *arguments) -> D
        the operator scaled_gemm below autograd; tell: whether to tell the launches
    <name of another operator>(keys, tell, *arguments)
        that operator; keys: as above, or None below autograd
"""


class Launcher(NamedTuple):
    """What a kernel's `BoundLaunch` calls, for callers in C++.

    address: of a function of TVM-FFI's C interface. It takes the operands, the scalars, the stream, a workspace where
        there are `words` or `parts`, and the integers `behind`.
    words, parts: bytes of the workspace; see `cutegemm.cute.workspace`.
    """

    address: int
    words: int
    parts: int
    behind: tuple[int, ...]


class _State:
    """Where the extension stands."""

    def __init__(self) -> None:
        self.lock = locks.lock()
        self.begun = False
        self.why_not = "nothing has asked for it yet"
        self.module: Any = None
        self.asks_for_float32 = False
        self.thread: threading.Thread | None = None


_state = _State()


def want() -> None:
    """Starts making the extension, if nobody has: it is there for later calls, or `status` says why it is not.

    Raises ValueError where `CUTEGEMM_NATIVE` is neither 0 nor 1.
    """
    if _state.begun:
        return
    with _state.lock:
        if _state.begun:
            return
        wanted = is_on("CUTEGEMM_NATIVE", default=True)  # a bad one is an error for every new call
        _state.begun = True
        if not wanted:
            _state.why_not = "CUTEGEMM_NATIVE=0"
            return
        _state.why_not = "it is being compiled or loaded"
        _state.thread = threading.Thread(target=_make, name="cutegemm-native", daemon=True)
        _state.thread.start()


def wait() -> bool:
    """Has the extension made, and waits until it serves (True) or cannot be had (False); for benchmarks and tests."""
    want()
    if _state.thread is not None:
        _state.thread.join()
    return is_ready()


def _make() -> None:
    from cutegemm.native import build

    try:
        module = build.load(build.library())
        configure(module)
        module.serve_operators()
    except Exception as why:  # whatever it is: Python serves, and `explain` says this
        _state.why_not = str(why) or type(why).__name__
        return
    serve(module)


def configure(module: Any, stream: int = 0, capturing: int = 0) -> None:
    """Tells the extension the names of arguments and what it calls. stream, capturing: addresses of functions in place
    of CUDA's, with which it serves CPU tensors, for tests.
    """
    accepted = *names, *of_quantize, (*names[0], *gates)
    module.configure(accepted, in_python, stream, capturing)


def leave_float32_to_python() -> None:
    """The operator no longer serves products of float32 whose call gives no precision: `run.float32` decides it."""
    _state.asks_for_float32 = True
    if _state.module is not None:
        _state.module.leave_float32_to_python()


def serve(module: Any) -> None:
    """Lets calls ask this extension from now on, or none (None)."""
    _state.module = module
    if module and _state.asks_for_float32:
        module.leave_float32_to_python()
    globals().update({name: getattr(module, name) if module else None for name in FUNCTIONS})


def status() -> str:
    """What computes a repeated call on the host, for `explain`."""
    return "C++" if _state.module else f"Python; no C++: {_state.why_not}"


def is_ready() -> bool:
    """Whether there is an extension to tell of launches."""
    return _state.module is not None


def tell(function: str, arguments: tuple[Any, ...], how: tuple[Any, ...] | None) -> None:
    """Remembers what launches the call `function(*arguments)` of those above, and all like it.

    how: None where Python computes it. Else it depends on the function. A launcher is a tuple of the fields of a
        `Launcher`.
        gemm: the launcher, shape and torch dtype of D, and whether a and b are exchanged.
        program: what `cutegemm.run.fused.launch_of` gives, of the tensors a, b and those among the operands. For calls
            of the operator the program's text stands in place of its number.
        scaled: the same of the tensors a, b, bias, scale_a and scale_b. The activation may also be one of `gates`,
            with which a layer alone asks.
        quantize: the launchers in order, shape and strides of the values, the shape of the scales (None: they are
            given), and how many partial maxima the launches exchange.
        quantized_mlp: how x is quantized, as of `quantize`; how the first product is computed, as of `scaled`; how its
            result is quantized, None where its second result are the scales; and how the second product is computed.
        mixture: what `cutegemm.mixing.Settings.launches` gives.
    """
    if _state.module is not None:
        getattr(_state.module, f"install_{function}")(*arguments, how)


def forget() -> None:
    """Drops all launches."""
    if _state.module is not None:
        _state.module.forget()


def lend(device: int, stream: int, memory: Any, parts_at: int, words: int, parts: int) -> None:
    """Lets launches on that stream use a workspace: its words end and its parts begin at `parts_at`; sizes in bytes."""
    if _state.module is not None:
        _state.module.lend(device, stream, memory, parts_at, words, parts)


def take_back() -> None:
    """Takes all workspaces back."""
    if _state.module is not None:
        _state.module.take_back()
