"""How a product is computed: the options of `gemm` that its layers hand on as one, without looking at them.

All that is common to them is said here: what they accept, how torch's operators carry them, and what becomes of them
where other tensors stand in for the operands. A further one is a field of `How` with a row of `ACCEPTED`; beside that
`gemm` takes and describes it, and what it is for reads it. Where a call is repeated, or may be traced, they travel as
a plain tuple in the order of the fields, because making a `How` takes longer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from cutegemm import backend as backends
from cutegemm.problem import PRECISIONS, request
from cutegemm.run import float32


class How(NamedTuple):
    """See the module docstring; `gemm` says what each of them means."""

    precision: str | None = None
    backend: str = "auto"
    config: Any = None
    constant: str | None = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> How:
        """Those among the options of `gemm`, of which every one is named."""
        return cls(*(options[name] for name in cls._fields))

    def check(self) -> None:
        """Raises ValueError for what planning would refuse, as far as it is found without a plan."""
        request.check_precision(self.precision)
        backends.check_name(self.backend)
        if self.config is not None:
            backends.check_config(self.config, self.backend)
        if self.constant is not None and not request.is_one_of(self.constant, ACCEPTED["constant"]):
            raise ValueError(f"constant: got {request.shown(self.constant)}, accepted are None, 'a' and 'b'")

    def for_copies(self, names: Collection[str] = ("a", "b")) -> How:
        """The options where other tensors stand in for these operands: the kernel just in front may have written them,
        so that none of them is constant.
        """
        return self._replace(constant=None) if self.constant in names else self

    def refuse_distributed(self) -> None:
        """Raises ValueError for what cannot be promised of DTensors."""
        refuse_promise("constant", self.constant)

    def posed(self, asked: Any) -> Any:
        """The `Request` or `ProgramRequest` with what is promised of its operands. Raises ValueError as `check`."""
        self.check()
        operand = self.for_copies(asked.copied).constant
        if operand is None:
            return asked
        if asked.swapped:
            operand = {"a": "b", "b": "a"}[operand]
        return asked._replace(problem=replace(asked.problem, constant=operand))


ACCEPTED: dict[str, tuple[str | None, ...]] = {
    "precision": (None, *PRECISIONS), "backend": backends.NAMES, "config": (None,), "constant": (None, "a", "b"),
}  # fmt: skip
"""The values of each option with which the host code in C++ serves a call. Calls with any other are left to Python,
where a configuration is accepted too, and `How.check` says what is wrong with the rest."""

_EVERYWHERE = 3
"""So many options stand together in every operator. The others came later and stand last, where calls by position and
saved graphs do not miss them."""
_DEFAULTS = tuple(How())


def schema(own: str = "") -> str:
    """What an operator's schema says of these options, all of which are texts there.

    own: an argument of the operator that stands between them. If it has no default, those before it have none.
    """
    texts = [f"str{'?' if default is None else ''} {name}={default!r}" for name, default in How._field_defaults.items()]
    first = ", ".join(texts[:_EVERYWHERE])
    if own and "=" not in own:
        first = ", ".join(text.partition("=")[0] for text in texts[:_EVERYWHERE])
    return ", ".join([first, *([own] if own else []), *texts[_EVERYWHERE:]])


def passed(how: tuple[Any, ...], *own: Any) -> tuple[Any, ...]:
    """The options as an operator takes them, with an argument of its own as in `schema`."""
    precision, backend, config, *later = how
    return (precision, backend, carried(config), *own, *later)


def split(given: tuple[Any, ...], own: Any = None) -> tuple[How, Any]:
    """What `passed` was made of. Torch leaves away last arguments that have their defaults.

    own: the default of the operator's own argument.
    """
    mine = given[_EVERYWHERE] if len(given) > _EVERYWHERE else own
    return How(*given[:_EVERYWHERE], *given[_EVERYWHERE + 1 :]), mine


def settled(a: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """All options of an operator's call with that operand, of which the last may be left away, as a plain tuple."""
    how = given + _DEFAULTS[len(given) :]
    if how[0] is None and float32.in_use:
        how = (float32.default(a, how[1]), *how[1:])
    return how


def carried(config: Any) -> str | None:
    """A configuration as an operator carries it: its text."""
    return config if config is None or isinstance(config, str) else str(config)


def refuse_promise(name: str, given: Any) -> None:
    """Raises ValueError where the argument `name` promises, of DTensors, that an operand is constant."""
    if given:
        raise ValueError(
            f"{name}: got {given!r} with DTensors, which may be gathered in front of the product; leave it away"
        )
