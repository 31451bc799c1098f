"""The cost model's formula as machine code, made from its Python source: every choice estimates many candidates.

The functions in `TRANSLATED` are plain arithmetic. `source` translates them to C, statement by statement, so that there
is one formula; the machine's C compiler makes a library of it once, which is kept beside the kernels. A number is a
double in C, as the fields of a `Model` are: results are the same to the last bit while products of sizes are exact,
below 2^53. Where there is no C compiler, `library` gives None, and Python computes.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import inspect
import math
import platform
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cutegemm.choice import cost_formula, cost_model, learned
from cutegemm.choice.compare import TOGETHER, splits_of
from cutegemm.choice.cost_formula import fourth_mean, launch_seconds, tiles_along, tiles_seconds
from cutegemm.choice.cost_model import FIELDS, TURNS, Model
from cutegemm.errors import GemmError
from cutegemm.run.cache_dir import cache_dir
from cutegemm.run.kernel_store import Artefacts, KernelStore

TRANSLATED: tuple[Callable[..., Any], ...] = (
    fourth_mean, tiles_seconds, launch_seconds, tiles_along, Model.sums_of, Model.wanted, Model.straddling,
    Model.traits, Model.bound, Model.values,
)  # fmt: skip
MOST = 4096
"""Candidates that the library compares at most; a shortlist has some dozens. Each with K split counts as `TURNS`."""
NAMED = {
    "LEARNED": "_learned",
    "LEAST_FACTOR": "_least_factor",
    "SPLITS": "_splits",
    "PARTS": "_parts",
    "SUMS": "_sums",
    "FIXED": "_fixed",
    "LAUNCH": "_launch",
}
"""The fields that C code names: those that `Model.divided` reads or changes, the place of the family's trees, and their
least correction."""
FLAGS = ("-O2", "-shared", "-fPIC", "-ffp-contract=off", f"-DMOST={MOST}")
"""Without fused multiply-adds, which round otherwise than Python does."""

_DRIVER = """
/* A model and, where it is not 0, the splits of K that it is to have beside. */
struct candidate { const double *model; double splits; };

static const double *divided(struct candidate one, double *room) {
  if (one.splits == 0) return one.model;
  memcpy(room, one.model, FIELDS * sizeof(double));
  room[SPLITS] = one.splits, room[PARTS] = one.splits * one.model[PARTS];
  room[SUMS] = sums_of(one.model, one.splits), room[FIXED] = one.model[LAUNCH] + room[SUMS];
  return room;
}

/* As compare.splits_of; returns how many. */
static int splits_of(const double *model, const double *numbers, double m, double n, double k, double batch,
                     double *found) {
  int count = 0;
  for (int turn = 0; turn < TURNS; ++turn) {
    double most = wanted(model, m, n, k, batch, turn), splits = 0;
    for (int i = 0; numbers[i] != 0 && numbers[i] <= most; ++i) splits = numbers[i];
    int place = 0;
    while (place < count && found[place] < splits) ++place;
    if (splits == 0 || (place < count && found[place] == splits)) continue;
    for (int i = count++; i > place; --i) found[i] = found[i - 1];
    found[place] = splits;
  }
  return count;
}

/* Seconds of each of up to TOGETHER candidates. `best`: as of `Model.values`. */
static void estimate(const struct candidate *candidates, int count, double m, double n, double k, double batch,
                     double best, double *seconds) {
  struct launch launches[TOGETHER];
  const double *models[TOGETHER];
  double room[FIELDS];
  for (int i = 0; i < count; ++i) {
    noted = &launches[i], noted->place = 0, models[i] = candidates[i].model;
    seconds[i] = values(divided(candidates[i], room), m, n, k, batch, best);
  }
  correct(launches, models, count, seconds);
}

/* As compare.cheapest, of the models of a list and those of another with K split. Returns the place of the cheapest
   in both lists, -1 without any. `results` has the seconds to beat, and gets those of the cheapest and its splits. */
int cheapest(const double *const *models, int count, const double *const *split, const double *const *numbers,
             int split_count, double m, double n, double k, double batch, double close, double *results) {
  struct candidate candidates[MOST], compared[TOGETHER];
  int places[MOST], all = 0, chosen = -1;
  double least[MOST], room[FIELDS], found[TURNS], taken[TOGETHER], share = 0, seconds = results[0];
  for (int i = 0; i < count; ++i) candidates[all] = (struct candidate){models[i], 0}, places[all++] = i;
  for (int i = 0; i < split_count; ++i) {
    int many = splits_of(split[i], numbers[i], m, n, k, batch, found);
    for (int j = 0; j < many; ++j)
      candidates[all] = (struct candidate){split[i], found[j]}, places[all++] = count + i;
  }
  if (all) share = straddling(candidates[0].model, m, n, k);
  for (int i = 0; i < all; ++i) least[i] = bound(divided(candidates[i], room), m, n, k, batch, share);
  for (int many = TOGETHER; many == TOGETHER;) {
    int numbered[TOGETHER];
    for (many = 0; many < TOGETHER; ++many) {
      int next = -1;
      for (int i = 0; i < all; ++i)
        if (least[i] < close * seconds && (next < 0 || least[i] < least[next])) next = i;
      if (next < 0) break;
      least[next] = INFINITY, numbered[many] = next, compared[many] = candidates[next];
    }
    estimate(compared, many, m, n, k, batch, seconds, taken);
    for (int i = 0; i < many; ++i)
      if (taken[i] < seconds) seconds = taken[i], chosen = numbered[i];
  }
  results[0] = seconds, results[1] = chosen < 0 ? 0 : candidates[chosen].splits;
  return chosen < 0 ? -1 : places[chosen];
}

/* Estimates that are put off until there are TOGETHER of them; each is to be the least of its place in `found`. */
struct waiting { struct candidate candidates[TOGETHER]; double *found[TOGETHER]; int count; };

static double waited(struct waiting *all, double m, double n, double k, double batch, double far, double best) {
  double taken[TOGETHER];
  estimate(all->candidates, all->count, m, n, k, batch, far * best, taken);
  for (int i = 0; i < all->count; ++i)
    *all->found[i] = fmin(*all->found[i], taken[i]), best = fmin(best, taken[i]);
  all->count = 0;
  return best;
}

/* Fills `found` with the estimate of each model of both lists, those of the second with the best of their splits; what
   is certainly `far` times the best or more may be infinite. */
void estimates(const double *const *models, int count, const double *const *split, const double *const *numbers,
               int split_count, double m, double n, double k, double batch, double far, double *found) {
  double room[FIELDS], splits[TURNS], best = INFINITY, share = count + split_count ?
    straddling(count ? models[0] : split[0], m, n, k) : 0;
  struct waiting all = {.count = 0};
  int first = 0;
  for (int i = 0; i < count; ++i) {
    found[i] = bound(models[i], m, n, k, batch, share);
    if (found[i] < found[first]) first = i;
  }
  if (count) estimate(&(struct candidate){models[first], 0}, 1, m, n, k, batch, INFINITY, &best);
  for (int i = 0; i < count + split_count; ++i) {
    int whole = i < count, many = whole ? 1 : splits_of(split[i - count], numbers[i - count], m, n, k, batch, splits);
    double least = whole ? found[i] : 0;
    found[i] = INFINITY;
    for (int j = 0; j < many; ++j) {
      struct candidate one = {whole ? models[i] : split[i - count], whole ? 0 : splits[j]};
      if (!whole) least = bound(divided(one, room), m, n, k, batch, share);
      if (least >= far * best) continue;
      all.candidates[all.count] = one, all.found[all.count++] = &found[i];
      if (all.count == TOGETHER) best = waited(&all, m, n, k, batch, far, best);
    }
  }
  waited(&all, m, n, k, batch, far, best);
}
"""


class Group:
    """Models of one signature, as a choice compares them again and again.

    Args:
        models: of candidates as they are. split: of those that may have splits of K, here without any. numbers: for
            each of these the splits that it may have, ascending.
    """

    def __init__(
        self, models: Sequence[Model], split: Sequence[Model] = (), numbers: Sequence[Sequence[int]] = ()
    ) -> None:
        self.models = models
        self._numbers, self._split = numbers, split
        self._library = library()
        self._fits = self._library is not None and len(models) + TURNS * len(split) <= MOST
        if self._library is not None:
            ended = [(ctypes.c_double * (len(each) + 1))(*each) for each in numbers]  # a 0 ends each
            self._ended = ended  # the library has their addresses alone
            lists = (ctypes.c_void_p * len(split))(*map(ctypes.addressof, ended))
            self._given = _pointers(models), len(models), _pointers(split), lists, len(split)

    def cheapest(
        self, m: int, n: int, k: int, batch: int, close: float, beaten: float = math.inf
    ) -> tuple[float, int | None, int] | None:
        """(seconds, place, splits) of the cheapest: its place among the models and, behind them, those with K split;
        splits are 0 of the former. (beaten, None, 0) without any; None where there is no library.

        Args:
            close, beaten: as of `compare.cheapest`.
        """
        if not self._fits:
            return None
        results = (ctypes.c_double * 2)(beaten)
        place = self._library.cheapest(*self._given, m, n, k, batch, close, ctypes.addressof(results))
        return results[0], None if place < 0 else place, int(results[1])

    def estimates(self, m: int, n: int, k: int, batch: int = 1, far: float = math.inf) -> list[float]:
        """Seconds of each of the models, then of each of those with K split, with the best of its splits; inf for what
        wants none. What is certainly `far` times the least or more may be inf, or lack what was learned."""
        if self._library is not None:
            found = (ctypes.c_double * (len(self.models) + len(self._split)))()
            self._library.estimates(*self._given, m, n, k, batch, far, ctypes.addressof(found))
            return list(found)
        seconds = [model.seconds(m, n, k, batch) for model in self.models]
        for whole, numbers in zip(self._split, self._numbers, strict=True):
            divided = map(whole.divided, splits_of(whole, numbers, m, n, k, batch))
            seconds.append(min((one.seconds(m, n, k, batch) for one in divided), default=math.inf))
        return seconds


def _pointers(models: Sequence[Model]) -> Any:
    return (ctypes.c_void_p * len(models))(*(ctypes.addressof(model.numbers) for model in models))


@functools.cache
def library() -> Any:
    """The library, which has `cheapest` and `estimates`, or None where it cannot be made."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    try:
        text = source()
        key = {"source": text, "flags": " ".join(FLAGS), "machine": platform.machine()}
        store = KernelStore(cache_dir() / "cost_model")
        entry = store.get_or_build(key, lambda: Artefacts({"cost_model.so": _compiled(compiler, text)}, {}))
        # Not CDLL, which would let go of the interpreter's lock for each microsecond.
        found = ctypes.PyDLL(str(entry.file("cost_model.so")))
    except (OSError, LookupError, subprocess.SubprocessError, GemmError):  # the last where nothing can be written
        return None
    pointers, count = ctypes.c_void_p, ctypes.c_int
    for function in (found.cheapest, found.estimates):
        function.argtypes = pointers, count, pointers, pointers, count, *[ctypes.c_double] * 5, pointers
    found.estimates.restype = None
    return found


def _compiled(compiler: str, text: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="cutegemm-") as folder:
        made = Path(folder, "cost_model.so")
        command = [compiler, *FLAGS, "-x", "c", "-", "-o", str(made), "-lm"]
        subprocess.run(command, input=text, text=True, capture_output=True, check=True, timeout=60)
        return made.read_bytes()


def source() -> str:
    """The C source of the library."""
    tables = (
        f"static const double {name}[] = {{{', '.join(map(repr, value))}}};"
        for name, value in {**vars(cost_formula), **vars(cost_model)}.items()
        if isinstance(value, tuple) and all(isinstance(number, float) for number in value)
    )
    sizes = [f"enum {{ FIELDS = {len(FIELDS)}, TURNS = {TURNS}, TOGETHER = {TOGETHER} }};"]
    sizes += [f"enum {{ {name} = {FIELDS.index(field)} }};" for name, field in NAMED.items()]
    head = "#include <math.h>", "#include <string.h>"
    functions = [_function(each) for each in TRANSLATED]
    functions.insert(TRANSLATED.index(Model.traits) + 1, learned.C_SOURCE)
    return "\n".join([*head, *tables, *sizes, learned.c_tables(), *functions, _DRIVER])


def _function(function: Callable[..., Any]) -> str:
    """A static function of doubles; a model is an array of its `FIELDS`, `found` one that it fills in. Of several
    results it returns the first."""
    (code,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(code, ast.FunctionDef)
    names = [argument.arg for argument in code.args.args]
    kinds = {"self": "const double *", "found": "double *"}
    typed = [f"{kinds.get(name, 'double ')}{name}" for name in names]
    stored = (node.id for node in ast.walk(code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    locals_ = [f"double {name} = 0;" for name in dict.fromkeys(stored) if name not in names]
    body = [*locals_, *(line for statement in code.body for line in _statement(statement))]
    if not isinstance(code.body[-1], ast.Return):
        body.append("return 0;")
    return f"static double {code.name}({', '.join(typed)}) {{\n{textwrap.indent(chr(10).join(body), '  ')}\n}}"


def _statement(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # the docstring
        return []
    if isinstance(node, ast.Return) and node.value is not None:
        first = node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value
        return [f"return {_value(first)};"]
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return [f"{node.target.id} = {_operation(node.op, node.target.id, _value(node.value))};"]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [f"{_value(node.target)} = {_value(node.value)};"]
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        (target,) = node.targets
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        else:
            pairs = [(target, node.value)]
        assigned = {name.id for name, _ in pairs if isinstance(name, ast.Name)}
        read = {part.id for _, value in pairs[1:] for part in ast.walk(value) if isinstance(part, ast.Name)}
        if len(pairs) == 1 or not assigned & read:
            return [f"{_value(name)} = {_value(value)};" for name, value in pairs]
    if isinstance(node, ast.If):
        then, other = ([line for inner in body for line in _statement(inner)] for body in (node.body, node.orelse))
        return [f"if ({_value(node.test)}) {{", *then, "} else {", *other, "}"] if other else [
            f"if ({_value(node.test)}) {{", *then, "}"
        ]  # fmt: skip
    raise _untranslated(node)


def _untranslated(node: ast.AST) -> NotImplementedError:
    return NotImplementedError(f"cost_model: {ast.unparse(node)!r} is none of the forms that are translated to C")


_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "({} + {})", ast.Sub: "({} - {})", ast.Mult: "({} * {})", ast.Div: "({} / {})",
    ast.FloorDiv: "floor({} / {})", ast.Mod: "fmod({}, {})", ast.Pow: "pow({}, {})", ast.Lt: "({} < {})",
    ast.LtE: "({} <= {})", ast.Gt: "({} > {})", ast.GtE: "({} >= {})", ast.Eq: "({} == {})", ast.And: " && ",
    ast.Or: " || ", ast.USub: "(-{})", ast.Not: "(!{})",
}  # fmt: skip
"""What an operator is in C; quotients and remainders are of integers that are not negative, but for -(-x // y)."""


def _operation(operator: ast.AST, *operands: str) -> str:
    return _OPERATORS[type(operator)].format(*operands)


def _value(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=bool() | int() | float() as number):
            return repr(float(number))
        case ast.Name(id=name):
            known = getattr(cost_model, name, getattr(cost_formula, name, None))
            return repr(float(known)) if isinstance(known, int | float) else name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return f"self[{FIELDS.index(name)}]"
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            return _operation(op, _value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand):
            return _operation(op, _value(operand))
        case ast.BoolOp(op=op, values=values):  # as a condition
            return f"({_OPERATORS[type(op)].join(map(_value, values))})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({_value(test)} ? {_value(body)} : {_value(orelse)})"
        case ast.Subscript(value=ast.Name(id=name), slice=place):
            return f"{name}[(int){_value(place)}]"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr=name), args=args):
            return f"{name}({', '.join(map(_value, args))})"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=args):
            return f"{name}({', '.join(['self', *map(_value, args)])})"
        case ast.Call(func=ast.Name(id="min"), args=[left, right]):
            return f"fmin({_value(left)}, {_value(right)})"
        case ast.Call(func=ast.Name(id=name), args=args):
            parameters = list(inspect.signature(getattr(cost_formula, name)).parameters.values())[len(args) :]
            return f"{name}({', '.join([*map(_value, args), *(repr(float(p.default)) for p in parameters)])})"
    raise _untranslated(node)
