// One float vector type and the operations the kernels need, for AVX-512 (16 lanes) and AVX2 (8 lanes).
// Every rounding is written out: products and sums fuse only where `v_fma` says so.
#ifndef TGI_SIMD_H
#define TGI_SIMD_H

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define APART __attribute__((noinline))

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("nounroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#define NO_UNROLL _Pragma("GCC unroll 1")  // where copies of a body would share loads and run out of registers
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#define VL 16
#define MAX_ROWS 8  // rows of a register tile: 8 x 3 vectors of sums, 3 of weights, 1 of activations
typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf v_load_n(const float *p, long n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
INLINE void v_store_n(float *p, vf x, long n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x); }
INLINE vf v_set(float x) { return _mm512_set1_ps(x); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
// Both return b when either is NaN.
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf v_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf v_half_to_float(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf v_bfloat_to_float(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vf v_int8_to_float(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vf v_uint8_to_float(const uint8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void vi_store(void *p, vi x) { _mm512_storeu_si512(p, x); }
INLINE vi vi_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vf vi_to_float(vi a) { return _mm512_cvtepi32_ps(a); }
// Bytes 0 and 2, or 1 and 3, of every lane as integers of 16 bits, and the sum of the products of such pairs.
INLINE vi vi_even_bytes(vi a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
INLINE vi vi_odd_bytes(vi a) { return _mm512_srai_epi16(a, 8); }
INLINE vi vi_multiply_pairs(vi a, vi b) { return _mm512_madd_epi16(a, b); }
INLINE vi vi_shift_right(vi a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vm v_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE vm v_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vm v_is_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
INLINE vm vi_gt(vi a, vi b) { return _mm512_cmpgt_epi32_mask(a, b); }
INLINE vf v_select(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
INLINE vi vi_select(vm m, vi yes, vi no) { return _mm512_mask_blend_epi32(m, no, yes); }
INLINE vm m_or(vm a, vm b) { return (vm)(a | b); }
INLINE vm m_none(void) { return 0; }
INLINE int m_any(vm a) { return a != 0; }
INLINE float v_sum(vf a) { return _mm512_reduce_add_ps(a); }
INLINE float v_max_of(vf a) { return _mm512_reduce_max_ps(a); }

// Nibble i (a constant) of every 32-bit lane as a float: the lookup reads the low four bits of a lane only.
INLINE vf v_nibble(vi words, int i) {
  const vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(i ? _mm512_srli_epi32(words, 4 * i) : words, table);
}

// The same, as what IQ4_NL has in its place.
INLINE vf v_nibble_in_table(vi words, int i) {
  const vf table = _mm512_setr_ps(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
  return _mm512_permutexvar_ps(i ? _mm512_srli_epi32(words, 4 * i) : words, table);
}

// The same, as what a table of 16 has in its place.
typedef vf v_table;
INLINE v_table v_load_table(const float *p) { return v_load(p); }
INLINE vf v_nibble_in(vi words, int i, v_table table) {
  return _mm512_permutexvar_ps(i ? _mm512_srli_epi32(words, 4 * i) : words, table);
}

// Byte i (a constant) of every 32-bit lane, which has a sign.
INLINE vf v_byte(vi words, int i) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(i < 3 ? _mm512_slli_epi32(words, 24 - 8 * i) : words, 24));
}

// The same with 1 or 2 (`bits`) higher bits, which lie at `place` of `high`.
INLINE vf v_wide_nibble(vi words, int i, vi high, int place, int bits) {
  const vi low = i ? _mm512_srli_epi32(words, 4 * i) : words, mask = _mm512_set1_epi32(15);
  high = place < 4 ? _mm512_slli_epi32(high, 4 - place) : _mm512_srli_epi32(high, place - 4);
  const vi both = _mm512_ternarylogic_epi32(mask, low, high, 0xca);  // low where the mask has bits, else high
  return _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32((16 << bits) - 1)));
}

INLINE vf v_scale_by_exponent(vf x, vf n) { return _mm512_scalef_ps(x, n); }
INLINE vf v_scale_down(vf x, vf n) { return _mm512_scalef_ps(x, n); }

// The sums of VL vectors -> one vector.
INLINE vf v_sums(const vf *p) {
  vf quad[4];
  UNROLL for (int i = 0; i < 4; i++) {
    vf ab = v_add(_mm512_unpacklo_ps(p[4 * i], p[4 * i + 1]), _mm512_unpackhi_ps(p[4 * i], p[4 * i + 1]));
    vf cd = v_add(_mm512_unpacklo_ps(p[4 * i + 2], p[4 * i + 3]), _mm512_unpackhi_ps(p[4 * i + 2], p[4 * i + 3]));
    __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    quad[i] = v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  vf ab = v_add(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
  vf cd = v_add(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88), _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
  return v_add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#define VL 8
#define MAX_ROWS 4
typedef __m256 vf;
typedef __m256i vi;
typedef __m256 vm;

INLINE __m256i v_first(long n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf v_load_n(const float *p, long n) { return _mm256_maskload_ps(p, v_first(n)); }
INLINE void v_store_n(float *p, vf x, long n) { _mm256_maskstore_ps(p, v_first(n), x); }
INLINE vf v_set(float x) { return _mm256_set1_ps(x); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf v_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf v_half_to_float(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf v_bfloat_to_float(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vf v_int8_to_float(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vf v_uint8_to_float(const uint8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void vi_store(void *p, vi x) { _mm256_storeu_si256((__m256i *)p, x); }
INLINE vi vi_set(int32_t x) { return _mm256_set1_epi32(x); }
INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vf vi_to_float(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vi vi_even_bytes(vi a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
INLINE vi vi_odd_bytes(vi a) { return _mm256_srai_epi16(a, 8); }
INLINE vi vi_multiply_pairs(vi a, vi b) { return _mm256_madd_epi16(a, b); }
INLINE vi vi_shift_right(vi a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vm v_gt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
INLINE vm v_lt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
INLINE vm v_is_nan(vf a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
INLINE vm vi_gt(vi a, vi b) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b)); }
INLINE vf v_select(vm m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }
INLINE vi vi_select(vm m, vi yes, vi no) {
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(no), _mm256_castsi256_ps(yes), m));
}
INLINE vm m_or(vm a, vm b) { return _mm256_or_ps(a, b); }
INLINE vm m_none(void) { return _mm256_setzero_ps(); }
INLINE int m_any(vm a) { return _mm256_movemask_ps(a) != 0; }
INLINE float v_sum(vf a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
INLINE float v_max_of(vf a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

INLINE vf v_nibble(vi words, int i) {
  vi low = i ? _mm256_srli_epi32(words, 4 * i) : words;
  return _mm256_cvtepi32_ps(i == 7 ? low : _mm256_and_si256(low, _mm256_set1_epi32(15)));
}

// The same times 16^i, saving a shift; nibble 7 would meet the sign and is shifted down after all.
INLINE vf v_nibble_in_place(vi words, int i) {
  if (i == 7) return _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 28));
  return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(15 << (4 * i))));
}

// A nibble as what IQ4_NL has in its place.
INLINE vf v_nibble_in_table(vi words, int i) {
  const vi table = _mm256_broadcastsi128_si256(_mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
  // The lookup is by byte; of the one that counts, the highest of a lane, the sign fills the lane on the way down.
  const vi index = _mm256_and_si256(i == 7 ? _mm256_srli_epi32(words, 4) : i == 6 ? words : _mm256_slli_epi32(words, 24 - 4 * i),
                                    _mm256_set1_epi32(15 << 24));
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_shuffle_epi8(table, index), 24));
}

// A nibble as what a table of 16 has in its place.
typedef struct {
  vf low, high;
} v_table;
INLINE v_table v_load_table(const float *p) { return (v_table){v_load(p), v_load(p + VL)}; }
INLINE vf v_nibble_in(vi words, int i, v_table table) {
  const vi index = i ? _mm256_srli_epi32(words, 4 * i) : words;  // three bits of it are looked at, and then the fourth
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index), _mm256_permutevar8x32_ps(table.high, index),
                          _mm256_castsi256_ps(_mm256_slli_epi32(words, 28 - 4 * i)));
}

// Byte i (a constant) of every 32-bit lane, which has a sign.
INLINE vf v_byte(vi words, int i) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(i < 3 ? _mm256_slli_epi32(words, 24 - 8 * i) : words, 24));
}

// A nibble with 1 or 2 (`bits`) higher bits, which lie at `place` of `high`.
INLINE vf v_wide_nibble(vi words, int i, vi high, int place, int bits) {
  const vi low = _mm256_and_si256(i ? _mm256_srli_epi32(words, 4 * i) : words, _mm256_set1_epi32(15));
  high = place < 4 ? _mm256_slli_epi32(high, 4 - place) : _mm256_srli_epi32(high, place - 4);
  return _mm256_cvtepi32_ps(_mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi32((16 << bits) - 16))));
}

// x * 2^n for integral n in [-126, 128]; two factors keep 2^128 within range.
INLINE vf v_scale_by_exponent(vf x, vf n) {
  vi whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  vi first = _mm256_slli_epi32(_mm256_add_epi32(half, _mm256_set1_epi32(127)), 23);
  vi second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}

// The same for n in [-126, 0].
INLINE vf v_scale_down(vf x, vf n) {
  vi exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}

INLINE vf v_sums(const vf *p) {
  vf quad[2];
  UNROLL for (int i = 0; i < 2; i++) {
    vf ab = v_add(_mm256_unpacklo_ps(p[4 * i], p[4 * i + 1]), _mm256_unpackhi_ps(p[4 * i], p[4 * i + 1]));
    vf cd = v_add(_mm256_unpacklo_ps(p[4 * i + 2], p[4 * i + 3]), _mm256_unpackhi_ps(p[4 * i + 2], p[4 * i + 3]));
    __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
    quad[i] = v_add(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  return v_add(_mm256_permute2f128_ps(quad[0], quad[1], 0x20), _mm256_permute2f128_ps(quad[0], quad[1], 0x31));
}

#else
#error "needs AVX-512 (F, BW, DQ, VL) or AVX2 with FMA and F16C"
#endif

#define PANEL (3 * VL)  // outputs that one panel of a packed weight holds side by side

// e^x within about one unit in the last place; 0 far below, infinity far above, NaN stays NaN.
INLINE vf v_exp(vf x) {
  x = v_max(v_set(-104.0f), v_min(v_set(89.0f), x));
  vf n = v_round(v_mul(x, v_set(1.44269504088896341f)));
#if VL == 8
  // The exponent arithmetic below 2^-126 would wrap; such results are rounded to zero instead.
  vm tiny = v_lt(x, v_set(-87.33f));
#endif
  vf r = v_fnma(n, v_set(0.693359375f), x);
  r = v_fnma(n, v_set(-2.12194440e-4f), r);
  vf p = v_set(1.9875691500e-4f);
  p = v_fma(p, r, v_set(1.3981999507e-3f));
  p = v_fma(p, r, v_set(8.3334519073e-3f));
  p = v_fma(p, r, v_set(4.1665795894e-2f));
  p = v_fma(p, r, v_set(1.6666665459e-1f));
  p = v_fma(p, r, v_set(5.0000001201e-1f));
  p = v_fma(p, v_mul(r, r), v_add(r, v_set(1.0f)));
  p = v_scale_by_exponent(p, n);
#if VL == 8
  p = v_select(tiny, v_set(0.0f), p);
#endif
  return p;
}

// 2^x for x <= 0 within about two units in the last place; x below -126 counts as -126, NaN stays NaN.
INLINE vf v_exp2_down(vf x) {
  x = v_max(v_set(-126.0f), x);
  vf n = v_round(x), r = v_sub(x, n);
  vf p = v_set(1.326472725e-3f);
  p = v_fma(p, r, v_set(9.671512786e-3f));
  p = v_fma(p, r, v_set(5.550733744e-2f));
  p = v_fma(p, r, v_set(2.402224208e-1f));
  p = v_fma(p, r, v_set(6.931469776e-1f));
  return v_scale_down(v_fma(p, r, v_set(1.0f)), n);
}

INLINE vf v_tanh(vf x) {
  vf square = v_mul(x, x);
  vf p = v_set(-5.70498872745e-3f);
  p = v_fma(p, square, v_set(2.06390887954e-2f));
  p = v_fma(p, square, v_set(-5.37397155531e-2f));
  p = v_fma(p, square, v_set(1.33314422036e-1f));
  p = v_fma(p, square, v_set(-3.33332819422e-1f));
  vf near_zero = v_fma(v_mul(p, square), x, x);
  vf one = v_set(1.0f);
  vf far = v_sub(one, v_div(v_set(2.0f), v_add(v_exp(v_add(x, x)), one)));
  return v_select(v_lt(v_abs(x), v_set(0.625f)), near_zero, far);
}

#endif
