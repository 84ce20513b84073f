"""Every rule of sampling and verification, once, as a function of operators only.

No imports: NumPy calls these functions on arrays, Triton compiles the same functions into kernels. A rule that
needs a choice between two values states the condition, and the caller selects. Constants come in as defaults, because
compiled functions see no globals.

Notation: B requests, K draft tokens, N rows of logits, V vocabulary; x logit, p target, q draft, u uniform in
[0, 1), w weight (a probability before it is normalised).
"""

# Written behind the last emitted token, and accepted as "no draft here" on input.
PAD_TOKEN = -1

# What a support holds when it was not cut: no token at -inf is ever kept, every other token is.
NO_CUT_ID = -1

# Bits of a row's status.
STATUS_NAN = 1  # a logit was NaN, counted as -inf; or a probability was NaN, counted as 0
STATUS_INF = 2  # a logit was +inf, counted as the largest finite value; or a probability was, counted as 0
STATUS_EMPTY = 4  # no token can be drawn: the row yields token 0
STATUS_DRAFT_ID = 8  # a draft id outside [0, V) that is not PAD_TOKEN: rejected
STATUS_PARAMETER = 16  # a parameter on the device out of its range: the row is greedy
STATUS_NEGATIVE = 32  # a negative probability, counted as 0

# Streams of random numbers. They never meet: noise that drew the draft must not draw the residual.
STREAM_SAMPLE = 0
STREAM_DRAFT = 1
STREAM_ACCEPT = 2
STREAM_RESIDUAL = 3
STREAM_GUMBEL = 4

# Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", table 2).
PHILOX_ROUNDS = 10
PHILOX_M0 = 0xD2511F53
PHILOX_M1 = 0xCD9E8D57
PHILOX_W0 = 0x9E3779B9
PHILOX_W1 = 0xBB67AE85
MASK32 = 0xFFFFFFFF


def is_kept(x, token, cut_value, cut_id):
    """Whether a token stands in the prefix of the rank order that ends with (cut_value, cut_id)."""
    return (x > cut_value) | ((x == cut_value) & (token <= cut_id))


def rank_key(bits):
    """Integer that sorts ascending as the float32 with these int32 bits sorts descending (x + 0.0: no -0.0)."""
    return ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))


def rank_bits(key):
    """The int32 bits of the float32 behind a `rank_key`."""
    return (~key) ^ (((~key) >> 31) & 0x7FFFFFFF)


def is_greedy(temperature):
    """Temperature 0 is the one-hot of the first maximum, by rule and not by division."""
    return temperature == 0


def is_top_k_on(k, vocab_size):
    """k <= 0 and k >= V keep everything."""
    return (k > 0) & (k < vocab_size)


def is_top_p_on(p):
    """p >= 1 keeps everything; p <= 0 keeps the first token (and is on)."""
    return p < 1


def is_min_p_on(min_p):
    """min_p <= 0 keeps everything."""
    return min_p > 0


def scaled(x, maximum, inverse_temperature):
    """z = (x - max x) / T, maximum first: exp(z) is a weight in [0, 1] for any T > 0."""
    return (x - maximum) * inverse_temperature


def is_in_top_k(rank, k):
    """The k first of the rank order."""
    return rank < k


def is_in_top_p(mass_before, p, total):
    """A token stays while the mass ranked before it is less than p of the total (Holtzman et al. 2020)."""
    return mass_before < p * total


def is_in_min_p(weight, min_p):
    """p_i >= min_p * p_max, on weights relative to the largest (Nguyen et al. 2024)."""
    return weight >= min_p


def is_in_min_tokens(rank, min_tokens_to_keep):
    """Every filter leaves at least this many."""
    return rank < min_tokens_to_keep


def philox_round(c0, c1, c2, c3, k0, k1, m0=PHILOX_M0, m1=PHILOX_M1, mask=MASK32):
    """One round on unsigned 64-bit integers that hold 32-bit words."""
    a = c0 * m0
    b = c2 * m1
    return (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask


def philox_next_key(key, weyl, mask=MASK32):
    """The key of the next round (weyl: PHILOX_W0 or PHILOX_W1)."""
    return (key + weyl) & mask


def uniform_bits(high, low):
    """53 random bits out of two 32-bit words held in 64-bit integers."""
    return ((high >> 5) << 26) | (low >> 6)


def uniform(bits):
    """A multiple of 2^-53 in [0, 1) out of 53 bits held in a float64."""
    return bits * 1.1102230246251565e-16


def is_drawn(cumulative, u, total):
    """Inverse CDF: the draw is the first token, in id order, for which this holds."""
    return cumulative > u * total


def is_usable_draft(token, step, num_draft_tokens, vocab_size):
    """A draft that may be looked at; the first that is not ends the row's drafts."""
    return (step < num_draft_tokens) & (token >= 0) & (token < vocab_size)


def is_accepted(u, q, p):
    """Accept a drafted token (Leviathan et al. 2023, Chen et al. 2023): no division, so q = 0 and p = 0 are right."""
    return u * q < p


def residual(p, q):
    """Weight of a token in the draw after a rejection, max(p - q, 0); q = 0 makes it the bonus draw."""
    return (p - q) * (p > q)


def block_carry(carry, p, q):
    """Block verification (Sun et al. 2024, algorithm 2): min(carry * p / q, 1); 0 where the target has p = 0."""
    weight = carry * p
    bound = weight * (weight >= q) + q * (weight < q)
    return weight / (bound + (bound == 0))


def is_block_accepted(u, carry, residual_total):
    """Whether the first i tokens stand as a block, 0 < i < K: u < S / (S + 1 - carry), without the division."""
    return u * (residual_total + 1 - carry) < residual_total


def is_child(child, parent_of_child, node, token_of_child, token):
    """Whether a node of a draft tree follows `node` with `token`; parents stand before their children."""
    return (parent_of_child == node) & (child > node) & (token_of_child == token)


def kept_length(cached, accepted):
    """KV entries that stay after a round: `cached`, the anchor, and the accepted drafts."""
    return cached + 1 + accepted


def draft_kept_length(committed):
    """KV entries of the draft before a round: its last two committed tokens are fed (again)."""
    return committed - 2


def truncated_length(length, keep):
    """KV entries of a row that was cut to `keep` entries: min(length, max(keep, 0))."""
    kept = keep * (keep > 0)
    return length * (length <= kept) + kept * (length > kept)


def kept_pages(length, page_size):
    """Pages that hold `length` tokens."""
    return length // page_size + (length % page_size > 0)


def is_freed(block, page, kept):
    """Whether a block of a row gives its page back: it holds one, and lies past the `kept` first."""
    return (block >= kept) & (page >= 0)


def is_slot(slot, slots):
    """Whether a cache has this slot."""
    return (slot >= 0) & (slot < slots)


def is_compaction(start, count, columns, slots):
    """Whether `count` of `columns` sources go to slots that a cache has, from `start` on (the sum might wrap)."""
    return (count >= 0) & (count <= columns) & (start >= 0) & (start <= slots - count)


def repetition_penalty(x, penalty, seen):
    """Keskar et al. 2019: seen tokens lose, whatever the sign of their logit (seen: 0 or 1)."""
    own = penalty * seen + (1 - seen)
    return x * ((x > 0) / own + (x <= 0) * own)


def is_repetition_on(penalty, largest=1.7976931348623157e308):
    """A repetition penalty that can be applied; 0, negative, infinite and NaN ones are off."""
    return (penalty > 0) & (penalty <= largest)


def is_count_penalty_on(penalty, largest=1.7976931348623157e308):
    """A frequency or presence penalty that can be applied; infinite and NaN ones are off, since inf * 0 is NaN."""
    return (penalty >= -largest) & (penalty <= largest)


def count_penalties(x, count, frequency, presence):
    """Frequency and presence penalties: per occurrence in the output, and once for having occurred."""
    return x - frequency * count - presence * (count > 0)
