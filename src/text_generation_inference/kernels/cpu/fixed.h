// Quantised weights times activations in fixed point, on VNNI: four products of bytes in a lane at once.
//
// The activations of a group are made integers of 22 bits, as fine as a 2,000,000th of the largest of them, which is less
// than what float32 sums of this length round away. An integer is three bytes, a value between -32 and 31 and two digits
// between -128 and 127, and each byte is multiplied with the stored integers of the weights exactly. So is the sum of a
// group; scale and offset are applied to that in float32:  sum of (d q + m) x  =  d * sum((q - c) x) + (m + c d) * sum(x)
// with the center c of the stored integers, which keeps sums of 32 products below 2^31. Every row is computed alike,
// however many there are.
#ifndef TGI_FIXED_H
#define TGI_FIXED_H

#include "panels.h"

enum { FIXED_ROWS = 4 };  // rows of a tile, whose sums stay in registers

#if defined(__AVX512VNNI__) && VL == 16

enum { FIXED_SCALE = 2064000 };  // of the largest activation: 31 * 2^16 + 127 * 2^8 + 127, and some room for rounding

INLINE int fixed_allowed(int kind) { return kind != FLOAT32 && kind != Q8_0; }

// A table's values reach 127: the sums of the lowest digit, and those of the others, are integers of their own. Values are
// here plus 128, which is their center.
INLINE int fixed_apart(int kind) { return kind == IQ4_NL; }
INLINE int fixed_center(int kind) { return fixed_apart(kind) ? 128 : center(kind); }

// For every group of a row: digits [3][8 words], highest first, then two times minus the center times a sum (of either half
// of the group; or of the lowest digits and of the rest), the factor back to float, and the group's sum as float. The words
// of FIXED_ROWS rows alternate; rows that are left over are packed one by one.
enum { FIXED_WORDS = 3 * 8 + 4 };
INLINE long fixed_row_words(long k) { return k / GROUP * FIXED_WORDS; }

static void fixed_pack_group(int kind, const float *x, long rows, int32_t *out) {
  const vf a = v_load(x), b = v_load(x + VL);
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(v_abs(a), v_abs(b)));
  const int bad = v_is_nan(a) | v_is_nan(b) | !(largest <= FLT_MAX);
  const int empty = !(largest > 1e-32f);
  const vf scale = v_set(bad || empty ? 0.0f : (float)FIXED_SCALE / largest);
  const vi order8 = vi_set(0x8080);
  vi half[2] = {_mm512_cvtps_epi32(v_mul(a, scale)), _mm512_cvtps_epi32(v_mul(b, scale))};
  if (bad) half[0] = half[1] = vi_set(0);
  int32_t sums[2] = {_mm512_reduce_add_epi32(half[0]), _mm512_reduce_add_epi32(half[1])};
  // Adding half of each lower digit's range brings the carries up; its bytes are then the digits.
  UNROLL for (int h = 0; h < 2; h++) half[h] = _mm512_xor_si512(vi_add(half[h], order8), order8);
  // Of eight inputs 0 4 1 5 lie in the even nibbles of a word, 2 6 3 7 in the odd ones.
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  UNROLL for (int digit = 0; digit < 3; digit++) UNROLL for (int h = 0; h < 2; h++) {
    const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(_mm512_srli_epi32(half[h], 16 - 8 * digit)), order);
    int32_t *at = out + (digit * 8 + h * 4) * rows;
    at[0] = _mm_extract_epi32(bytes, 0);
    at[rows] = _mm_extract_epi32(bytes, 1);
    at[2 * rows] = _mm_extract_epi32(bytes, 2);
    at[3 * rows] = _mm_extract_epi32(bytes, 3);
  }
  const float factor = bad ? NAN : empty ? 0.0f : largest / (float)FIXED_SCALE;
  const float sum = (float)(sums[0] + sums[1]) * factor;
  if (halves(kind) == 1) sums[0] += sums[1];
  if (fixed_apart(kind)) {
    vi low = vi_set(0);
    UNROLL for (int h = 0; h < 2; h++) low = vi_add(low, _mm512_srai_epi32(_mm512_slli_epi32(half[h], 24), 24));
    sums[1] = sums[0];
    sums[0] = _mm512_reduce_add_epi32(low);
    sums[1] = (sums[1] - sums[0]) / 256;
  }
  out[24 * rows] = -fixed_center(kind) * sums[0];
  out[25 * rows] = -fixed_center(kind) * sums[1];
  memcpy(out + 26 * rows, &factor, 4);
  memcpy(out + 27 * rows, &sum, 4);
}

// x [rows][k], FIXED_ROWS rows or fewer.
static void fixed_pack(int kind, const float *x, long ldx, long rows, long k, int32_t *out) {
  const long together = rows == FIXED_ROWS ? FIXED_ROWS : 1;
  for (long r = 0; r < rows; r++)
    for (long g = 0; g < k / GROUP; g++)
      fixed_pack_group(kind, x + r * ldx + g * GROUP, together,
                       out + (together > 1 ? r : r * fixed_row_words(k)) + g * together * FIXED_WORDS);
}

// Vector `v` of word `part` of a group as bytes, of each output four inputs: those in even nibbles, and those in odd ones.
INLINE void fixed_expand(const int kind, const char *high, const char *values, const int part, int v, vi *out) {
  const vi nibbles = vi_set(0x0f0f0f0f), outer = vi_set(0x00ff00ff);
  const int bits = high_bits(kind);
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
  if (kind == IQ4_NL) {
    const __m128i values16 = _mm_loadu_si128((const __m128i *)iq4_values);
    const vi table = _mm512_xor_si512(_mm512_broadcast_i32x4(values16), vi_set((int)0x80808080));
    UNROLL for (int i = 0; i < 2; i++) out[i] = _mm512_shuffle_epi8(table, out[i]);
  }
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

INLINE void fixed_scales(const int kind, const char *panel, long g, int half, int v, vf *d, vf *m) {
  load_scales(kind, panel, g, half, v, d, m);
  if (has_minimum(kind)) *m = v_fma(*d, v_set((float)center(kind)), *m);
}

INLINE void fixed_fetch(const int kind, const char *panel, long g) {
  if (has_header(kind)) fetch_scales(kind, panel, g);
  UNROLL for (int i = 0; i < group_bytes(kind); i += 64) __builtin_prefetch(group_at(kind, panel, g) + AHEAD + i, 0, 3);
}

// One or two rows: a digit that is read goes into the three vectors of a panel.
INLINE void fixed_few(const int kind, const int rows, const char *panel, long k, const int32_t *x, float *sums) {
  const long next = fixed_row_words(k);
  for (long g = 0; g < k / GROUP; g++, x += FIXED_WORDS) {
    const char *high = group_at(kind, panel, g) + scales_bytes(kind), *values = high + high_bytes(kind);
    fixed_fetch(kind, panel, g);
    UNROLL for (int half = 0; half < halves(kind); half++) {
      vi digits[2][3][3];
      UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < 3; v++)
          fixed_start(kind, 1, x + r * next, half, digits[r][v]);
      const int parts = 4 / halves(kind);
      UNROLL for (int part = half * parts; part < (half + 1) * parts; part++) {
        vi w[3][2];
        UNROLL for (int v = 0; v < 3; v++) fixed_expand(kind, high, values, part, v, w[v]);
        UNROLL for (int i = 0; i < 2; i++) UNROLL for (int r = 0; r < rows; r++) UNROLL for (int digit = 0; digit < 3; digit++) {
          const vi word = vi_set(x[r * next + digit * 8 + part * 2 + i]);
          UNROLL for (int v = 0; v < 3; v++) digits[r][v][digit] = _mm512_dpbusd_epi32(digits[r][v][digit], w[v][i], word);
        }
      }
      UNROLL for (int v = 0; v < 3; v++) {
        vf d, m;
        fixed_scales(kind, panel, g, half, v, &d, &m);
        UNROLL for (int r = 0; r < rows; r++) {
          float *at = sums + r * PANEL + v * VL;
          v_store(at, fixed_end(kind, 1, x + r * next, digits[r][v], d, m, v_load(at)));
        }
      }
    }
  }
}

// Add to sums [rows][PANEL] what a group, expanded to `w`, gives for one vector.
INLINE void fixed_tile(const int kind, const int rows, const vi *w, const int32_t *x, const vf *d, vf m, float *sums) {
  UNROLL for (int half = 0; half < halves(kind); half++) {
    const int words = 8 / halves(kind);
    vi digits[FIXED_ROWS][3];
    UNROLL for (int r = 0; r < rows; r++) fixed_start(kind, rows, x + r, half, digits[r]);
    UNROLL for (int i = half * words; i < (half + 1) * words; i++)
      UNROLL for (int digit = 0; digit < 3; digit++)
        UNROLL for (int r = 0; r < rows; r++)
          digits[r][digit] = _mm512_dpbusd_epi32(digits[r][digit], w[i], vi_set(x[(digit * 8 + i) * rows + r]));
    UNROLL for (int r = 0; r < rows; r++)
      v_store(sums + r * PANEL, fixed_end(kind, rows, x + r, digits[r], d[half], m, v_load(sums + r * PANEL)));
  }
}

// Add packed rows times one panel to sums [rows][PANEL].
INLINE void fixed_panel(const int kind, const char *panel, long k, const int32_t *x, long rows, float *sums) {
  const long next = fixed_row_words(k);
  if (rows < FIXED_ROWS) {
    if (rows >= 2) fixed_few(kind, 2, panel, k, x, sums);
    if (rows != 2) fixed_few(kind, 1, panel, k, x + (rows - 1) * next, sums + (rows - 1) * PANEL);
    return;
  }
  for (long g = 0; g < k / GROUP; g++) {
    const char *high = group_at(kind, panel, g) + scales_bytes(kind);
    fixed_fetch(kind, panel, g);
    NO_UNROLL for (int v = 0; v < 3; v++) {
      vf d[2], m;
      vi w[8];
      UNROLL for (int half = 0; half < halves(kind); half++) fixed_scales(kind, panel, g, half, v, &d[half], &m);
      UNROLL for (int part = 0; part < 4; part++) fixed_expand(kind, high, high + high_bytes(kind), part, v, w + 2 * part);
      long row = 0;
      const int32_t *at = x + g * FIXED_ROWS * FIXED_WORDS;
      NO_UNROLL for (; row + FIXED_ROWS <= rows; row += FIXED_ROWS, at += FIXED_ROWS * next)
        fixed_tile(kind, FIXED_ROWS, w, at, d, m, sums + row * PANEL + v * VL);
      at = x + row * next + g * FIXED_WORDS;
      NO_UNROLL for (; row < rows; row++, at += next) fixed_tile(kind, 1, w, at, d, m, sums + row * PANEL + v * VL);
    }
  }
}

static void fixed_product(int kind, const char *panel, long k, const int32_t *x, long rows, float *sums) {
  switch (kind) {
#define FIXED_PANEL(KIND) \
  case KIND: \
    if (fixed_allowed(KIND)) fixed_panel(KIND, panel, k, x, rows, sums); \
    break;
    EACH_QUANTISED(FIXED_PANEL)
#undef FIXED_PANEL
  }
}

#else

static int fixed_allowed(int kind) { return 0 * kind; }
static long fixed_row_words(long k) { return 0 * k; }
static void fixed_pack(int kind, const float *x, long ldx, long rows, long k, int32_t *out) {
  (void)kind, (void)x, (void)ldx, (void)rows, (void)k, (void)out;
}
static void fixed_product(int kind, const char *panel, long k, const int32_t *x, long rows, float *sums) {
  (void)kind, (void)panel, (void)k, (void)x, (void)rows, (void)sums;
}

#endif
#endif
