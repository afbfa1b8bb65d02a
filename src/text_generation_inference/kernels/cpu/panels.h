// The packed form of a weight, and how its values are read.
//
// A packed weight is a run of panels of PANEL outputs each (the last one padded with zeros), read from first byte to
// last. Plain ones are [in][PANEL] of float, or of 16 bits where those hold all values exactly. Quantised ones are a run of groups of 32 inputs, each
//   half d [PANEL]                     padded to 64 bytes: Q4_0, Q5_0, Q8_0, IQ4_NL; with half m [PANEL]: Q4_1, Q5_1
//   words [high bits of a value][PANEL]  Q5_0, Q5_1, Q5_K: 1, Q6_K: 2; the others have none
//   words [4][PANEL], or [8][PANEL] of 8 bits
// Nibble i of word w is input 8 w + 2 i, and 8 w + 2 (i - 4) + 1 from i = 4: even inputs in the lower half of a word, odd
// ones in the upper half. So it is in the words of high bits. Of 8 bits, the even nibbles of a word are the bytes of one
// word, and the odd ones those of the next. Eight groups of a k-quant follow a header:
//   Q4_K, Q5_K  half d [PANEL], half dmin [PANEL], uint8 scale [8][PANEL], uint8 min [8][PANEL]
//   Q6_K        half d [PANEL], int8 scale [16][PANEL] (one for 16 inputs), padded to 64 bytes
// Panels of the kinds from LOW4 on begin with a `low_prefix`; then 2^shift groups follow a header:
//   float d [PANEL] ([2][PANEL] of TABLE4_HALVES), and of kinds with an offset float m [PANEL]
#ifndef TGI_PANELS_H
#define TGI_PANELS_H

#include "team.h"

enum {
  FLOAT32, BFLOAT16, FLOAT16,
  Q4_0, Q4_1, Q8_0, Q5_0, Q5_1, IQ4_NL, Q4_K, Q5_K, Q6_K,
  LOW4, LOW4_OFFSET,      // d (q - 8), and + m
  LOW8, LOW8_OFFSET,      // d (q - 128), and + m
  TABLE4, TABLE4_HALVES,  // d table[q], of integers from -32 to 31; the second with a scale for 16 inputs
  FLOAT4                  // d table[q]
};
#define EACH_LOW(DO) DO(LOW4) DO(LOW4_OFFSET) DO(LOW8) DO(LOW8_OFFSET) DO(TABLE4) DO(TABLE4_HALVES) DO(FLOAT4)
#define EACH_QUANTISED(DO) \
  DO(Q4_0) DO(Q4_1) DO(Q8_0) DO(Q5_0) DO(Q5_1) DO(IQ4_NL) DO(Q4_K) DO(Q5_K) DO(Q6_K) EACH_LOW(DO)
enum { GROUP = 32 };    // inputs that are read together; they share one scale, or two
enum { SUPER = 8 };     // groups behind one header of a k-quant
enum { AHEAD = 6144 };  // bytes between what is read and what is asked for

typedef struct packed_weight {
  int64_t kind, out_features, in_features;
  int64_t columns;                   // of its panels: the inputs; of low kinds more, to a whole group, or in another order
  int64_t shift;                     // of low kinds: 2^shift groups follow a header
  const void *data;
  const struct packed_weight *next;  // the outputs that follow, stored in another kind; or null
  const int32_t *order;              // the input of each column, -1: none; or null: as they come
  int64_t rounds_inputs;             // rows are rounded to integers of 8 bits first
  float input_scale;                 // of those; 0: found from each row
} packed_weight;

typedef struct {
  int32_t shift, unused[3];
  uint8_t integers[16];  // of a table, plus TABLE_CENTER
  char end[32];
  float values[16];      // of a table
} low_prefix;
enum { TABLE_CENTER = 32 };

INLINE int is_plain(int kind) { return kind <= FLOAT16; }
INLINE int is_low(int kind) { return kind >= LOW4; }
INLINE int is_bytes(int kind) { return kind == Q8_0 || kind == LOW8 || kind == LOW8_OFFSET; }
INLINE int is_table(int kind) { return kind == TABLE4 || kind == TABLE4_HALVES || kind == FLOAT4; }
INLINE int has_header(int kind) { return kind >= Q4_K; }
INLINE int has_minimum(int kind) {
  return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K || kind == LOW4_OFFSET || kind == LOW8_OFFSET;
}
INLINE int high_bits(int kind) { return kind == Q6_K ? 2 : kind == Q5_0 || kind == Q5_1 || kind == Q5_K; }
INLINE int halves(int kind) { return kind == Q6_K || kind == TABLE4_HALVES ? 2 : 1; }  // parts with a scale of their own
INLINE int center(int kind) {  // of the stored integers; bytes have a sign
  return is_bytes(kind) || is_table(kind) || kind == IQ4_NL ? 0 : 8 << high_bits(kind);
}

INLINE long align64(long bytes) { return (bytes + 63) / 64 * 64; }
INLINE long scales_bytes(int kind) {
  return has_header(kind) ? 0 : has_minimum(kind) ? PANEL * 4 : align64(PANEL * 2);
}
INLINE long high_bytes(int kind) { return high_bits(kind) * PANEL * 4; }
INLINE long group_bytes(int kind) {
  if (is_plain(kind)) return GROUP * PANEL * (kind == FLOAT32 ? 4 : 2);
  return scales_bytes(kind) + high_bytes(kind) + (is_bytes(kind) ? PANEL * GROUP : PANEL * GROUP / 2);
}
INLINE long header_bytes(int kind) {
  if (!has_header(kind)) return 0;
  return is_low(kind) ? PANEL * 4 * (halves(kind) + has_minimum(kind)) : kind == Q6_K ? align64(PANEL * 18) : PANEL * 20;
}
INLINE long super_bytes(int kind) { return header_bytes(kind) + SUPER * group_bytes(kind); }
INLINE long panel_bytes(const packed_weight *weight) {
  const int kind = (int)weight->kind;
  const long k = weight->columns, groups = k / GROUP;
  if (is_plain(kind)) return k * PANEL * (kind == FLOAT32 ? 4 : 2);
  if (is_low(kind))
    return (long)sizeof(low_prefix) + groups * group_bytes(kind) + (((groups - 1) >> weight->shift) + 1) * header_bytes(kind);
  return has_header(kind) ? groups / SUPER * super_bytes(kind) : groups * group_bytes(kind);
}
INLINE long panel_count(long n) { return (n + PANEL - 1) / PANEL; }
INLINE long whole_features(const packed_weight *weight) {
  long total = 0;
  for (; weight; weight = weight->next) total += weight->out_features;
  return total;
}

// Group `g` of a panel, and the header before it.
INLINE long low_shift(const char *panel) { return ((const low_prefix *)panel)->shift; }
INLINE const char *group_at(int kind, const char *panel, long g) {
  if (is_low(kind))
    return panel + sizeof(low_prefix) + g * group_bytes(kind) + ((g >> low_shift(panel)) + 1) * header_bytes(kind);
  if (!has_header(kind)) return panel + g * group_bytes(kind);
  return panel + g / SUPER * super_bytes(kind) + header_bytes(kind) + g % SUPER * group_bytes(kind);
}
INLINE const char *header_at(int kind, const char *panel, long g) {
  if (!is_low(kind)) return panel + g / SUPER * super_bytes(kind);
  const long number = g >> low_shift(panel);
  return panel + sizeof(low_prefix) + number * header_bytes(kind) + (number << low_shift(panel)) * group_bytes(kind);
}

// The scale and the offset of (half of) a group for vector `v` of a panel, as they are stored.
INLINE void load_factors(int kind, const char *panel, long g, int half, int v, vf *d, vf *m) {
  *m = v_set(0.0f);
  if (is_low(kind)) {
    const float *header = (const float *)header_at(kind, panel, g);
    *d = v_load(header + half * PANEL + v * VL);
    if (has_minimum(kind)) *m = v_load(header + PANEL + v * VL);
  } else if (has_header(kind)) {
    const char *header = header_at(kind, panel, g);
    const uint16_t *factors = (const uint16_t *)header;
    if (kind == Q6_K) {
      *d = v_mul(v_half_to_float(factors + v * VL),
                 v_int8_to_float((const int8_t *)header + PANEL * (2 + g % SUPER * 2 + half) + v * VL));
    } else {
      const uint8_t *scales = (const uint8_t *)header + PANEL * (4 + g % SUPER) + v * VL;
      *d = v_mul(v_half_to_float(factors + v * VL), v_uint8_to_float(scales));
      *m = v_sub(v_set(0.0f), v_mul(v_half_to_float(factors + PANEL + v * VL), v_uint8_to_float(scales + PANEL * SUPER)));
    }
  } else {
    const uint16_t *scales = (const uint16_t *)group_at(kind, panel, g);
    *d = v_half_to_float(scales + v * VL);
    if (has_minimum(kind)) *m = v_half_to_float(scales + PANEL + v * VL);
  }
}

// A value is d * integer + m.
INLINE void load_scales(int kind, const char *panel, long g, int half, int v, vf *d, vf *m) {
  load_factors(kind, panel, g, half, v, d, m);
  if (center(kind) && (is_low(kind) || !has_minimum(kind))) *m = v_fnma(*d, v_set((float)center(kind)), *m);
}

// A value is d * (integer - center) + m.
INLINE void load_centered(int kind, const char *panel, long g, int half, int v, vf *d, vf *m) {
  load_factors(kind, panel, g, half, v, d, m);
  if (has_minimum(kind) && !is_low(kind)) *m = v_fma(*d, v_set((float)center(kind)), *m);
}

INLINE int is_moved(int kind) { return center(kind) || has_minimum(kind); }  // `load_scales` gives an m that is not zero

// Vector `v` of input `i` of a plain panel.
INLINE vf load_plain(int kind, const char *panel, long i, int v) {
  if (kind == FLOAT32) return v_load((const float *)panel + i * PANEL + v * VL);
  const uint16_t *at = (const uint16_t *)panel + i * PANEL + v * VL;
  return kind == BFLOAT16 ? v_bfloat_to_float(at) : v_half_to_float(at);
}

// The nibble of a word that holds input `i` of its eight: even inputs in the low half, odd ones in the high half.
INLINE int nibble_of(int i) { return (i & 1) * 4 + i / 2; }

// The high bits of the eight inputs of word `part`, from bit 0 and from bit 16 on. `values` is where a group's words begin.
INLINE vi load_high(int kind, const char *values, int part, int v) {
  const int bits = high_bits(kind);
  if (!bits) return vi_set(0);
  return vi_shift_right(vi_load(values + (part * bits / 4 * PANEL + v * VL) * 4), part * bits * 4 % 16);
}

// The words of vector `v` that hold eight inputs, from `values` on: one, or two of bytes.
INLINE int word_count(int kind) { return is_bytes(kind) ? 2 : 1; }
INLINE void load_words(int kind, const char *values, int v, vi *words) {
  words[0] = vi_load(values + v * VL * 4);
  if (is_bytes(kind)) words[1] = vi_load(values + (PANEL + v * VL) * 4);
}

INLINE v_table load_table(int kind, const char *panel) {
  static const float none[16];
  return v_load_table(is_table(kind) ? ((const low_prefix *)panel)->values : none);
}

// Input `i` (a constant) of eight as the stored integer, or as the value that a table has for it.
INLINE vf v_integer(int kind, const vi *words, vi high, v_table table, int i) {
  const int bits = high_bits(kind), n = nibble_of(i);
  if (is_bytes(kind)) return v_byte(words[n & 1], n / 2);
  if (is_table(kind)) return v_nibble_in(words[0], n, table);
  if (kind == IQ4_NL) return v_nibble_in_table(words[0], n);
  return bits ? v_wide_nibble(words[0], n, high, (i & 1) * 16 + i / 2 * bits, bits) : v_nibble(words[0], n);
}

// Ask for the PANEL * 4 bytes at `p`; past the end of a weight this does nothing.
INLINE void fetch(const char *p) {
  UNROLL for (int i = 0; i < PANEL * 4; i += 64) __builtin_prefetch(p + i, 0, 3);
}

// Ask for what comes AHEAD of a group's scales and of a header before it.
INLINE void fetch_scales(int kind, const char *panel, long g) {
  if (!has_header(kind))
    fetch(group_at(kind, panel, g) + AHEAD);
  else if (is_low(kind) ? (g & ((1L << low_shift(panel)) - 1)) == 0 : g % SUPER == 0)
    UNROLL for (int i = 0; i < header_bytes(kind); i += PANEL * 4) fetch(header_at(kind, panel, g) + AHEAD + i);
}

// Row lookup ---------------------------------------------------------------------------------------------------

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static float bfloat_to_float(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static float half_to_float(uint16_t half) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half))); }

static int integer_at(int kind, const char *values, long lane, int i) {
  const int bits = high_bits(kind), part = i / 8, n = nibble_of(i % 8);
  if (is_bytes(kind)) return ((const int8_t *)values)[((part * 2 + n % 2) * PANEL + lane) * 4 + n / 2];
  const uint32_t *words = (const uint32_t *)(values + high_bytes(kind)), *high = (const uint32_t *)values;
  const int nibble = (words[part * PANEL + lane] >> (4 * n)) & 15;
  if (kind == IQ4_NL) return iq4_values[nibble];
  if (!bits) return nibble;
  const int place = part * bits * 4 % 16 + i % 2 * 16 + i % 8 / 2 * bits;
  return nibble | (int)((high[part * bits / 4 * PANEL + lane] >> place) & ((1u << bits) - 1)) << 4;
}

static void unpack_columns(const packed_weight *weight, long row, float *out) {
  const int kind = (int)weight->kind;
  const long k = weight->columns, lane = row % PANEL;
  const char *panel = (const char *)weight->data + row / PANEL * panel_bytes(weight);
  if (kind == FLOAT32) {
    for (long i = 0; i < k; i++) out[i] = ((const float *)panel)[i * PANEL + lane];
    return;
  }
  if (is_plain(kind)) {
    const uint16_t *bits = (const uint16_t *)panel + lane;
    for (long i = 0; i < k; i++) out[i] = kind == BFLOAT16 ? bfloat_to_float(bits[i * PANEL]) : half_to_float(bits[i * PANEL]);
    return;
  }
  for (long g = 0; g < k / GROUP; g++, out += GROUP) {
    const char *group = group_at(kind, panel, g), *header = header_at(kind, panel, g);
    const uint16_t *factors = (const uint16_t *)(has_header(kind) ? header : group) + lane;
    for (int i = 0; i < GROUP; i++) {
      const int integer = integer_at(kind, group + scales_bytes(kind), lane, i);
      if (is_low(kind)) {
        const float *scales = (const float *)header + lane;
        const float value = is_table(kind) ? ((const low_prefix *)panel)->values[integer] : (float)(integer - center(kind));
        out[i] = scales[halves(kind) == 2 ? i / 16 * PANEL : 0] * value;
        if (has_minimum(kind)) out[i] += scales[PANEL];
        continue;
      }
      float d = half_to_float(factors[0]), m = has_minimum(kind) ? half_to_float(factors[PANEL]) : 0.0f;
      if (kind == Q6_K) {
        d *= (float)((const int8_t *)header)[PANEL * (2 + g % SUPER * 2 + i / 16) + lane];
      } else if (has_header(kind)) {
        const uint8_t *scales = (const uint8_t *)header + PANEL * (4 + g % SUPER) + lane;
        d *= (float)scales[0];
        m *= -(float)scales[PANEL * SUPER];
      }
      out[i] = has_minimum(kind) ? fmaf((float)integer, d, m) : d * (float)(integer - center(kind));
    }
  }
}

static void unpack_row(const packed_weight *weight, long row, float *out) {
  static __thread scratch memory;
  const long k = weight->columns;
  if (!weight->order && k == weight->in_features) {
    unpack_columns(weight, row, out);
    return;
  }
  float *columns = reserve(&memory, (size_t)k * 4);
  unpack_columns(weight, row, columns);
  memset(out, 0, (size_t)weight->in_features * 4);
  for (long i = 0; i < k; i++) {
    const long input = weight->order ? weight->order[i] : i < weight->in_features ? i : -1;
    if (input >= 0) out[input] += columns[i];
  }
}

typedef struct {
  tasks rows;
  const packed_weight *weight;
  const int64_t *ids;
  long count;
  float *out;
} embedding_call;

static void embedding_body(void *context) {
  embedding_call *call = context;
  for (long i; (i = claim(&call->rows)) < call->count;) {
    const packed_weight *weight = call->weight;
    long row = call->ids[i];
    for (; row >= weight->out_features; weight = weight->next) row -= weight->out_features;
    unpack_row(weight, row, call->out + i * weight->in_features);
  }
}

// Returns -1 when an id is no row of the weight.
int tgi_embedding(const int64_t *ids, long count, const packed_weight *weight, float *out, int threads) {
  const long rows = whole_features(weight);
  for (long i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= rows) return -1;
  embedding_call call = {.weight = weight, .ids = ids, .count = count, .out = out};
  run_team(embedding_body, &call, count, count < 8 ? 1 : threads);
  return 0;
}

#endif
