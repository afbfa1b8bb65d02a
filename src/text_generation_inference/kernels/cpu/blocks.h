// Packing: rows of float32, of blocks as GGML stores them, or of codes with scales beside them, into panels.
#ifndef TGI_BLOCKS_H
#define TGI_BLOCKS_H

#include "panels.h"

// What belongs to codes: a value is scale * (code - center) + offset, or scale * table[code] + offset.
typedef struct {
  const float *scale, *offset;  // [outputs][groups]; the second may be null
  const float *table;           // [16], or null
  const uint8_t *integers;      // [16]: the table's plus TABLE_CENTER
  int64_t columns;              // that have codes
  int64_t group_size, groups;   // columns of a scale; scales of a row
} low_scales;

typedef struct {
  tasks panels;
  const packed_weight *weight;
  char *data;
  const char *source;  // rows of float32, of blocks or of codes
  long stride;         // bytes from row to row
  const low_scales *low;
} pack_call;

static const long block_bytes[] = {[Q4_0] = 18, [Q4_1] = 20, [Q8_0] = 34,   [Q5_0] = 22, [Q5_1] = 24,
                                   [IQ4_NL] = 18, [Q4_K] = 144, [Q5_K] = 176, [Q6_K] = 210};

// The stored integers of group `sub` of a block.
static void block_integers(int kind, const uint8_t *block, int sub, uint8_t *out) {
  for (int i = 0; i < GROUP; i++) {
    int low, high = 0;
    if (kind == Q8_0) {
      out[i] = block[2 + i];
      continue;
    } else if (kind == Q6_K) {
      const uint8_t *ql = block + sub / 4 * 64 + sub % 2 * 32, *qh = block + 128 + sub / 4 * 32;
      low = ql[i] >> (sub % 4 / 2 * 4);
      high = (qh[i] >> (sub % 4 * 2)) & 3;
    } else if (has_header(kind)) {
      low = block[(kind == Q5_K ? 48 : 16) + sub / 2 * 32 + i] >> (sub % 2 * 4);
      if (kind == Q5_K) high = (block[16 + i] >> sub) & 1;
    } else {
      const uint8_t *qh = block + (has_minimum(kind) ? 4 : 2), *qs = qh + (high_bits(kind) ? 4 : 0);
      low = qs[i % 16] >> (i / 16 * 4);
      if (high_bits(kind)) high = (qh[i / 8] >> (i % 8)) & 1;
    }
    out[i] = (uint8_t)((low & 15) | high << 4);
  }
}

// Put the scales of a block into the lane of one output; `sub` is the group they are for.
static void pack_scales(int kind, const uint8_t *block, char *panel, long g, int sub, long lane) {
  uint16_t *group = (uint16_t *)group_at(kind, panel, g) + lane;
  if (!has_header(kind)) {
    memcpy(group, block, 2);
    if (has_minimum(kind)) memcpy(group + PANEL, block + 2, 2);
    return;
  }
  uint8_t *header = (uint8_t *)header_at(kind, panel, g);
  uint16_t *factors = (uint16_t *)header + lane;
  if (kind == Q6_K) {
    memcpy(factors, block + 208, 2);
    for (int half = 0; half < 2; half++) header[PANEL * (2 + sub * 2 + half) + lane] = block[192 + sub * 2 + half];
    return;
  }
  memcpy(factors, block, 2);
  memcpy(factors + PANEL, block + 2, 2);
  const uint8_t *packed = block + 4;  // 6 bits each, of which those of the last four groups are in two places
  const int scale = sub < 4 ? packed[sub] & 63 : (packed[sub + 4] & 15) | packed[sub - 4] >> 6 << 4;
  const int minimum = sub < 4 ? packed[sub + 4] & 63 : packed[sub + 4] >> 4 | packed[sub] >> 6 << 4;
  header[PANEL * (4 + sub) + lane] = (uint8_t)scale;
  header[PANEL * (4 + SUPER + sub) + lane] = (uint8_t)minimum;
}

static void pack_integers(int kind, const uint8_t *integers, char *values, long lane) {
  const int bits = high_bits(kind);
  if (is_bytes(kind)) {
    for (int i = 0; i < GROUP; i++) {
      const int n = nibble_of(i % 8);
      values[((i / 8 * 2 + n % 2) * PANEL + lane) * 4 + n / 2] = (char)integers[i];
    }
    return;
  }
  uint32_t *high = (uint32_t *)values + lane, *words = (uint32_t *)(values + high_bytes(kind)) + lane;
  for (int i = 0; i < GROUP; i++) {
    const int part = i / 8;
    words[part * PANEL] |= (uint32_t)(integers[i] & 15) << (4 * nibble_of(i % 8));
    if (bits) {
      const int place = part * bits * 4 % 16 + i % 2 * 16 + i % 8 / 2 * bits;
      high[part * bits / 4 * PANEL] |= (uint32_t)(integers[i] >> 4) << place;
    }
  }
}

// One output of codes.
static void pack_codes(const pack_call *call, const uint8_t *codes, long row, char *panel, long lane) {
  const packed_weight *weight = call->weight;
  const low_scales *low = call->low;
  const int kind = (int)weight->kind, none = is_table(kind) ? 0 : 8;
  for (long g = 0; g < weight->columns / GROUP; g++) {
    uint8_t integers[GROUP];
    for (int i = 0; i < GROUP; i++) {
      const long column = g * GROUP + i;
      if (is_bytes(kind))
        integers[i] = column < low->columns ? codes[column] ^ 128 : 0;
      else
        integers[i] = column < low->columns ? (codes[column / 2] >> (column % 2 * 4)) & 15 : (uint8_t)none;
    }
    pack_integers(kind, integers, (char *)group_at(kind, panel, g), lane);
    if (g & ((1L << weight->shift) - 1)) continue;
    float *header = (float *)header_at(kind, panel, g) + lane;
    for (int half = 0; half < halves(kind); half++) {
      const long column = g * GROUP + half * GROUP / halves(kind);
      const long at = row * low->groups + (column < low->columns ? column : low->columns - 1) / low->group_size;
      header[half * PANEL] = low->scale[at];
      if (has_minimum(kind)) header[PANEL] = low->offset[at];
    }
  }
}

static void pack_panel(const pack_call *call, long p) {
  const packed_weight *weight = call->weight;
  const int kind = (int)weight->kind, per_block = has_header(kind) ? SUPER : 1;
  const long k = weight->columns, bytes = panel_bytes(weight);
  char *panel = call->data + p * bytes;
  memset(panel, 0, (size_t)bytes);
  if (is_low(kind)) {
    low_prefix *prefix = (low_prefix *)panel;
    prefix->shift = (int32_t)weight->shift;
    if (is_table(kind)) memcpy(prefix->values, call->low->table, sizeof prefix->values);
    if (is_table(kind)) memcpy(prefix->integers, call->low->integers, sizeof prefix->integers);
  }
  for (long lane = 0; lane < PANEL && p * PANEL + lane < weight->out_features; lane++) {
    const char *row = call->source + (p * PANEL + lane) * call->stride;
    if (kind == FLOAT32) {
      for (long i = 0; i < k; i++) ((float *)panel)[i * PANEL + lane] = ((const float *)row)[i];
      continue;
    }
    if (is_plain(kind)) {
      uint16_t *bits = (uint16_t *)panel + lane;
      for (long i = 0; i < k; i++) {
        const float value = ((const float *)row)[i];
        uint32_t wide;
        memcpy(&wide, &value, 4);
        bits[i * PANEL] = kind == BFLOAT16 ? (uint16_t)(wide >> 16) : (uint16_t)_cvtss_sh(value, 0);
      }
      continue;
    }
    if (is_low(kind)) {
      pack_codes(call, (const uint8_t *)row, p * PANEL + lane, panel, lane);
      continue;
    }
    for (long g = 0; g < k / GROUP; g++) {
      const uint8_t *block = (const uint8_t *)row + g / per_block * block_bytes[kind];
      uint8_t integers[GROUP];
      block_integers(kind, block, (int)(g % per_block), integers);
      pack_scales(kind, block, panel, g, (int)(g % per_block), lane);
      pack_integers(kind, integers, (char *)group_at(kind, panel, g) + scales_bytes(kind), lane);
    }
  }
}

static void pack_body(void *context) {
  pack_call *call = context;
  for (long p; (p = claim(&call->panels)) < panel_count(call->weight->out_features);) pack_panel(call, p);
}

// The plain kind that holds all values of x [rows][columns] in the fewest bits.
int tgi_plain_kind(const float *x, long rows, long columns, long ldx) {
  int bfloat = columns % GROUP == 0, half = bfloat;
  for (long r = 0; r < rows && (bfloat || half); r++, x += ldx)
    for (long i = 0; i < columns; i++) {
      uint32_t wide;
      memcpy(&wide, x + i, 4);
      bfloat &= (wide & 0xffff) == 0;
      half &= half_to_float((uint16_t)_cvtss_sh(x[i], 0)) == x[i];
    }
  return bfloat ? BFLOAT16 : half ? FLOAT16 : FLOAT32;
}

long tgi_packed_bytes(const packed_weight *weight) { return panel_count(weight->out_features) * panel_bytes(weight); }

// `low` is null but for codes.
void tgi_pack(const packed_weight *weight, const void *source, long stride, const low_scales *low, int threads) {
  pack_call call = {.weight = weight, .data = (char *)weight->data, .source = source, .stride = stride, .low = low};
  run_team(pack_body, &call, panel_count(weight->out_features), threads);
}

#endif
