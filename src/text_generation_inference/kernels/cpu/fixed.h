// Quantised weights times activations in fixed point, on VNNI: four products of bytes in a lane at once.
//
// The activations of a span, one group or a few with the same scales, are made integers of 22 to 24 bits, as fine as a
// 2,000,000th of the largest of them or finer, which is less than what float32 sums of this length round away. An integer is
// three bytes, digits between -128 and 127, of which each is multiplied with the stored integers of the
// weights exactly. So is the sum of a span; scale and offset are applied to that in float32:
//   sum of (d q + m) x  =  d * sum((q - c) x) + (m + c d) * sum(x)
// with the center c of the stored integers, which keeps sums of a span below 2^31. Every row is computed alike, however many
// there are.
#ifndef TGI_FIXED_H
#define TGI_FIXED_H

#include "panels.h"

enum { FIXED_ROWS = 4 };  // that are packed together

#if defined(__AVX512VNNI__) && VL == 16

enum { FIXED_SPAN = 4 };  // groups of a span, or fewer

INLINE int fixed_allowed(int kind) { return !is_plain(kind) && kind != FLOAT4; }

// Integers reach 128: the sums of the lowest digit, and those of the others, are integers of their own. Values are here plus
// 128, which is their center.
INLINE int fixed_apart(int kind) { return kind == IQ4_NL || is_bytes(kind); }
// What the largest activation becomes: three digits of 127 with some room for rounding, or as much as keeps the sum of a span
// below 2^31: 32 products with integers of up to 8, or (5 bits; half as many of 6) of up to 16; of few bits 128 of up to 8.
INLINE int fixed_scale(int kind) {
  return fixed_apart(kind) ? 8355000 : is_low(kind) ? 2064000 : high_bits(kind) ? 8355000 / 2 : 8355000;
}
INLINE int fixed_center(int kind) { return fixed_apart(kind) ? 128 : is_table(kind) ? TABLE_CENTER : center(kind); }

// How many groups are summed as integers, of most kinds one: 128 inputs times 8, or 64 times 16, times the largest activation are below 2^31.
INLINE int is_single(int kind) { return !is_low(kind) || halves(kind) > 1; }
INLINE long fixed_span(int kind, long shift) {
  if (is_single(kind)) return 1;
  const long most = kind == TABLE4 ? FIXED_SPAN / 2 : FIXED_SPAN;
  return 1L << shift < most ? 1L << shift : most;
}

// For every group of a row: digits [3][8 words], highest first; then, of the first group of a span, two times minus the center
// times a sum (of either half of the group; or of the lowest digits and of the rest), the factor back to float, and the span's
// sum as float. The words of FIXED_ROWS rows alternate; rows that are left over are packed one by one.
enum { FIXED_WORDS = 3 * 8 + 4 };
INLINE long fixed_row_words(long k) { return k / GROUP * FIXED_WORDS; }

typedef struct {
  vf scale;
  float factor;  // back to float
} fixed_scaling;

// Of a span. Without a number in it, or with one that is none, its integers are zero.
INLINE fixed_scaling fixed_scale_of(int kind, const float *x, long groups) {
  vf most = v_set(0.0f);
  int bad = 0;
  for (long i = 0; i < groups * GROUP; i += VL) {
    const vf a = v_load(x + i);
    most = v_max(v_abs(a), most);
    bad |= v_is_nan(a);
  }
  const float largest = v_max_of(most), scale = (float)fixed_scale(kind);
  if (bad || !(largest <= FLT_MAX)) return (fixed_scaling){v_set(0.0f), NAN};
  if (!(largest > 1e-32f)) return (fixed_scaling){v_set(0.0f), 0.0f};
  return (fixed_scaling){v_set(scale / largest), largest / scale};
}

typedef struct {
  vi totals[2], low;  // of either half of groups; of the lowest digits
} fixed_sums;

// VL activations as integers, whose three lower bytes are the digits.
INLINE vi fixed_digits(int kind, const float *x, fixed_scaling scaling, int half, fixed_sums *sums) {
  const vi order8 = vi_set(0x8080);
  const vf scaled = v_mul(v_load(x), scaling.scale);  // of what is no number as well: a span with such counts nothing
  const vi whole = _mm512_maskz_cvtps_epi32((__mmask16)-(scaling.factor == scaling.factor), scaled);
  sums->totals[half] = vi_add(sums->totals[half], whole);
  // Adding half of each lower digit's range brings the carries up; its bytes are then the digits.
  const vi bytes = _mm512_xor_si512(vi_add(whole, order8), order8);
  if (fixed_apart(kind)) sums->low = vi_add(sums->low, _mm512_srai_epi32(_mm512_slli_epi32(bytes, 24), 24));
  return bytes;
}

// What follows the digits of a span's first group; words of `rows` rows alternate.
INLINE void fixed_pack_sums(int kind, const fixed_sums *found, float factor, const long rows, int32_t *out) {
  int32_t sums[2] = {_mm512_reduce_add_epi32(found->totals[0]), _mm512_reduce_add_epi32(found->totals[1])};
  const float sum = (float)(sums[0] + sums[1]) * factor;
  if (halves(kind) == 1) sums[0] += sums[1];
  if (fixed_apart(kind)) {
    sums[1] = sums[0];
    sums[0] = _mm512_reduce_add_epi32(found->low);
    sums[1] = (sums[1] - sums[0]) / 256;
  }
  // What is added up passes 2^31 on the way for some kinds, not in the end.
  out[24 * rows] = (int32_t)(0u - (uint32_t)fixed_center(kind) * (uint32_t)sums[0]);
  out[25 * rows] = (int32_t)(0u - (uint32_t)fixed_center(kind) * (uint32_t)sums[1]);
  memcpy(out + 26 * rows, &factor, 4);
  memcpy(out + 27 * rows, &sum, 4);
}

// Of eight inputs 0 4 1 5 lie in the even nibbles of a word, 2 6 3 7 in the odd ones.
#define FIXED_ORDER _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)

INLINE __m128i fixed_digit(vi bytes, int digit) { return _mm512_cvtepi32_epi8(_mm512_srli_epi32(bytes, 16 - 8 * digit)); }

INLINE void fixed_pack_row(int kind, const float *x, long groups, int32_t *out) {
  const fixed_scaling scaling = fixed_scale_of(kind, x, groups);
  fixed_sums sums = {{vi_set(0), vi_set(0)}, vi_set(0)};
  for (long g = 0; g < groups; g++, x += GROUP)
    UNROLL for (int h = 0; h < 2; h++) {
      const vi bytes = fixed_digits(kind, x + h * VL, scaling, h, &sums);
      UNROLL for (int digit = 0; digit < 3; digit++)
        _mm_storeu_si128((__m128i *)(out + g * FIXED_WORDS + digit * 8 + h * 4), _mm_shuffle_epi8(fixed_digit(bytes, digit), FIXED_ORDER));
    }
  fixed_pack_sums(kind, &sums, scaling.factor, 1, out);
}

// FIXED_ROWS rows, whose words alternate: a vector holds what a digit of VL inputs is in all of them.
INLINE void fixed_pack_tile(int kind, const float *x, long ldx, long groups, int32_t *out) {
  const vi order = _mm512_broadcast_i32x4(FIXED_ORDER);
  const vi by_word = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  fixed_scaling scaling[FIXED_ROWS];
  fixed_sums sums[FIXED_ROWS];
  UNROLL for (int r = 0; r < FIXED_ROWS; r++) {
    scaling[r] = fixed_scale_of(kind, x + r * ldx, groups);
    sums[r] = (fixed_sums){{vi_set(0), vi_set(0)}, vi_set(0)};
  }
  for (long g = 0; g < groups; g++, x += GROUP)
    UNROLL for (int h = 0; h < 2; h++) {
      vi bytes[FIXED_ROWS];
      UNROLL for (int r = 0; r < FIXED_ROWS; r++) bytes[r] = fixed_digits(kind, x + r * ldx + h * VL, scaling[r], h, &sums[r]);
      UNROLL for (int digit = 0; digit < 3; digit++) {
        vi found = _mm512_castsi128_si512(fixed_digit(bytes[0], digit));
        found = _mm512_inserti32x4(found, fixed_digit(bytes[1], digit), 1);
        found = _mm512_inserti32x4(found, fixed_digit(bytes[2], digit), 2);
        found = _mm512_inserti32x4(found, fixed_digit(bytes[3], digit), 3);
        vi_store(out + (g * FIXED_WORDS + digit * 8 + h * 4) * FIXED_ROWS,
                 _mm512_permutexvar_epi32(by_word, _mm512_shuffle_epi8(found, order)));
      }
    }
  UNROLL for (int r = 0; r < FIXED_ROWS; r++) fixed_pack_sums(kind, &sums[r], scaling[r].factor, FIXED_ROWS, out + r);
}

// Groups `first` to `end` of x [rows][k], FIXED_ROWS rows or fewer; `first` is a multiple of FIXED_SPAN.
static void fixed_pack(int kind, long shift, const float *x, long ldx, long rows, long k, long first, long end, int32_t *out) {
  const long span = fixed_span(kind, shift);
  for (long g = first; g < end; g += span) {
    const long count = end - g < span ? end - g : span;
    if (rows == FIXED_ROWS)
      fixed_pack_tile(kind, x + g * GROUP, ldx, count, out + g * FIXED_ROWS * FIXED_WORDS);
    else
      for (long r = 0; r < rows; r++)
        fixed_pack_row(kind, x + r * ldx + g * GROUP, count, out + r * fixed_row_words(k) + g * FIXED_WORDS);
  }
}

// Vector `v` of the words that hold eight inputs, as bytes, of each output four inputs: those in even nibbles, and those in
// odd ones.
INLINE void fixed_expand(const int kind, const char *high, const char *values, const int part, int v, vi table, vi *out) {
  const vi nibbles = vi_set(0x0f0f0f0f), outer = vi_set(0x00ff00ff);
  const int bits = high_bits(kind);
  if (is_bytes(kind)) {
    UNROLL for (int i = 0; i < 2; i++)
      out[i] = _mm512_xor_si512(vi_load(values + ((part * 2 + i) * PANEL + v * VL) * 4), vi_set((int)0x80808080));
    return;
  }
  const vi words = vi_load(values + (part * PANEL + v * VL) * 4);
  out[0] = _mm512_and_si512(words, nibbles);
  out[1] = _mm512_and_si512(_mm512_srli_epi32(words, 4), nibbles);
  if (bits) {
    const vi wide = load_high(kind, high, part, v), mask = vi_set(bits == 2 ? 0x30303030 : 0x10101010);
    const int far = bits == 2 ? 4 : 6;  // how much further the second of two inputs moves
    const vi even = _mm512_ternarylogic_epi32(outer, _mm512_slli_epi32(wide, 4), _mm512_slli_epi32(wide, 4 + far), 0xca);
    const vi odd =
        _mm512_ternarylogic_epi32(outer, _mm512_slli_epi32(wide, 4 - bits), _mm512_slli_epi32(wide, 4 - bits + far), 0xca);
    out[0] = _mm512_ternarylogic_epi32(out[0], even, mask, 0xf8);
    out[1] = _mm512_ternarylogic_epi32(out[1], odd, mask, 0xf8);
  }
  if (kind == IQ4_NL || is_table(kind)) UNROLL for (int i = 0; i < 2; i++) out[i] = _mm512_shuffle_epi8(table, out[i]);
}

// The integers of a table plus their center, which `fixed_expand` looks up.
INLINE vi fixed_table(const int kind, const char *panel) {
  if (kind == IQ4_NL)
    return _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)iq4_values)), vi_set((int)0x80808080));
  if (!is_table(kind)) return vi_set(0);
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)((const low_prefix *)panel)->integers));
}

// What the sums of digits of a row begin with, for (half of) a group; `rows` are packed together.
INLINE void fixed_start(const int kind, const int rows, const int32_t *x, int half, vi *digits) {
  digits[0] = vi_set(0);
  digits[1] = fixed_apart(kind) ? vi_set(x[25 * rows]) : vi_set(0);
  digits[2] = vi_set(x[(24 + half) * rows]);
}

// Add to `sum` what the sums of digits stand for.
INLINE vf fixed_end(const int kind, const int rows, const int32_t *x, const vi *digits, vf d, vf m, vf sum) {
  const float *factors = (const float *)x + 26 * rows;
  const vi top = vi_add(_mm512_slli_epi32(digits[0], 8), digits[1]);
  vf total;
  if (fixed_apart(kind))
    total = v_fma(_mm512_cvtepi32_ps(top), v_set(256.0f), _mm512_cvtepi32_ps(digits[2]));
  else
    total = _mm512_cvtepi32_ps(vi_add(_mm512_slli_epi32(top, 8), digits[2]));
  sum = v_fma(d, v_mul(total, v_set(factors[0])), sum);
  return has_minimum(kind) ? v_fma(m, v_set(factors[rows]), sum) : sum;
}

// Ask for what comes AHEAD of a group. `passes`: it need not stay in larger caches, which then hold keys and values.
INLINE void fixed_fetch(const int kind, const int passes, const char *panel, long g) {
  if (has_header(kind)) fetch_scales(kind, panel, g);
  UNROLL for (int i = 0; i < group_bytes(kind); i += 64) {
    if (passes)
      __builtin_prefetch(group_at(kind, panel, g) + AHEAD + i, 0, 0);
    else
      __builtin_prefetch(group_at(kind, panel, g) + AHEAD + i, 0, 3);
  }
}

// Add to the sums of digits what (half of) a group gives for one or two rows: a digit that is read goes into the three vectors.
INLINE void fixed_add_few(const int kind, const int rows, const int half, const char *panel, long g, vi table, const int32_t *x,
                          long next, vi digits[][3][3]) {
  const char *high = group_at(kind, panel, g) + scales_bytes(kind), *values = high + high_bytes(kind);
  const int parts = 4 / halves(kind);
  if (half == 0) fixed_fetch(kind, 0, panel, g);
  UNROLL for (int part = half * parts; part < (half + 1) * parts; part++) {
    vi w[3][2];
    UNROLL for (int v = 0; v < 3; v++) fixed_expand(kind, high, values, part, v, table, w[v]);
    UNROLL for (int i = 0; i < 2; i++) UNROLL for (int r = 0; r < rows; r++) UNROLL for (int digit = 0; digit < 3; digit++) {
      const vi word = vi_set(x[r * next + digit * 8 + part * 2 + i]);
      UNROLL for (int v = 0; v < 3; v++) digits[r][v][digit] = _mm512_dpbusd_epi32(digits[r][v][digit], w[v][i], word);
    }
  }
}

INLINE void fixed_few(const int kind, const int rows, long span, const char *panel, long k, const int32_t *x, float *sums) {
  const long next = fixed_row_words(k), groups = k / GROUP;
  const vi table = fixed_table(kind, panel);
  for (long g = 0; g < groups; g += span, x += span * FIXED_WORDS) {
    UNROLL for (int half = 0; half < halves(kind); half++) {
      vi digits[2][3][3];
      UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < 3; v++)
          fixed_start(kind, 1, x + r * next, half, digits[r][v]);
      if (is_single(kind)) {
        fixed_add_few(kind, rows, half, panel, g, table, x, next, digits);
      } else {
        const long count = groups - g < span ? groups - g : span;
        NO_UNROLL for (long i = 0; i < count; i++)
          fixed_add_few(kind, rows, half, panel, g + i, table, x + i * FIXED_WORDS, next, digits);
      }
      UNROLL for (int v = 0; v < 3; v++) {
        vf d, m;
        load_centered(kind, panel, g, half, v, &d, &m);
        UNROLL for (int r = 0; r < rows; r++) {
          float *at = sums + r * PANEL + v * VL;
          v_store(at, fixed_end(kind, 1, x + r * next, digits[r][v], d, m, v_load(at)));
        }
      }
    }
  }
}

// Add the products of four bytes of each lane with those of the word at `x`, of three vectors: a word is read once for all of
// them. Compilers that are left to choose keep the weights of several words in registers, and sums in memory.
INLINE void add_products(vi sums[3][3], const int digit, const vi *w, const int32_t *x) {
  vi word;
  __asm__("vpbroadcastd %4, %3\n\t"
          "vpdpbusd %3, %5, %0\n\t"
          "vpdpbusd %3, %6, %1\n\t"
          "vpdpbusd %3, %7, %2"
          : "+&v"(sums[0][digit]), "+&v"(sums[1][digit]), "+&v"(sums[2][digit]), "=&v"(word)
          : "m"(*x), "v"(w[0]), "v"(w[1]), "v"(w[2]));
}

// Add to sums [rows][PANEL] what (half of) each of `groups` groups, expanded to `w`, gives for one row or two of those that are
// packed together.
INLINE void fixed_tile(const int kind, const int rows, const int packed, const int half, long groups, const vi w[][8][3], const int32_t *x,
                       const vf d[3][2], const vf *m, float *sums) {
  const int words = 8 / halves(kind);
  vi digits[2][3][3];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < 3; v++) fixed_start(kind, packed, x + r, half, digits[r][v]);
  const int32_t *word = x + half * words * packed;
  NO_UNROLL for (long g = 0; g < groups; g++, word += (FIXED_WORDS - words) * packed)
    NO_UNROLL for (int i = half * words; i < (half + 1) * words; i++, word += packed)
      UNROLL for (int digit = 0; digit < 3; digit++)
        UNROLL for (int r = 0; r < rows; r++) add_products(digits[r], digit, w[g][i], word + digit * 8 * packed + r);
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < 3; v++) {
    float *at = sums + r * PANEL + v * VL;
    v_store(at, fixed_end(kind, packed, x + r, digits[r][v], d[v][half], m[v], v_load(at)));
  }
}

// Vector `v` of a group.
INLINE void fixed_expand_group(const int kind, const char *panel, long g, int v, vi table, vi w[8][3]) {
  const char *high = group_at(kind, panel, g) + scales_bytes(kind), *values = high + high_bytes(kind);
  UNROLL for (int part = 0; part < 4; part++) {
    vi pair[2];
    fixed_expand(kind, high, values, part, v, table, pair);
    UNROLL for (int i = 0; i < 2; i++) w[2 * part + i][v] = pair[i];
  }
}

// Ask for what lies `ahead` bytes behind vector `v` of a group.
INLINE void fixed_ask(const int kind, const char *panel, long g, long v, long ahead) {
  const char *values = group_at(kind, panel, g) + scales_bytes(kind) + high_bytes(kind) + ahead + v * VL * 4;
  UNROLL for (int word = 0; word < 4 * word_count(kind); word++) __builtin_prefetch(values + word * PANEL * 4, 0, 0);
}

// Four rows or more, added to sums [rows][PANEL].
INLINE void fixed_many(const int kind, long span, const char *panel, long k, const int32_t *x, long rows, float *sums) {
  const long next = fixed_row_words(k), groups = k / GROUP;
  const vi table = fixed_table(kind, panel);
  for (long g = 0; g < groups; g += span) {
    const long count = is_single(kind) ? 1 : groups - g < span ? groups - g : span;
    // Of spans the same place of the next one, with what is expanded; of bytes the fourth group from here, a vector with each
    // pair of rows, so that not too much is asked for at once.
    const int pairs_ask = is_single(kind) && is_bytes(kind);
    const long ahead = is_single(kind) ? 4 * group_bytes(kind) : span * group_bytes(kind) + header_bytes(kind);
    if (pairs_ask)
      fetch(group_at(kind, panel, g) + ahead);
    else if (is_single(kind))
      fixed_fetch(kind, 1, panel, g);
    vf d[3][2], m[3];
    vi w[FIXED_SPAN][8][3];
    UNROLL for (int v = 0; v < 3; v++)
      UNROLL for (int half = 0; half < halves(kind); half++) load_centered(kind, panel, g, half, v, &d[v][half], &m[v]);
    NO_UNROLL for (long i = 0; i < count; i++)
      UNROLL for (int v = 0; v < 3; v++) {
        fixed_expand_group(kind, panel, g + i, v, table, w[i]);
        if (!is_single(kind)) fixed_ask(kind, panel, g + i, v, ahead);
      }
    long row = 0, asked = pairs_ask ? 0 : 3;
    const int32_t *at = x + g * FIXED_ROWS * FIXED_WORDS;
    NO_UNROLL for (; row + FIXED_ROWS <= rows; row += FIXED_ROWS, at += FIXED_ROWS * next)
      NO_UNROLL for (long pair = 0; pair < FIXED_ROWS; pair += 2) {
        if (asked < 3) fixed_ask(kind, panel, g, asked++, ahead);
        if (asked == 2 && rows < 2 * FIXED_ROWS) fixed_ask(kind, panel, g, asked++, ahead);
        UNROLL for (int half = 0; half < halves(kind); half++)
          fixed_tile(kind, 2, FIXED_ROWS, half, count, w, at + pair, d, m, sums + (row + pair) * PANEL);
      }
    at = x + row * next + g * FIXED_WORDS;
    NO_UNROLL for (; row < rows; row++, at += next)
      UNROLL for (int half = 0; half < halves(kind); half++)
        fixed_tile(kind, 1, 1, half, count, w, at, d, m, sums + row * PANEL);
  }
}

// Functions of their own: in one, all kinds would share its registers.
#define FIXED_FUNCTIONS(KIND) \
  static APART void fixed_one_##KIND(long span, const char *panel, long k, const int32_t *x, float *sums) { \
    if (fixed_allowed(KIND)) fixed_few(KIND, 1, is_single(KIND) ? 1 : span, panel, k, x, sums); \
  } \
  static APART void fixed_two_##KIND(long span, const char *panel, long k, const int32_t *x, float *sums) { \
    if (fixed_allowed(KIND)) fixed_few(KIND, 2, is_single(KIND) ? 1 : span, panel, k, x, sums); \
  } \
  static APART void fixed_many_##KIND(long span, const char *panel, long k, const int32_t *x, long rows, float *sums) { \
    if (fixed_allowed(KIND)) fixed_many(KIND, is_single(KIND) ? 1 : span, panel, k, x, rows, sums); \
  }
EACH_QUANTISED(FIXED_FUNCTIONS)
#undef FIXED_FUNCTIONS

// Add packed rows times one panel to sums [rows][PANEL].
static void fixed_product(int kind, const char *panel, long k, const int32_t *x, long rows, float *sums) {
  const long last = rows - 1, span = is_low(kind) ? fixed_span(kind, low_shift(panel)) : 1;
  switch (kind) {
#define FIXED_PRODUCT(KIND) \
  case KIND: \
    if (rows >= FIXED_ROWS) { \
      fixed_many_##KIND(span, panel, k, x, rows, sums); \
    } else { \
      if (rows >= 2) fixed_two_##KIND(span, panel, k, x, sums); \
      if (rows != 2) fixed_one_##KIND(span, panel, k, x + last * fixed_row_words(k), sums + last * PANEL); \
    } \
    break;
    EACH_QUANTISED(FIXED_PRODUCT)
#undef FIXED_PRODUCT
  }
}

#else

INLINE int fixed_allowed(int kind) { return 0 * kind; }
static long fixed_row_words(long k) { return 0 * k; }
static void fixed_pack(int kind, long shift, const float *x, long ldx, long rows, long k, long first, long end, int32_t *out) {
  (void)kind, (void)shift, (void)x, (void)ldx, (void)rows, (void)k, (void)first, (void)end, (void)out;
}
static void fixed_product(int kind, const char *panel, long k, const int32_t *x, long rows, float *sums) {
  (void)kind, (void)panel, (void)k, (void)x, (void)rows, (void)sums;
}

#endif
#endif
