// The packed form of a weight, how it is made, and the row lookup that reads it.
//
// A packed weight is a run of panels of PANEL outputs each (the last one padded with zeros), read from first byte to
// last. FLOAT32 panels are float [in][PANEL]. Quantised ones are a run of groups of 32 inputs, each
//   Q4_0  half d [PANEL] (padded to 64 bytes), words [4][PANEL]: nibble i of word w is input 8 w + 2 i, and 8 w + 2 (i - 4) + 1 from i = 4
//   Q4_1  half d [PANEL], half m [PANEL], words as above
//   Q8_0  half d [PANEL], int8 [32][PANEL]
#ifndef TGI_PANELS_H
#define TGI_PANELS_H

#include "team.h"

enum { FLOAT32, Q4_0, Q4_1, Q8_0 };
enum { GROUP = 32 };    // inputs that share one scale
enum { AHEAD = 3072 };  // bytes between what is read and what is asked for

typedef struct {
  int64_t kind, out_features, in_features;
  const void *data;
} packed_weight;

INLINE long scales_bytes(int kind) { return kind == Q4_1 ? PANEL * 4 : kind == Q4_0 ? (PANEL * 2 + 63) / 64 * 64 : PANEL * 2; }
INLINE long group_bytes(int kind) { return scales_bytes(kind) + (kind == Q8_0 ? PANEL * GROUP : PANEL * GROUP / 2); }
INLINE long panel_bytes(int kind, long k) { return kind == FLOAT32 ? k * PANEL * 4 : k / GROUP * group_bytes(kind); }
INLINE long panel_count(long n) { return (n + PANEL - 1) / PANEL; }

// The scale and the offset of a group for vector `v` of a panel.
INLINE void load_scales(int kind, const char *group, int v, vf *d, vf *m) {
  const uint16_t *scales = (const uint16_t *)group;
  *d = v_half_to_float(scales + v * VL);
  *m = kind == Q4_1 ? v_half_to_float(scales + PANEL + v * VL) : kind == Q4_0 ? v_mul(*d, v_set(-8.0f)) : v_set(0.0f);
}

// The nibble of a word that holds input `i` of its eight: even inputs in the low half, odd ones in the high half.
INLINE int nibble_of(int i) { return (i & 1) * 4 + i / 2; }

// Ask for the PANEL * 4 bytes at `p`; past the end of a weight this does nothing.
INLINE void fetch(const char *p) {
  UNROLL for (int i = 0; i < PANEL * 4; i += 64) __builtin_prefetch(p + i, 0, 3);
}

// Packing ------------------------------------------------------------------------------------------------------

typedef struct {
  tasks panels;
  const packed_weight *weight;
  char *data;
  const char *source;  // rows of float32, or of blocks as GGML stores them
  long stride;         // bytes from row to row
} pack_call;

static const long block_bytes[] = {[Q4_0] = 18, [Q4_1] = 20, [Q8_0] = 34};

static void pack_panel(const pack_call *call, long p) {
  const packed_weight *weight = call->weight;
  const int kind = (int)weight->kind;
  const long k = weight->in_features, bytes = panel_bytes(kind, k);
  char *panel = call->data + p * bytes;
  memset(panel, 0, (size_t)bytes);
  for (long lane = 0; lane < PANEL && p * PANEL + lane < weight->out_features; lane++) {
    const char *row = call->source + (p * PANEL + lane) * call->stride;
    if (kind == FLOAT32) {
      for (long i = 0; i < k; i++) ((float *)panel)[i * PANEL + lane] = ((const float *)row)[i];
      continue;
    }
    char *group = panel;
    for (long g = 0; g < k / GROUP; g++, row += block_bytes[kind], group += group_bytes(kind)) {
      const long halves = kind == Q4_1 ? 2 : 1;
      const uint8_t *quants = (const uint8_t *)row + 2 * halves;
      char *values = group + scales_bytes(kind);
      for (long h = 0; h < halves; h++) memcpy((uint16_t *)group + h * PANEL + lane, row + 2 * h, 2);
      if (kind == Q8_0) {
        for (long i = 0; i < GROUP; i++) values[i * PANEL + lane] = (char)quants[i];
        continue;
      }
      for (long word = 0; word < GROUP / 8; word++) {
        uint32_t bits = 0;
        for (long i = 0; i < 8; i++) {
          const long element = word * 8 + i;
          bits |= (uint32_t)((quants[element % 16] >> (element / 16 * 4)) & 15) << (4 * nibble_of((int)i));
        }
        ((uint32_t *)values)[word * PANEL + lane] = bits;
      }
    }
  }
}

static void pack_body(void *context) {
  pack_call *call = context;
  for (long p; (p = claim(&call->panels)) < panel_count(call->weight->out_features);) pack_panel(call, p);
}

long tgi_packed_bytes(int kind, long out_features, long in_features) {
  return panel_count(out_features) * panel_bytes(kind, in_features);
}

void tgi_pack(const packed_weight *weight, const void *source, long stride, int threads) {
  pack_call call = {.weight = weight, .data = (char *)weight->data, .source = source, .stride = stride};
  run_team(pack_body, &call, panel_count(weight->out_features), threads);
}

// Row lookup ---------------------------------------------------------------------------------------------------

static float half_to_float(uint16_t half) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half))); }

static void unpack_row(const packed_weight *weight, long row, float *out) {
  const int kind = (int)weight->kind;
  const long k = weight->in_features, lane = row % PANEL;
  const char *panel = (const char *)weight->data + row / PANEL * panel_bytes(kind, k);
  if (kind == FLOAT32) {
    for (long i = 0; i < k; i++) out[i] = ((const float *)panel)[i * PANEL + lane];
    return;
  }
  for (long g = 0; g < k / GROUP; g++, panel += group_bytes(kind), out += GROUP) {
    const uint16_t *scales = (const uint16_t *)panel + lane;
    const char *values = panel + scales_bytes(kind);
    const float d = half_to_float(scales[0]);
    const float m = kind == Q4_1 ? half_to_float(scales[PANEL]) : d * -8.0f;
    for (int i = 0; i < GROUP; i++) {
      if (kind == Q8_0)
        out[i] = d * ((const int8_t *)values)[i * PANEL + lane];
      else
        out[i] = fmaf((float)((((const uint32_t *)values)[i / 8 * PANEL + lane] >> (4 * nibble_of(i % 8))) & 15), d, m);
    }
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
  for (long i; (i = claim(&call->rows)) < call->count;)
    unpack_row(call->weight, call->ids[i], call->out + i * call->weight->in_features);
}

// Returns -1 when an id is no row of the weight.
int tgi_embedding(const int64_t *ids, long count, const packed_weight *weight, float *out, int threads) {
  for (long i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= weight->out_features) return -1;
  embedding_call call = {.weight = weight, .ids = ids, .count = count, .out = out};
  run_team(embedding_body, &call, count, count < 8 ? 1 : threads);
  return 0;
}

#endif
