"""Where the second moment is cut: exact selection without a sort, from a few sums over the whole batch.

Non-negative float32 numbers are ordered like their bit patterns read as integers. Each rule below keeps the members up
to the largest value t for which a sum F(t) over the members is not positive, and the good t form an interval from the
start. The search keeps the range of bit patterns that are undecided, tries one of them a pass, and shrinks the range to
member values, so it ends when no member is left in between: about 12 passes for millions of tokens, one where nothing
is masked, and never more than 96, since every third pass halves the range.

Accuracy: the decision is that of exact arithmetic on the float32 values, without an error bound. F is a sum of
integers: of the binary digits of v and of the threshold, 30 of them at first. What the digits left out can add is less
than one unit a token; only where that could change the sign are the next 30 added, and so on to the last. Sums of
integers do not depend on the order of tokens or on how they are spread over devices, and there is no rounding that a
compiler could move.

A batch has at most 2^31 tokens, 2^19 rows and 2^20 tokens in a row. Only sums, maxima and minima leave a device.
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

_NO_MEMBER = 0x7FFFFFFF
"""The bit pattern that stands for a token that is no member: above those of all values."""

_INFINITY = 0x7F800000
_MOST = (97 + 127) << 23
_WORD = 30
_DIGIT = 10
_MOST_FOLDS = 16
_FEWEST_ROWS = 64


class Cut(NamedTuple):
    """The gap between what is kept and what is masked; both ends are values of members."""

    largest_kept: Float[Array, ""]
    """The largest member value that is kept; 0 where none is."""

    smallest_masked: Float[Array, ""]
    """The smallest member value that is masked; inf where none is."""

    def masks(self, second_moment: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """True where the second moment lies above the middle of the gap, so another rounding of it changes nothing."""
        low, high = _bits(self.largest_kept), _bits(self.smallest_masked)
        return (_bits(second_moment) > low + (high - low) // 2) & (high < _INFINITY)


@jax.jit
def mask_cut(second_moment: Float[Array, "B T"], members: Bool[Array, "B T"], threshold: Float[Array, ""]) -> Cut:
    """Algorithm 1: the most members, smallest first, whose mean is within the threshold (arXiv 2510.01161).

    F(t) = sum over {v <= t} of (v - threshold) first falls, then rises with t. Equal values go together.

    Args:
      second_moment: float32 from `masks.second_moment`, in [0, SECOND_MOMENT_LIMIT].
      members: True for the tokens that count, the trust region T.
      threshold: float32 scalar tau >= 0; inf keeps all, and NaN masks all members above 0.

    Returns:
      The cut; (0, inf) where there are no members.
    """
    return _search(_MASK, second_moment, members, threshold)


@jax.jit
def mask_cut_strict(
    second_moment: Float[Array, "B T"], members: Bool[Array, "B T"], threshold: Float[Array, ""]
) -> Cut:
    """AReaL's rule: as `mask_cut`, but the mean stays below the threshold, and the smallest value is always kept."""
    return _search(_STRICT, second_moment, members, threshold)


@jax.jit
def clip_cut(second_moment: Float[Array, "B T"], members: Bool[Array, "B T"], threshold: Float[Array, ""]) -> Cut:
    """The largest member value c at which the winsorised mean, that of min(v, c), is within the threshold.

    F(c) = sum over members of (min(v, c) - threshold). Args as for `mask_cut`.

    Returns:
      The cut with c as `largest_kept`; that is 0 where even the smallest value is too large (everything is clipped).
    """
    return _search(_CLIP, second_moment, members, threshold)


class _Rule(NamedTuple):
    """What tells the rules apart. Values are bit patterns, -1 below all of them."""

    terms: Callable[[Array, Array], tuple[Array, Array]]
    """(v, t) -> the values that F(t) adds up, less the threshold each, and where it does."""

    within: Callable[[Array], Array]
    """Whether an excess F(t) lets the members up to t be kept."""

    start: Callable[[Array, Array], Array]
    """(v_BT, tau) -> a pattern up to which members are always kept."""

    last_below: Callable[[Array, Array], Array]
    """(below, t) -> the last undecided pattern when t is too high and `below` is the largest member up to t."""


def _removed(v: Array, t: Array) -> tuple[Array, Array]:
    return v, v <= t


def _capped(v: Array, t: Array) -> tuple[Array, Array]:
    return jnp.minimum(v, t), v != _NO_MEMBER


_MASK = _Rule(
    terms=_removed,
    within=lambda excess: excess <= 0.0,
    start=lambda v_BT, tau: tau,
    last_below=lambda below, t: below - 1,
)
_STRICT = _MASK._replace(
    within=lambda excess: excess < 0.0,
    start=lambda v_BT, tau: jnp.clip(jnp.min(v_BT), tau - 1, _MOST),
)
_CLIP = _MASK._replace(terms=_capped, last_below=lambda below, t: jnp.minimum(below, t - 1))


class _Search(NamedTuple):
    """State of `_search`: bit patterns, and the two ends of the interpolation as (t, F(t))."""

    passes: Int[Array, ""]
    kept: Int[Array, ""]
    first: Int[Array, ""]
    last: Int[Array, ""]
    low: tuple[Array, Array]
    high: tuple[Array, Array]
    rose: Bool[Array, ""]


def _search(rule: _Rule, second_moment_BT: Array, members_BT: Array, threshold: Array) -> Cut:
    """The cut at the largest member that the rule keeps: those up to `kept` are, those in [first, last] undecided.

    Regula falsi with the weights of Anderson and Bjorck (BIT 13, 1973); every fourth pass halves the range of patterns.
    """
    rows, columns = second_moment_BT.shape
    if rows > 2**19 or columns > 2**20 or rows * columns > 2**31:
        raise ValueError(f"second_moment has shape {(rows, columns)}: at most 2^19 rows, 2^20 columns and 2^31 tokens")
    v_BT = jnp.where(members_BT, _bits(second_moment_BT), _NO_MEMBER)
    tau = jnp.clip(_bits(threshold), 0, _MOST)
    start = rule.start(v_BT, tau)
    last = jnp.maximum(
        start, jnp.minimum(tau, _bits(jnp.float32(SECOND_MOMENT_LIMIT))) + ((v_BT.size - 1).bit_length() << 23)
    )
    start, last = _where(jnp.isnan(threshold), (jnp.int32(-1),) * 2, (start, last))

    def step(state: _Search) -> _Search:
        t = _next(state)
        excess = _excess(rule, v_BT, t, tau)
        below, above = _neighbours(v_BT, t)
        rises = rule.within(excess) | (t <= start)
        point = (_float(t), excess)
        again = rises == state.rose
        return _Search(
            passes=state.passes + 1,
            kept=jnp.where(rises, below, state.kept),
            first=jnp.where(rises, above, state.first),
            last=jnp.where(rises, state.last, jnp.maximum(rule.last_below(below, t), start)),
            low=_where(rises, point, _retained(state.low, state.high[1], excess, again)),
            high=_where(rises, _retained(state.high, state.low[1], excess, again), point),
            rose=rises,
        )

    zero = (jnp.float32(0.0), jnp.float32(0.0))
    state = _Search(jnp.int32(0), jnp.int32(0), start, last, zero, zero, jnp.bool_(False))
    state = lax.while_loop(lambda state: state.first <= state.last, step, state)
    return Cut(_float(jnp.maximum(state.kept, 0)), _float(jnp.minimum(state.first, _INFINITY)))


def _next(state: _Search) -> Int[Array, ""]:
    """The pattern to try: the last, which ends the search where nothing is masked; the first; then in between."""
    (low, low_excess), (high, high_excess) = state.low, state.high
    guess = _bits(low + low_excess / (low_excess - high_excess) * (high - low))
    middle = state.first + (state.last - state.first) // 2
    guess = jnp.where(state.passes % 4 == 2, middle, guess)
    guess = jnp.where(state.passes == 0, state.last, jnp.where(state.passes == 1, state.first, guess))
    return jnp.clip(guess, state.first, state.last)


def _retained(end: tuple[Array, Array], replaced: Array, excess: Array, again: Array) -> tuple[Array, Array]:
    """An end that stays: its weight shrinks where the other end was replaced twice running."""
    weight = 1.0 - excess / replaced
    weight = jnp.where(weight > 0.0, weight, 0.5)
    return end[0], jnp.where(again, end[1] * weight, end[1])


def _where(condition: Array, chosen: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    return jnp.where(condition, chosen[0], other[0]), jnp.where(condition, chosen[1], other[1])


def _neighbours(v_BT: Array, t: Array) -> tuple[Array, Array]:
    """Largest member pattern up to t (-1 if none) and smallest above it (_NO_MEMBER if none)."""
    below = _fold(v_BT, lambda v: jnp.where(v <= t, v, -1), jnp.maximum)
    above = _fold(v_BT, lambda v: jnp.where(v > t, v, _NO_MEMBER), jnp.minimum)
    return jnp.max(below), jnp.min(above)


def _excess(rule: _Rule, v_BT: Array, t: Array, tau: Array) -> Float[Array, ""]:
    """F(t) with the exact sign and the size to float32 rounding, in units of the threshold's power of two.

    Words of 30 binary digits are added, most significant first, until what is left cannot change the sign.
    """
    size = float(v_BT.size)
    top = jnp.maximum(_exponent(jnp.maximum(t, tau)), 1)

    def undecided(state: tuple[Array, tuple[Array, Array], Array]) -> Array:
        words, _, total = state
        return (jnp.abs(total) <= size * 1.0001) & (words * _WORD < top + 23)

    def add_word(state: tuple[Array, tuple[Array, Array], Array]) -> tuple[Array, tuple[Array, Array], Array]:
        words, (low, high), _ = state
        tau_word = _word(tau, top, words)
        sums = []
        for shift in range(0, _WORD, _DIGIT):

            def digit(v: Array, shift: int = shift) -> Array:
                x, included = rule.terms(v, t)
                difference = _digit(_word(x, top, words), shift) - _digit(tau_word, shift)
                return jnp.where(included, difference, 0)

            sums.append(jnp.sum(_fold(v_BT, digit, jnp.add), axis=1))
        digits = _digits(sums, low, high)
        total = jnp.float32(0.0)
        for x in reversed(digits):
            total = total * 2.0**_DIGIT + x.astype(jnp.float32)
        high = jnp.int32(0)
        for x in reversed(digits[1:]):
            high = high * 2**_DIGIT + x
        return words + 1, (digits[0], high), total

    # Zero total: undecided, so one word is always added.
    state = (jnp.int32(0), (jnp.int32(0), jnp.int32(0)), jnp.float32(0.0))
    words, _, total = lax.while_loop(undecided, add_word, state)
    return total * _power_of_two(top - jnp.maximum(_exponent(tau), 1) - words * _WORD)


def _digits(sums: list[Array], low: Array, high: Array) -> list[Array]:
    """Digits in base 2^10, least significant first, of the sum of row sums plus (low, high) * 2^30; the last is signed."""
    columns = [jnp.int32(0)] * 6
    for i, rows in enumerate(sums):
        parts = (_digit(rows, 0), _digit(rows, _DIGIT), rows >> (2 * _DIGIT))
        for j, part in enumerate(parts):
            columns[i + j] += jnp.sum(part)
    columns[3] += low
    columns[4] += high
    return _carried(columns)


def _carried(columns: list[Array]) -> list[Array]:
    carry, digits = jnp.int32(0), []
    for column in columns[:-1]:
        column = column + carry
        digits.append(_digit(column, 0))
        carry = column >> _DIGIT
    return [*digits, columns[-1] + carry]


def _word(bits: Array, top: Array, index: Array) -> Int[Array, "..."]:
    """Word `index` of the value's binary expansion from 2^(top + 1) down: 30 digits a word, `top` the top exponent."""
    exponent = _exponent(bits)
    mantissa = (bits & 0x7FFFFF) | jnp.where(exponent > 0, 0x800000, 0)
    mantissa = mantissa << (_WORD - 24)
    up = index * _WORD - (top - jnp.maximum(exponent, 1))
    left = lax.shift_left(mantissa, jnp.broadcast_to(up, mantissa.shape))
    right = lax.shift_right_logical(mantissa, jnp.broadcast_to(-up, mantissa.shape))
    return (left | right) & (2**_WORD - 1)


def _fold(v_BT: Array, function: Callable[[Array], Array], combine: Callable[[Array, Array], Array]) -> Array:
    """`function` of all tokens with groups of up to 16 rows combined: compilers vectorise this, but not integer sums."""
    rows, columns = v_BT.shape
    folds = _MOST_FOLDS
    while rows % folds or rows // folds < _FEWEST_ROWS or folds * columns > 2**20:
        folds //= 2
        if folds == 1:
            return function(v_BT)
    groups = v_BT.reshape(rows // folds, folds, columns)
    return functools.reduce(combine, [function(groups[:, i]) for i in range(folds)])


def _digit(word: Array, shift: int) -> Array:
    return (word >> shift) & (2**_DIGIT - 1)


def _exponent(bits: Array) -> Array:
    return bits >> 23


def _power_of_two(exponent: Array) -> Array:
    return _float(jnp.clip(exponent + 127, 1, 254) << 23)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
