"""GloVe's published update, record by record, as compiled loops over `GloveModel` memory.

For a record (word, context, count), with f = min(1, (count / x_max) ** alpha) and rate r:

    d = <v, u> + b + a - log(count)      cost += f d^2 / 2, before the update
    each item of v:  t = r f d u;   v -= t / sqrt(s);   s += t^2         and of u, with v as it was
    each bias:       t = f d;       b -= t / sqrt(s);   s += t^2

So it stands in version 1.2 of the published tools, whose costs this gives: the accumulator divides before it grows, it
holds squares of gradients times rate, and biases move at rate 1.

A block of records goes in pieces: logarithms and weights of a piece are computed side by side, by series (libm takes
one at a time), then its records are visited in order, each asking for the rows of a record further on. Loops over a
row are written as vector instructions: LLVM's own vectoriser would leave a remainder for most lengths.

The batch rule: with the parameters as they were before the batch, every record gives its rows a gradient t as above. A
row's are summed to T (not to their mean: a short batch moves its rows by what its records say), and it takes one step
of AdaGrad in the order of Duchi et al. (2011) and of torch: s += T^2; v -= T / sqrt(s). So no item moves by more than 1
in a step. A row's gradient lies in as many items as its accumulators would take: `lanes` of the vector, then the bias.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from manyhands.native.bits import converter
from manyhands.native.decorators import helper, inlined, njit
from manyhands.native.group.gate import CompiledGate, enter, leave
from manyhands.native.waiting import REACHED

PIECE = 256  # records whose logarithms and weights are computed at once; they stay in the first-level cache
STEP = 32  # records that a worker takes in one go where workers take turns
_AHEAD, _AHEAD_BYTES = 6, 3200  # how far ahead of its use a row is asked for: records and bytes, at most
_LANES = 8
_LINE = 64
_FAST = ("fast",)
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10


def _vector(scalar: Any) -> Any:
    """8 items of numba's type `scalar`, as LLVM has them, and their bytes."""
    item = ir.FloatType() if scalar == types.float32 else ir.DoubleType()
    return ir.VectorType(item, _LANES), scalar.bitwidth // 8


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


@intrinsic  # type: ignore[untyped-decorator]
def dot(_typing: Any, _one: Any, _other: Any, _lanes: Any, like: Any) -> Any:
    """The inner product of `lanes` items (a multiple of 8) at two addresses, of the type of `like`."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind, size = _vector(like)
        total = cgutils.alloca_once_value(builder, ir.Constant(kind, [0.0] * _LANES))
        step = ir.Constant(args[2].type, _LANES)
        with cgutils.for_range_slice(builder, ir.Constant(args[2].type, 0), args[2], step) as (index, _):
            shift = builder.mul(index, ir.Constant(index.type, size))
            first = _load(builder, builder.add(args[0], shift), kind, size * _LANES)
            second = _load(builder, builder.add(args[1], shift), kind, size * _LANES)
            product = builder.fmul(first, second, flags=_FAST)
            builder.store(builder.fadd(builder.load(total), product, flags=_FAST), total)
        name, taken = f"llvm.vector.reduce.fadd.v{_LANES}f{size * 8}", [kind.element, kind]
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind.element, taken), name)
        return builder.call(function, [ir.Constant(kind.element, 0.0), builder.load(total)], fastmath=_FAST)

    return like(types.int64, types.int64, types.int64, like), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _update(_typing: Any, _one: Any, _other: Any, _lanes: Any, _accumulators: Any, scale: Any) -> Any:
    """Move `lanes` items at two addresses along each other times `scale`, each divided by the root of its square sum.

    Those lie `accumulators` bytes after the items, without the 1 that they begin with.
    """

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind, size = _vector(scale)
        align, name = size * _LANES, f"llvm.sqrt.v{_LANES}f{size * 8}"
        root = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name)
        factor: Any = ir.Constant(kind, ir.Undefined)
        for lane in range(_LANES):
            factor = builder.insert_element(factor, args[4], ir.Constant(ir.IntType(32), lane))
        step = ir.Constant(args[2].type, _LANES)
        ones = ir.Constant(kind, [1.0] * _LANES)

        def moved(value: Any, slope: Any, squares: Any) -> Any:
            total = builder.fadd(squares, ones, flags=_FAST)
            root_of = builder.call(root, [total], fastmath=_FAST)
            return builder.fsub(value, builder.fdiv(slope, root_of, flags=_FAST), flags=_FAST)

        def grown(squares: Any, slope: Any) -> Any:
            return builder.fadd(squares, builder.fmul(slope, slope, flags=_FAST), flags=_FAST)

        with cgutils.for_range_slice(builder, ir.Constant(args[2].type, 0), args[2], step) as (index, _):
            shift = builder.mul(index, ir.Constant(index.type, size))
            places = [builder.add(args[0], shift), builder.add(args[1], shift)]
            sums = [builder.add(place, args[3]) for place in places]
            first, second = (_load(builder, place, kind, align) for place in places)
            first_sum, second_sum = (_load(builder, place, kind, align) for place in sums)
            first_slope = builder.fmul(factor, second, flags=_FAST)
            second_slope = builder.fmul(factor, first, flags=_FAST)
            _store(builder, moved(first, first_slope, first_sum), places[0], align)
            _store(builder, moved(second, second_slope, second_sum), places[1], align)
            _store(builder, grown(first_sum, first_slope), sums[0], align)
            _store(builder, grown(second_sum, second_slope), sums[1], align)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, scale), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_typing: Any, _address: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        taken = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, taken, "llvm.prefetch.p0")
        hints = [ir.Constant(word, hint) for hint in (1, 3, 1)]  # to write, keep close, data
        builder.call(function, [builder.inttoptr(args[0], pointer), *hints])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


_INT, _DOUBLE = types.int64, types.float64
_bits_of = converter(_DOUBLE, _INT, lambda builder, value: builder.bitcast(value, ir.IntType(64)))
_float_of = converter(_INT, _DOUBLE, lambda builder, value: builder.bitcast(value, ir.DoubleType()))
_HALF_ROOT = 0x3FE6A09E667F3BCD  # the bits of the root of 1/2
_ROUND = 6755399441055744.0  # 1.5 * 2^52: adding it rounds to an integer, which the low bits then are
_ROUND_BITS = 0x4338000000000000
_NOTHING = np.empty(0, np.int32), np.empty(0, np.float64)


@inlined(error_model="numpy")
def _log(value: float) -> float:
    """The natural logarithm of a positive normal number: 2^k m with m near 1, and the series of atanh((m-1)/(m+1))."""
    power = (_bits_of(value) - _HALF_ROOT) >> 52
    near_one = _float_of(_bits_of(value) - (power << 52))
    k = _float_of(power + _ROUND_BITS) - _ROUND
    s = (near_one - 1.0) / (near_one + 1.0)
    z = s * s
    series = 2 / 21 + z * (2 / 23 + z * (2 / 25))
    series = 2 / 15 + z * (2 / 17 + z * (2 / 19 + z * series))
    series = 2 / 9 + z * (2 / 11 + z * (2 / 13 + z * series))
    series = 2 / 3 + z * (2 / 5 + z * (2 / 7 + z * series))
    return k * _LN2_HIGH + (2.0 * s + (s * z * series + k * _LN2_LOW))  # type: ignore[no-any-return]


@inlined(error_model="numpy")
def _exp(value: float) -> float:
    """The exponential of a number from -700 to 0: 2^k e^r with |r| at most log(2)/2, and the series of e^r."""
    shifted = value * 1.44269504088896338700 + _ROUND
    k = shifted - _ROUND
    r = (value - k * _LN2_HIGH) - k * _LN2_LOW
    series = 1 / 39916800 + r * (1 / 479001600 + r * (1 / 6227020800))
    series = 1 / 40320 + r * (1 / 362880 + r * (1 / 3628800 + r * series))
    series = 1 / 120 + r * (1 / 720 + r * (1 / 5040 + r * series))
    series = 1.0 + r * (1.0 + r * (0.5 + r * (1 / 6 + r * (1 / 24 + r * series))))
    return _float_of(_bits_of(series) + ((_bits_of(shifted) - _ROUND_BITS) << 52))  # type: ignore[no-any-return]


@njit(nogil=True, error_model="numpy")
def prepare(counts: Any, begin: int, logs: Any, weights: Any, settings: Any) -> None:
    """Logarithms and weights of as many records as fit; `counts` holds a record's count at every odd place."""
    alpha, log_max = settings[1], np.log(settings[0])
    for i in range(logs.size):
        log = _log(counts[2 * (begin + i) + 1])
        logs[i] = log
        weights[i] = _exp(max(min(alpha * (log - log_max), 0.0), -700.0))


@njit(nogil=True, inline="always")
def _is_bad(ids: Any, counts: Any, i: int, vocabulary_size: int) -> bool:
    word, context, count = ids[4 * i], ids[4 * i + 1], counts[2 * i + 1]
    inside = (word >= 1) & (word <= vocabulary_size) & (context >= 1) & (context <= vocabulary_size)
    return not (inside & (count >= 1e-300) & (count <= 1e300))


@njit(cache=True, nogil=True)
def first_bad(ids: Any, counts: Any, vocabulary_size: int) -> int:
    """The first record whose ids are not from 1 to `vocabulary_size` or whose count is no positive number; or -1."""
    bad = 0
    for i in range(counts.size // 2):  # without a way out, so that it is vectorised
        bad += _is_bad(ids, counts, i, vocabulary_size)
    if bad:
        for i in range(counts.size // 2):
            if _is_bad(ids, counts, i, vocabulary_size):
                return i
    return -1


@inlined()
def _ask_for(row: int, used: int, squares: int) -> None:
    """Prefetch a row: `used` bytes of parameters, and as many of accumulators from `squares` on."""
    for line in range(0, used, _LINE):
        _prefetch(row + line)
        _prefetch(row + squares + line)


@helper(error_model="numpy", fastmath=True)
def _visit(values: Any, ids: Any, begin: int, logs: Any, weights: Any, shape: Any, rate: float) -> float:
    """Take the records from `begin` on in order, as many as there are logarithms; the sum of their costs."""
    vocabulary_size, lanes, accumulators, width = shape[0], shape[1], shape[2], shape[3]
    base, size = values.ctypes.data, values.itemsize
    used, row_bytes, squares = (lanes + 1) * size, width * size, accumulators * size
    zero, one = values.dtype.type(0), values.dtype.type(1)
    distance = max(1, min(_AHEAD, _AHEAD_BYTES // (2 * used)))  # long rows bring their own prefetching
    cost, last = 0.0, ids.size // 4 - 1
    for i in range(logs.size):
        ahead = 4 * min(begin + i + distance, last)
        _ask_for(base + (ids[ahead] - 1) * row_bytes, used, squares)
        _ask_for(base + (vocabulary_size + ids[ahead + 1] - 1) * row_bytes, used, squares)
        place = 4 * (begin + i)
        word, other = np.int64(ids[place] - 1), vocabulary_size + ids[place + 1] - 1
        left, right = base + word * row_bytes, base + other * row_bytes
        a, b = word * width + lanes, other * width + lanes
        bias, other_bias = values[a], values[b]
        error = dot(left, right, lanes, zero) + bias + other_bias - values.dtype.type(logs[i])
        weighted = values.dtype.type(weights[i]) * error
        cost += 0.5 * weighted * error
        step = values.dtype.type(rate) * weighted
        _update(left, right, lanes, squares, step)
        values[a] = bias - weighted * (one / np.sqrt(one + values[a + accumulators]))
        values[b] = other_bias - weighted * (one / np.sqrt(one + values[b + accumulators]))
        values[a + accumulators] += weighted * weighted
        values[b + accumulators] += weighted * weighted
    return cost


@njit(cache=True, nogil=True, error_model="numpy")
def train_block(values: Any, ids: Any, counts: Any, shape: Any, settings: Any) -> float:
    """Take a block of records in order; the sum of their costs.

    `ids` and `counts` are two views of the same records, as 4 int32 and as 2 float64 each. `shape` is vocabulary size,
    lanes, accumulators and width of the rows, `settings` are x_max, alpha and rate. The ids must be right: see
    `first_bad`.
    """
    cost, count = 0.0, counts.size // 2
    logs, weights = np.empty(PIECE, np.float64), np.empty(PIECE, np.float64)
    for begin in range(0, count, PIECE):
        size = min(PIECE, count - begin)
        prepare(counts, begin, logs[:size], weights[:size], settings)
        cost += _visit(values, ids, begin, logs[:size], weights[:size], shape, settings[2])
    return cost


def warm(dtype: Any = "float32") -> None:
    first_bad(*_NOTHING, 1)
    train_block(np.zeros(64, dtype), *_NOTHING, np.ones(4, np.int64), np.ones(3))


def warm_in_order(dtype: Any = "float32") -> None:
    values, gate = np.zeros(64, dtype), tuple(CompiledGate())
    train_block_in_order(values, *_NOTHING, np.ones(4, np.int64), np.ones(3), gate, 0)


@njit(cache=True, nogil=True, error_model="numpy")
def train_block_in_order(
    values: Any, ids: Any, counts: Any, shape: Any, settings: Any, gate: Any, number: int
) -> tuple[float, int]:
    """As `train_block`, but one worker at a time, STEP records each; also how the last wait ended, REACHED if well.

    `gate` is that of a `Gate`, and `number` what the first step here has at it, where turns are agreed on.
    """
    cost, count = 0.0, counts.size // 2
    logs, weights = np.empty(STEP, np.float64), np.empty(STEP, np.float64)
    for begin in range(0, count, STEP):
        size = min(STEP, count - begin)
        prepare(counts, begin, logs[:size], weights[:size], settings)
        mine, status = enter(gate, number)
        if status != REACHED:
            return cost, status
        cost += _visit(values, ids, begin, logs[:size], weights[:size], shape, settings[2])
        leave(gate, mine)
        number += 1
    return cost, REACHED


@njit(cache=True, nogil=True, error_model="numpy", fastmath=True)
def batch_dots(values: Any, ids: Any, shape: Any, with_bias: bool, dots: Any) -> None:
    lanes, row_bytes = shape[1], shape[3] * values.itemsize
    base, zero = values.ctypes.data, values.dtype.type(0)
    for i in range(ids.size // 4):
        word, other = np.int64(ids[4 * i] - 1), shape[0] + ids[4 * i + 1] - 1
        total = dot(base + word * row_bytes, base + other * row_bytes, lanes, zero)
        if with_bias:
            total += values[word * shape[3] + lanes] + values[other * shape[3] + lanes]
        dots[i] = total


@njit(cache=True, nogil=True, error_model="numpy")
def batch_errors(counts: Any, dots: Any, settings: Any) -> float:
    """Turn each record's sum of product and biases into f d, in place; the sum of costs."""
    logs, weights = np.empty(PIECE, np.float64), np.empty(PIECE, np.float64)
    cost, count = 0.0, counts.size // 2
    for begin in range(0, count, PIECE):
        size = min(PIECE, count - begin)
        prepare(counts, begin, logs[:size], weights[:size], settings)
        for i in range(size):
            error = dots[begin + i] - logs[i]
            cost += 0.5 * weights[i] * error * error
            dots[begin + i] = weights[i] * error
    return cost


@njit(nogil=True, inline="always")
def _place(row: int, slots: Any, touched: Any, found: int) -> int:
    """The row's number in this batch, `found` if it is new."""
    number = slots[row]
    if number < 0:
        slots[row] = found
        touched[found] = row
        number = found
    return number  # type: ignore[no-any-return]


@njit(cache=True, nogil=True, error_model="numpy", fastmath=True)
def sum_gradients(
    values: Any, ids: Any, errors: Any, shape: Any, rate: float, slots: Any, touched: Any, gradients: Any
) -> int:
    """Number the rows in the order in which they come, and sum their gradients; how many rows there are.

    `slots` has an item per row of the model, all -1, and is left so.
    """
    lanes, span, width = shape[1], shape[2], shape[3]
    found = 0
    for i in range(ids.size // 4):
        word, other = np.int64(ids[4 * i] - 1), shape[0] + ids[4 * i + 1] - 1
        error = errors[i]
        step = values.dtype.type(rate) * error
        for row, partner in ((word, other), (other, word)):
            number = _place(row, slots, touched, found)
            sums = gradients[number * span : number * span + lanes + 1]
            if number == found:
                found += 1
                sums[:] = 0
            source = values[partner * width : partner * width + lanes]
            for item in range(lanes):
                sums[item] += step * source[item]
            sums[lanes] += error
    for number in range(found):
        slots[touched[number]] = -1
    return found


@njit(cache=True, nogil=True, error_model="numpy", fastmath=True)
def add_rows(
    part: Any, part_gradients: Any, shape: Any, found: int, slots: Any, touched: Any, gradients: Any
) -> int:
    """Add the gradients of the rows in `part` to those found so far; how many rows there are now.

    `slots` has the numbers of the rows found so far; `step_rows` clears them.
    """
    span, used = shape[2], shape[1] + 1
    for index in range(part.size):
        number = _place(part[index], slots, touched, found)
        sums = gradients[number * span : number * span + used]
        more = part_gradients[index * span : index * span + used]
        if number == found:
            found += 1
            for item in range(used):
                sums[item] = more[item]
        else:
            for item in range(used):
                sums[item] += more[item]
    return found


@njit(cache=True, nogil=True, error_model="numpy", fastmath=True)
def step_rows(values: Any, touched: Any, gradients: Any, shape: Any, slots: Any) -> None:
    """One step of AdaGrad for each row in `touched`, whose slots are cleared."""
    span, width, used, one = shape[2], shape[3], shape[1] + 1, values.dtype.type(1)
    for number in range(touched.size):
        row = touched[number]
        slots[row] = -1
        items = values[row * width : row * width + used]
        squares = values[row * width + span : row * width + span + used]
        sums = gradients[number * span : number * span + used]
        for item in range(used):
            square = squares[item] + sums[item] * sums[item]
            squares[item] = square
            items[item] -= sums[item] / np.sqrt(one + square)
