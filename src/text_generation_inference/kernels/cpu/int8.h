// Matrices of 8 bits with one scale for all inputs of an output, times rows that are rounded to integers of 8 bits: sums of
// products are exact, whatever their order, and are scaled once.
#ifndef TGI_INT8_H
#define TGI_INT8_H

#include "panels.h"

enum { INT8_ROWS = 4 };  // rows of a tile

#if defined(__AVX512VNNI__) && VL == 16
enum { INT8_PER_WORD = 4 };  // bytes with the inputs of a word of the panel
#else
enum { INT8_PER_WORD = 2 };  // 16 bits each: those of the even bytes of a word, then those of the odd ones
#endif

INLINE int int8_allowed(const packed_weight *weight) {
  const int kind = (int)weight->kind;
  return weight->rounds_inputs && (kind == LOW8 || kind == LOW8_OFFSET) && (weight->columns / GROUP - 1) >> weight->shift == 0;
}

// A row: words, then what its sums begin with, the scale of its integers, and their sum as float.
INLINE long int8_row_words(long k) { return k / INT8_PER_WORD + 4; }

// The scale of a row's integers.
static float int8_scale(const float *x, long inputs, float given) {
  vf most = v_set(0.0f);
  int bad = 0;
  for (long i = 0; i < inputs; i += VL) {
    const vf a = inputs - i < VL ? v_load_n(x + i, inputs - i) : v_load(x + i);
    most = v_max(v_abs(a), most);
    bad |= m_any(v_is_nan(a));
  }
  const float largest = v_max_of(most);
  if (bad || !(largest <= FLT_MAX)) return NAN;
  if (given > 0.0f) return given;
  return largest / 127.0f > 1e-12f ? largest / 127.0f : 1e-12f;
}

INLINE vf int8_round(vf x, vf scale) { return v_max(v_set(-128.0f), v_min(v_set(127.0f), v_round(v_div(x, scale)))); }

// x [rows][k], k a multiple of GROUP, and the scale of each row.
static void int8_pack(const float *x, const float *scales, long rows, long k, int32_t *out) {
  const __m128i order = INT8_PER_WORD == 4 ? _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
                                           : _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  for (long r = 0; r < rows; r++, x += k, out += int8_row_words(k)) {
    const float scale = scales[r];
    int32_t total = 0;
    for (long i = 0; i < k; i += 16) {
      float rounded[16];
      int8_t bytes[16];
      for (int j = 0; j < 16; j += VL) v_store(rounded + j, scale == scale ? int8_round(v_load(x + i + j), v_set(scale)) : v_set(0.0f));
      for (int j = 0; j < 16; j++) bytes[j] = (int8_t)(int32_t)rounded[j];
      for (int j = 0; j < 16; j++) total += bytes[j];
      const __m128i ordered = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)bytes), order);
      if (INT8_PER_WORD == 4)
        _mm_storeu_si128((__m128i *)(out + i / 4), ordered);
      else
        _mm256_storeu_si256((__m256i *)(out + i / 2), _mm256_cvtepi8_epi16(ordered));
    }
    int32_t *end = out + k / INT8_PER_WORD;
    const float sum = (float)total;
    end[0] = INT8_PER_WORD == 4 ? -128 * total : 0;
    memcpy(end + 1, &scale, 4);
    memcpy(end + 2, &sum, 4);
  }
}

// `rows` packed rows times one panel -> out [rows][PANEL].
INLINE void int8_tile(const int kind, const int rows, const char *panel, long k, const int32_t *x, float *out) {
  const long next = int8_row_words(k), words = k / INT8_PER_WORD;
  const char *values = group_at(kind, panel, 0);
  vi totals[INT8_ROWS][3];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < 3; v++) totals[r][v] = vi_set(x[r * next + words]);
  for (long i = 0; i < k / 4; i++, values += PANEL * 4) {
    fetch(values + AHEAD);
    UNROLL for (int v = 0; v < 3; v++) {
      const vi w = vi_load(values + v * VL * 4);
#if defined(__AVX512VNNI__) && VL == 16
      const vi plain = _mm512_xor_si512(w, vi_set((int)0x80808080));
      UNROLL for (int r = 0; r < rows; r++) totals[r][v] = _mm512_dpbusd_epi32(totals[r][v], plain, vi_set(x[r * next + i]));
#else
      const vi even = vi_even_bytes(w), odd = vi_odd_bytes(w);
      UNROLL for (int r = 0; r < rows; r++)
        totals[r][v] = vi_add(totals[r][v], vi_add(vi_multiply_pairs(even, vi_set(x[r * next + 2 * i])),
                                                   vi_multiply_pairs(odd, vi_set(x[r * next + 2 * i + 1]))));
#endif
    }
  }
  UNROLL for (int v = 0; v < 3; v++) {
    vf d, m;
    load_centered(kind, panel, 0, 0, v, &d, &m);
    UNROLL for (int r = 0; r < rows; r++) {
      const float *factors = (const float *)(x + r * next + words);
      vf sum = v_mul(d, v_mul(vi_to_float(totals[r][v]), v_set(factors[1])));
      if (has_minimum(kind)) sum = v_fma(m, v_set(factors[2] * factors[1]), sum);
      v_store(out + r * PANEL + v * VL, sum);
    }
  }
}

static void int8_product(int kind, const char *panel, long k, const int32_t *x, long rows, float *out) {
  for (; rows > 0; rows -= INT8_ROWS, x += INT8_ROWS * int8_row_words(k), out += INT8_ROWS * PANEL) {
#define INT8_TILE(KIND, R) \
  case KIND * 8 + R: \
    int8_tile(KIND, R, panel, k, x, out); \
    break;
#define INT8_TILES(KIND) INT8_TILE(KIND, 1) INT8_TILE(KIND, 2) INT8_TILE(KIND, 3) INT8_TILE(KIND, 4)
    switch (kind * 8 + (rows < INT8_ROWS ? rows : INT8_ROWS)) { INT8_TILES(LOW8) INT8_TILES(LOW8_OFFSET) }
#undef INT8_TILES
#undef INT8_TILE
  }
}

// Rows as a matrix wants them --------------------------------------------------------------------------------------

INLINE int is_arranged(const packed_weight *weight) {
  return weight->order || weight->rounds_inputs || weight->columns != weight->in_features;
}

// x [rows][inputs] -> [rows][columns]: in the order of columns, those that no input has zero, and rounded to integers of 8 bits
// times their scale, unless the product does that. `scales` becomes that of each row.
static const float *arrange_rows(const packed_weight *weight, const float *x, long ldx, long rows, float *scales) {
  static __thread scratch memory;
  const long k = weight->columns, inputs = weight->in_features;
  float *out = reserve(&memory, (size_t)(rows * k) * 4);
  for (long r = 0; r < rows; r++, x += ldx) {
    float *to = out + r * k;
    if (weight->order) {
      for (long i = 0; i < k; i++) to[i] = weight->order[i] < 0 ? 0.0f : x[weight->order[i]];
    } else {
      memcpy(to, x, (size_t)inputs * 4);
      memset(to + inputs, 0, (size_t)(k - inputs) * 4);
    }
    if (weight->rounds_inputs) scales[r] = int8_scale(x, inputs, weight->input_scale);
    if (!weight->rounds_inputs || int8_allowed(weight)) continue;
    const vf scale = v_set(scales[r]);
    for (long i = 0; i < k; i += VL) v_store(to + i, v_mul(int8_round(v_load(to + i), scale), scale));
  }
  return out;
}

#endif
