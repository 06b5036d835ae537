"""Where the second moment is cut: exact selection without a sort, by a few sums over the whole batch.

Non-negative float32 numbers are ordered like their bit patterns read as integers. Each rule below keeps the members up
to the largest value t at which a sum F(t) over the members is small enough, and the t that are good form an interval.
The search holds the range of patterns that are undecided, evaluates F at one of them a pass and shrinks the range to
values of members; it ends when none is left in it. That takes one pass where nothing is masked, 5 to 16 elsewhere (for
5 million tokens, of light or heavy tails), and at most 128, because every fourth pass halves the range.

Exactness: the decision is that of exact arithmetic on the float32 values; the error bound is 0. F is added up in
integers, from the binary digits of v and of the threshold: 30 digits first, and 30 more as long as those left out,
which come to less than one unit a token, could change the sign. So neither the order of tokens, nor their spread over
devices, nor the way a compiler rounds or flushes a subnormal changes anything.

Limits: 2^31 tokens, 2^19 rows, 2^20 tokens in a row. Devices exchange only sums, maxima and minima: 44 bytes a pass
where each holds whole rows; else also the sums of rows. (On CPUs at most 64 devices may share the rows.)
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

SECOND_MOMENT_LIMIT = 2.0**96
"""Larger second moments count as this much: 2^31 of them still add up to a finite float32."""

_LIMIT = (96 + 127) << 23
_INFINITY = 0x7F800000
_NO_MEMBER = 0x7FFFFFFF
"""Bit patterns of the limit, of inf, and of a token that is no member, above all the others."""

_WORD, _DIGIT = 30, 10
"""Binary digits that are added at a time, and how many of them go into one int32 sum."""


class Cut(NamedTuple):
    """The gap between what is kept and what is masked; its ends are values of members."""

    largest_kept: Float[Array, ""]
    """0 where no member is kept."""

    smallest_masked: Float[Array, ""]
    """inf where no member is masked."""

    def masks(self, second_moment: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """True above the middle of the gap, so that a value rounded otherwise when computed again stays on its side."""
        low, high = _bits(self.largest_kept), _bits(self.smallest_masked)
        return (high < _INFINITY) & (_bits(second_moment) > low + (high - low) // 2)


@jax.jit
def mask_cut(second_moment: Float[Array, "B T"], members: Bool[Array, "B T"], threshold: Float[Array, ""]) -> Cut:
    """Algorithm 1: keep the smallest members, as many as have a mean within the threshold (arXiv 2510.01161).

    F(t) = sum over members v <= t of (v - threshold) <= 0;  F first falls, then rises. Equal values go together.

    Args:
      second_moment: float32 from `masks.second_moment`, in [0, SECOND_MOMENT_LIMIT].
      members: True for the tokens that count, such as the trust region T.
      threshold: float32 scalar tau >= 0; inf keeps all, a NaN masks all members that are not 0.

    Returns:
      The cut; (0, inf) where there are no members.

    Raises:
      ValueError: the batch is beyond the limits.
    """
    return _search(_MASK, second_moment, members, threshold)


@jax.jit
def mask_cut_strict(
    second_moment: Float[Array, "B T"], members: Bool[Array, "B T"], threshold: Float[Array, ""]
) -> Cut:
    """AReaL's rule: `mask_cut` with a mean strictly below the threshold, but the smallest value is always kept."""
    return _search(_MASK_STRICT, second_moment, members, threshold)


@jax.jit
def clip_cut(second_moment: Float[Array, "B T"], members: Bool[Array, "B T"], threshold: Float[Array, ""]) -> Cut:
    """The cap: largest member value c at which the winsorised mean, that of min(v, c), is within the threshold.

    F(c) = sum over members of (min(v, c) - threshold) <= 0. Args, Raises as for `mask_cut`.

    Returns:
      The cut with c as `largest_kept`, 0 where even the smallest value is too large (everything is clipped).
    """
    return _search(_CLIP, second_moment, members, threshold)


class _Rule(NamedTuple):
    """What tells the rules apart; values are bit patterns."""

    terms: Callable[[Array, Array], tuple[Array, Array]]
    """(v, t) -> the values that F(t) adds up, less a threshold each, and True where it adds one."""

    fits: Callable[[Array], Array]
    """F(t) -> whether the members up to t can be kept."""

    start: Callable[[Array, Array], Array]
    """(v_BT, tau) -> a pattern up to which members are always kept."""

    last: Callable[[Array, Array], Array]
    """(t, largest member up to t) -> the last undecided pattern once t does not fit."""


_MASK = _Rule(
    terms=lambda v, t: (v, v <= t),
    fits=lambda excess: excess <= 0.0,
    start=lambda v_BT, tau: tau,
    last=lambda t, below: below - 1,
)
_MASK_STRICT = _MASK._replace(
    fits=lambda excess: excess < 0.0,
    start=lambda v_BT, tau: jnp.clip(jnp.min(v_BT, initial=_NO_MEMBER), tau - 1, _LIMIT + 1),
)
_CLIP = _MASK._replace(
    terms=lambda v, t: (jnp.minimum(v, t), v < _NO_MEMBER),
    last=lambda t, below: jnp.minimum(t - 1, below),
)


class _State(NamedTuple):
    """Members up to `kept` are kept, those from `first` to `last` undecided: all bit patterns."""

    passes: Int[Array, ""]
    kept: Int[Array, ""]
    first: Int[Array, ""]
    last: Int[Array, ""]
    low: Float[Array, "2"]
    """(t, F(t)) of the last t that was kept, F weighted as in `_weighted`."""
    high: Float[Array, "2"]
    """The same of the last t that did not fit."""
    rose: Bool[Array, ""]
    """Whether the last pass moved `low`."""


def _search(rule: _Rule, second_moment_BT: Array, members_BT: Array, threshold: Array) -> Cut:
    """The cut by regula falsi with the weights of Anderson and Bjorck (BIT 13, 1973), and bisection in between."""
    rows, columns = second_moment_BT.shape
    if rows > 2**19 or columns > 2**20 or rows * columns > 2**31:
        raise ValueError(f"second_moment has shape {(rows, columns)}: the limits are 2^19, 2^20 and 2^31 tokens in all")
    v_BT = jnp.where(members_BT, _bits(second_moment_BT), _NO_MEMBER)
    tau = jnp.clip(_bits(threshold), 0, _LIMIT + 1)
    start = rule.start(v_BT, tau)
    # No value above tau times the number of tokens, rounded up to a power of two, can be kept or be the cap.
    last = jnp.maximum(start, jnp.minimum(tau, _LIMIT) + ((rows * columns - 1).bit_length() << 23))
    start, last = jnp.where(jnp.isnan(threshold), -1, jnp.stack([start, last]))

    def step(state: _State) -> _State:
        t = _next(state)
        excess = _excess(rule, v_BT, t, tau)
        below, above = _neighbours(v_BT, t)
        fits = rule.fits(excess) | (t <= start)
        point = jnp.stack([_float(t), excess])
        again = fits == state.rose
        return _State(
            passes=state.passes + 1,
            kept=jnp.where(fits, below, state.kept),
            first=jnp.where(fits, above, state.first),
            last=jnp.where(fits, state.last, jnp.maximum(start, rule.last(t, below))),
            low=jnp.where(fits, point, _weighted(state.low, state.high, excess, again)),
            high=jnp.where(fits, _weighted(state.high, state.low, excess, again), point),
            rose=fits,
        )

    nowhere = jnp.zeros(2, jnp.float32)
    state = _State(jnp.int32(0), jnp.int32(-1), start, last, nowhere, nowhere, jnp.bool_(False))
    state = lax.while_loop(lambda state: state.first <= state.last, step, state)
    return Cut(_float(jnp.maximum(state.kept, 0)), _float(jnp.minimum(state.first, _INFINITY)))


def _next(state: _State) -> Int[Array, ""]:
    """The pattern to try: the last, as often all fits; the first, which fits; then in between."""
    low, low_excess = state.low
    high, high_excess = state.high
    crossing = _bits(low + low_excess / (low_excess - high_excess) * (high - low))
    middle = state.first + (state.last - state.first) // 2
    t = jnp.where(state.passes % 4 == 2, middle, crossing)
    t = jnp.where(state.passes == 0, state.last, jnp.where(state.passes == 1, state.first, t))
    return jnp.clip(t, state.first, state.last)


def _weighted(end: Array, replaced: Array, excess: Array, again: Array) -> Float[Array, "2"]:
    """The end that stays: it counts for less when the other end is replaced twice running."""
    weight = 1.0 - excess / replaced[1]
    weight = jnp.where(again, jnp.where(weight > 0.0, weight, 0.5), 1.0)
    return jnp.stack([end[0], end[1] * weight])


def _neighbours(v_BT: Array, t: Array) -> tuple[Array, Array]:
    """Largest member up to t, -1 if there is none, and smallest above t, _NO_MEMBER if there is none."""
    largest = lambda part: jnp.max(part, initial=-1)  # noqa: E731
    smallest = lambda part: jnp.min(part, initial=_NO_MEMBER)  # noqa: E731
    return (
        _reduced(lambda v: jnp.where(v <= t, v, -1), jnp.maximum, largest, v_BT),
        _reduced(lambda v: jnp.where(v > t, v, _NO_MEMBER), jnp.minimum, smallest, v_BT),
    )


def _excess(rule: _Rule, v_BT: Array, t: Array, tau: Array) -> Float[Array, ""]:
    """F(t): its sign is exact, its size rounded, in units of the threshold's power of two."""
    top = _exponent(jnp.maximum(t, tau))

    def undecided(state: tuple[Array, Array, Array]) -> Array:
        """Whether digits are left, and F is within one unit a token of 0."""
        words, _, total = state
        return (words * _WORD < top + 23) & (jnp.abs(total) <= 1.0001 * v_BT.size)

    def add_word(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # The barrier ties v to the loop: XLA would take the parts of v out of it and store them, several arrays.
        words, carried, v_BT_ = lax.optimization_barrier((state[0], state[1], v_BT))
        tau_word = _word(tau, top, words)

        def digits(shift: int, v: Array) -> Array:
            x, included = rule.terms(v, t)
            return jnp.where(included, _digit(_word(x, top, words), shift) - _digit(tau_word, shift), 0)

        sums = [
            _reduced(functools.partial(digits, shift), jnp.add, _digit_sums, v_BT_) for shift in range(0, _WORD, _DIGIT)
        ]
        return words + 1, *_add_up(sums, carried)

    # A total of 0 is undecided, so there is one word at least.
    words, _, total = lax.while_loop(undecided, add_word, (jnp.int32(0), jnp.zeros(2, jnp.int32), jnp.float32(0.0)))
    return total * _float(jnp.clip(127 + top - _exponent(tau) - words * _WORD, 1, 254) << 23)


def _add_up(sums: list[Array], carried: Array) -> tuple[Array, Array]:
    """The `_digit_sums` of three digits in base 2^10, lowest first, plus 2^30 times what the words before carry.

    Returns:
      The total as (high, low) with total = high * 2^10 + low, right if it fits in 32 bits, and as float32.
    """
    columns = [jnp.int32(0), jnp.int32(0), jnp.int32(0), carried[1], carried[0], jnp.int32(0)]
    for i, parts in enumerate(sums):
        for j in range(3):
            columns[i + j] += parts[j]
    for i in range(5):
        columns[i + 1] += columns[i] >> _DIGIT
        columns[i] = _digit(columns[i], 0)
    high, total = columns[5], columns[5].astype(jnp.float32)
    for column in columns[4:0:-1]:
        high, total = high * 2**_DIGIT + column, total * 2.0**_DIGIT + column.astype(jnp.float32)
    return jnp.stack([high, columns[0]]), total * 2.0**_DIGIT + columns[0].astype(jnp.float32)


def _word(bits: Array, top: Array, index: Array) -> Int[Array, "..."]:
    """30 binary digits of the value, the `index`-th such word from the digit of the exponent `top` down."""
    mantissa = (bits & 0x7FFFFF) | jnp.where(bits > 0x7FFFFF, 0x800000, 0)
    mantissa <<= _WORD - 24
    up = index * _WORD - top + _exponent(bits)
    # Shifts by less than 0 or more than 31 places give 0.
    return (lax.shift_left(mantissa, up) | lax.shift_right_logical(mantissa, -up)) & (2**_WORD - 1)


def _reduced(
    function: Callable[[Array], Array],
    combine: Callable[[Array, Array], Array],
    reduce: Callable[[Array], Array],
    v_BT: Array,
) -> Array:
    """`reduce` of the function of each token; `combine` is its elementwise form.

    XLA on CPUs vectorises the combining of rows, but no integer reduction, so there up to 8 rows are combined first.
    Elsewhere those rows might lie on different devices.
    """
    rows, columns = v_BT.shape
    size = next(n for n in (8, 4, 2, 1) if n == 1 or (rows % (64 * n) == 0 and n * columns <= 2**20))

    def by_rows(v_BT: Array) -> Array:
        groups = v_BT.reshape(rows // size, size, columns)
        return reduce(functools.reduce(combine, (function(groups[:, i]) for i in range(size))))

    return lax.platform_dependent(v_BT, cpu=by_rows, default=lambda v_BT: reduce(function(v_BT)))


def _digit_sums(x_BT: Array) -> Int[Array, "3"]:
    """Sum of digits in base 2^10, as the sums of three digits of its rows; the last is signed."""
    rows = x_BT.sum(axis=1, dtype=jnp.int32)
    parts = (_digit(rows, 0), _digit(rows, _DIGIT), rows >> (2 * _DIGIT))
    return jnp.stack([part.sum(dtype=jnp.int32) for part in parts])


def _digit(word: Array, shift: int) -> Array:
    return (word >> shift) & (2**_DIGIT - 1)


def _exponent(bits: Array) -> Array:
    """Subnormal numbers share the exponent of the smallest normal ones."""
    return jnp.maximum(bits >> 23, 1)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
