// Linear layers over packed weights.
//
// With VNNI quantised weights are multiplied as the integers they are, whatever the number of rows (and by integers, with any
// instructions, where inputs are rounded to integers too). Else, few rows: each
// panel goes from memory to registers once. More rows: a part of a panel is made float32 in the first-level cache and tiles
// of rows pass over it, or, before all else, AMX takes whole groups. Within each of these an output is one chain of
// operations in the order of the inputs, so its value does not depend on the other rows or on the number of threads.
#ifndef TGI_LINEAR_H
#define TGI_LINEAR_H

#include "amx.h"
#include "blocks.h"
#include "fixed.h"
#include "int8.h"

enum { DEPTH = 192 };       // inputs whose weights stay in the first-level cache while rows pass over them
enum { CHUNK_ROWS = 256, CHUNK_BYTES = 1 << 20 };  // rows one task carries through a panel, and what they may occupy
enum { MAX_RUN = 16 };      // panels
enum { PACK_GROUPS = 8 };  // groups of a run of columns whose rows a task packs, or more
enum { PACK_TASKS = 4 };   // of a thread, where there are rows and columns for so many
enum { DIRECT_ROWS = 4 };   // up to here quantised weights go from memory to registers

// Rows of `a` [in][rows] times one panel, weights going straight to registers.
INLINE void direct(const int kind, const int rows, const float *a, const char *panel, long k, vf sums[][3]) {
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < 3; v++) sums[r][v] = v_set(0.0f);
  if (is_plain(kind)) {
    const long bytes = group_bytes(kind) / GROUP;
    for (long i = 0; i < k; i++, a += rows) {
      UNROLL for (int line = 0; line < bytes; line += 64) __builtin_prefetch(panel + i * bytes + AHEAD + line, 0, 3);
      UNROLL for (int v = 0; v < 3; v++) {
        vf w = load_plain(kind, panel, i, v);
        UNROLL for (int r = 0; r < rows; r++) sums[r][v] = v_fma(w, v_set(a[r]), sums[r][v]);
      }
    }
    return;
  }
  const v_table table = load_table(kind, panel);
  for (long g = 0; g < k / GROUP; g++) {
    const char *high = group_at(kind, panel, g) + scales_bytes(kind), *values = high + high_bytes(kind);
    fetch_scales(kind, panel, g);
    UNROLL for (int bit = 0; bit < high_bits(kind); bit++) fetch(high + bit * PANEL * 4 + AHEAD);
    UNROLL for (int half = 0; half < halves(kind); half++) {
      vf d[3], m[3];
      UNROLL for (int v = 0; v < 3; v++) load_scales(kind, panel, g, half, v, &d[v], &m[v]);
      const int parts = GROUP / 8 / halves(kind);
      NO_UNROLL for (int part = half * parts; part < (half + 1) * parts; part++, a += 8 * rows) {
        vi words[3][2], wide[3];
        UNROLL for (int w = 0; w < word_count(kind); w++) fetch(values + AHEAD + w * PANEL * 4);
        UNROLL for (int v = 0; v < 3; v++) load_words(kind, values, v, words[v]);
        UNROLL for (int v = 0; v < 3; v++) wide[v] = load_high(kind, high, part, v);
        values += PANEL * 4 * word_count(kind);
        UNROLL for (int i = 0; i < 8; i++) UNROLL for (int v = 0; v < 3; v++) {
          vf q = v_integer(kind, words[v], wide[v], table, i);
          vf w = is_moved(kind) ? v_fma(q, d[v], m[v]) : v_mul(q, d[v]);
          UNROLL for (int r = 0; r < rows; r++) sums[r][v] = v_fma(w, v_set(a[i * rows + r]), sums[r][v]);
        }
      }
    }
  }
}

#if VL == 8
// The same for quantised weights where making each one float32 would take longer than using it: integers times
// activations are summed within a group, and scale and offset applied to that. A nibble is not shifted down: `a` holds its
// activation times 16^-n instead (see pack_grouped), followed by the activations' group sums.
INLINE int stays_in_place(int kind) {
  return kind == Q4_0 || kind == Q4_1 || kind == Q4_K || kind == LOW4 || kind == LOW4_OFFSET;
}

INLINE void direct_grouped(const int kind, const int rows, const float *a, const char *panel, long k, vf sums[][3]) {
  const int width = rows <= 2 ? 3 : 1;  // vectors of a panel worked on at a time: what registers can hold
  const int split = rows == 2 ? 1 : 2;  // a row may alternate between two sums, where one would wait for itself
  const int parts = GROUP / 8 / halves(kind);
  const int centered = kind == Q6_K;  // integers are, because sums of activations are those of whole groups
  const float *group_sums = a + k * rows;
  const v_table table = load_table(kind, panel);
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < 3; v++) sums[r][v] = v_set(0.0f);
  for (long g = 0; g < k / GROUP; g++, group_sums += rows, a += GROUP * rows) {
    const char *group = group_at(kind, panel, g), *high = group + scales_bytes(kind);
    if (has_header(kind)) fetch_scales(kind, panel, g);
    UNROLL for (int i = 0; i < group_bytes(kind); i += 64) __builtin_prefetch(group + AHEAD + i, 0, 3);
    UNROLL for (int half = 0; half < halves(kind); half++) NO_UNROLL for (int v0 = 0; v0 < 3; v0 += width) {
      vf dots[8][3];
      UNROLL for (int c = 0; c < rows * split; c++) UNROLL for (int v = 0; v < width; v++) dots[c][v] = v_set(0.0f);
      const char *values = high + high_bytes(kind) + half * parts * PANEL * 4;
      const float *x = a + half * parts * 8 * rows;
      NO_UNROLL for (int part = half * parts; part < (half + 1) * parts; part++, x += 8 * rows) {
        vi words[3][2], wide[3];
        UNROLL for (int v = 0; v < width; v++) load_words(kind, values, v0 + v, words[v]);
        UNROLL for (int v = 0; v < width; v++) wide[v] = load_high(kind, high, part, v0 + v);
        values += PANEL * 4 * word_count(kind);
        UNROLL for (int i = 0; i < 8; i++) {
          UNROLL for (int v = 0; v < width; v++) {
            vf q = stays_in_place(kind) ? v_nibble_in_place(words[v][0], nibble_of(i))
                                        : v_integer(kind, words[v], wide[v], table, i);
            if (centered) q = v_sub(q, v_set((float)center(kind)));
            UNROLL for (int r = 0; r < rows; r++) {
              const int chain = split == 2 ? 2 * r + (i & 1) : r;
              dots[chain][v] = v_fma(q, v_set(x[i * rows + r]), dots[chain][v]);
            }
          }
        }
      }
      UNROLL for (int v = 0; v < width; v++) {
        vf d, m;
        load_scales(kind, panel, g, half, v0 + v, &d, &m);
        UNROLL for (int r = 0; r < rows; r++) {
          vf dot = split == 2 ? v_add(dots[2 * r][v], dots[2 * r + 1][v]) : dots[r][v];
          sums[r][v0 + v] = v_fma(d, dot, sums[r][v0 + v]);
          if (is_moved(kind) && !centered) sums[r][v0 + v] = v_fma(m, v_set(group_sums[r]), sums[r][v0 + v]);
        }
      }
    }
  }
}

static void pack_grouped(int kind, const float *x, long ldx, long rows, long k, float *out) {
  static const float factors[8] = {1, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1};
  float *group_sums = out + k * rows;
  for (long r = 0; r < rows; r++)
    for (long g = 0; g < k / GROUP; g++) {
      float sum = 0.0f;
      for (long i = g * GROUP; i < (g + 1) * GROUP; i++) {
        sum += x[r * ldx + i];
        out[i * rows + r] = stays_in_place(kind) ? x[r * ldx + i] * factors[nibble_of(i % 8)] : x[r * ldx + i];
      }
      group_sums[g * rows + r] = sum;
    }
}
#endif

// Groups `g` to `end` of a quantised panel as float [32 * groups][PANEL].
INLINE void expand(const int kind, const char *panel, long g, long end, float *out) {
  const v_table table = load_table(kind, panel);
  for (; g < end; g++) {
    const char *high = group_at(kind, panel, g) + scales_bytes(kind), *values = high + high_bytes(kind);
    UNROLL for (int half = 0; half < halves(kind); half++) {
      vf d[3], m[3];
      UNROLL for (int v = 0; v < 3; v++) load_scales(kind, panel, g, half, v, &d[v], &m[v]);
      const int parts = GROUP / 8 / halves(kind);
      NO_UNROLL for (int part = half * parts; part < (half + 1) * parts; part++) {
        vi words[3][2], wide[3];
        UNROLL for (int v = 0; v < 3; v++) load_words(kind, values, v, words[v]);
        UNROLL for (int v = 0; v < 3; v++) wide[v] = load_high(kind, high, part, v);
        values += PANEL * 4 * word_count(kind);
        UNROLL for (int i = 0; i < 8; i++, out += PANEL) UNROLL for (int v = 0; v < 3; v++) {
          vf q = v_integer(kind, words[v], wide[v], table, i);
          v_store(out + v * VL, is_moved(kind) ? v_fma(q, d[v], m[v]) : v_mul(q, d[v]));
        }
      }
    }
  }
}

INLINE void expand_plain(const int kind, const char *panel, long i, long end, float *out) {
  for (; i < end; i++, out += PANEL) UNROLL for (int v = 0; v < 3; v++) v_store(out + v * VL, load_plain(kind, panel, i, v));
}

static void expand_groups(int kind, const char *panel, long g, long end, float *out) {
  switch (kind) {
    case BFLOAT16:
      expand_plain(BFLOAT16, panel, g * GROUP, end * GROUP, out);
      break;
    case FLOAT16:
      expand_plain(FLOAT16, panel, g * GROUP, end * GROUP, out);
      break;
#define EXPAND(KIND) \
  case KIND: \
    if (!fixed_allowed(KIND)) expand(KIND, panel, g, end, out); \
    break;
    EACH_QUANTISED(EXPAND)
#undef EXPAND
  }
}

// Memory to ask for during a tile, `step` bytes further with every input: the weights that are needed next.
typedef struct {
  const char *next;
  long step;
} lookahead;

// c [rows][PANEL] (+)= a [kc][rows] times b [kc][PANEL]; `bias` is added once the last inputs are in.
INLINE void tile(const int rows, const float *a, const float *b, long kc, float *c, long ldc, int add, const float *bias,
                 lookahead ahead) {
  vf sums[MAX_ROWS][3];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < 3; v++)
      sums[r][v] = add ? v_load(c + r * ldc + v * VL) : v_set(0.0f);
  for (long i = 0; i < kc; i++, a += rows, b += PANEL) {
    vf w[3];
    UNROLL for (int line = 0; line < PANEL * 4; line += 64) __builtin_prefetch(ahead.next + line, 0, 2);
    ahead.next += ahead.step;
    UNROLL for (int v = 0; v < 3; v++) w[v] = v_load(b + v * VL);
    UNROLL for (int r = 0; r < rows; r++) {
      vf x = v_set(a[r]);
      UNROLL for (int v = 0; v < 3; v++) sums[r][v] = v_fma(x, w[v], sums[r][v]);
    }
  }
  if (bias)
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < 3; v++)
        sums[r][v] = v_add(sums[r][v], v_load(bias + v * VL));
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < 3; v++) v_store(c + r * ldc + v * VL, sums[r][v]);
}

#define TILE(R) \
  static void tile_##R(const float *a, const float *b, long kc, float *c, long ldc, int add, const float *bias, \
                       lookahead ahead) { \
    tile(R, a, b, kc, c, ldc, add, bias, ahead); \
  }
TILE(1) TILE(2) TILE(3) TILE(4)
#if MAX_ROWS == 8
TILE(5) TILE(6) TILE(7) TILE(8)
#endif
#undef TILE

typedef void (*tile_function)(const float *, const float *, long, float *, long, int, const float *, lookahead);
static const tile_function tiles[MAX_ROWS + 1] = {
    0, tile_1, tile_2, tile_3, tile_4,
#if MAX_ROWS == 8
    tile_5, tile_6, tile_7, tile_8,
#endif
};

typedef struct {
  tasks packing;
  ordered_tasks products;
  const float *x, *bias;
  float *out, *packed_x;
  int amx, fixed, int8;
  const packed_weight *weight;
  long rows, ldx, ldo;
  long tiles, tiles_per_chunk, chunks;
  long pack_parts;  // runs of columns that rows are packed in
  long run;  // panels of a task
} linear_call;

// Rows are dealt evenly to tiles: the first `rows % tiles` of them hold one more. In integers only the last is short.
INLINE long tile_start(const linear_call *call, long t) {
  if (call->int8 || call->fixed) return t < call->tiles ? t * (call->int8 ? INT8_ROWS : FIXED_ROWS) : call->rows;
  long base = call->rows / call->tiles, extra = call->rows % call->tiles;
  return t * base + (t < extra ? t : extra);
}

// x [rows][k] -> [k][rows].
static void pack_tile(const float *x, long ldx, long rows, long k, float *out) {
  long i = 0;
  if (rows == 8 || rows == 4) {
    for (; i + 4 <= k; i += 4)
      for (long r = 0; r < rows; r += 4) {
        const float *p = x + r * ldx + i;
        __m128 a = _mm_loadu_ps(p), b = _mm_loadu_ps(p + ldx), c = _mm_loadu_ps(p + 2 * ldx), d = _mm_loadu_ps(p + 3 * ldx);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(out + i * rows + r, a);
        _mm_storeu_ps(out + (i + 1) * rows + r, b);
        _mm_storeu_ps(out + (i + 2) * rows + r, c);
        _mm_storeu_ps(out + (i + 3) * rows + r, d);
      }
  }
  for (; i < k; i++)
    for (long r = 0; r < rows; r++) out[i * rows + r] = x[r * ldx + i];
}

#if VL == 16
#define DIRECT_QUANTISED direct
#else
#define DIRECT_QUANTISED direct_grouped
#endif
#define DIRECT_ROW(KIND, R) \
  case KIND * 8 + R: \
    if (!fixed_allowed(KIND)) DIRECT_QUANTISED(KIND, R, a, panel, k, sums); \
    break;
#define DIRECT(KIND) DIRECT_ROW(KIND, 1) DIRECT_ROW(KIND, 2) DIRECT_ROW(KIND, 3) DIRECT_ROW(KIND, 4)
static void direct_product(int kind, long rows, const float *a, const char *panel, long k, float *c, long ldc, const float *bias) {
  vf sums[DIRECT_ROWS][3];
  switch (kind * 8 + rows) {
    case FLOAT32 * 8 + 1:
      direct(FLOAT32, 1, a, panel, k, sums);
      break;
#define DIRECT_PLAIN(KIND, R) \
  case KIND * 8 + R: \
    direct(KIND, R, a, panel, k, sums); \
    break;
    DIRECT_PLAIN(BFLOAT16, 1) DIRECT_PLAIN(BFLOAT16, 2) DIRECT_PLAIN(BFLOAT16, 3) DIRECT_PLAIN(BFLOAT16, 4)
    DIRECT_PLAIN(FLOAT16, 1) DIRECT_PLAIN(FLOAT16, 2) DIRECT_PLAIN(FLOAT16, 3) DIRECT_PLAIN(FLOAT16, 4)
#undef DIRECT_PLAIN
    EACH_QUANTISED(DIRECT)
  }
  for (long r = 0; r < rows; r++)
    for (int v = 0; v < 3; v++)
      v_store(c + r * ldc + v * VL, bias ? v_add(sums[r][v], v_load(bias + v * VL)) : sums[r][v]);
}
#undef DIRECT
#undef DIRECT_ROW
#undef DIRECT_QUANTISED

static void product_task(const linear_call *call, long chunk, long p) {
  static __thread float expanded[DEPTH * PANEL] __attribute__((aligned(64)));
  static __thread float edge[CHUNK_ROWS * PANEL] __attribute__((aligned(64)));
  const packed_weight *weight = call->weight;
  const int kind = (int)weight->kind;
  const long k = weight->columns, n = weight->out_features;
  const long columns = n - p * PANEL < PANEL ? n - p * PANEL : PANEL;
  const char *panel = (const char *)weight->data + p * panel_bytes(weight);
  const long first = chunk * call->tiles_per_chunk;
  const long last = first + call->tiles_per_chunk < call->tiles ? first + call->tiles_per_chunk : call->tiles;
  const long row0 = tile_start(call, first), row1 = tile_start(call, last);
  const float *bias = call->bias ? call->bias + p * PANEL : 0;
  float *c = call->out + row0 * call->ldo + p * PANEL;
  long ldc = call->ldo;
  float padded_bias[PANEL];
  if (columns < PANEL) {
    c = edge;
    ldc = PANEL;
    if (bias) bias = memcpy(padded_bias, bias, (size_t)columns * 4);
  }
  if (call->int8 || call->fixed) {
    const int32_t *x = (const int32_t *)call->packed_x;
    memset(edge, 0, (size_t)((row1 - row0) * PANEL) * 4);
    if (call->int8)
      int8_product(kind, panel, k, x + row0 * int8_row_words(k), row1 - row0, edge);
    else
      fixed_product(kind, panel, k, x + row0 * fixed_row_words(k), row1 - row0, edge);
    for (long r = 0; bias && r < row1 - row0; r++)
      for (int v = 0; v < 3; v++) v_store(edge + r * PANEL + v * VL, v_add(v_load(edge + r * PANEL + v * VL), v_load(bias + v * VL)));
    for (long r = row0; r < row1; r++)
      memcpy(call->out + r * call->ldo + p * PANEL, edge + (r - row0) * PANEL, (size_t)columns * 4);
    return;
  }
  if (call->amx) {
    long start[CHUNK_ROWS / AMX_ROWS + 1];
    for (long t = first; t <= last; t++) start[t - first] = tile_start(call, t);
    amx_product(kind, panel, k, (const char *)call->packed_x + amx_packed_bytes(first, k), start, last - first, c, ldc);
    if (bias)
      for (long r = 0; r < row1 - row0; r++)
        for (int v = 0; v < 3; v++) v_store(c + r * ldc + v * VL, v_add(v_load(c + r * ldc + v * VL), v_load(bias + v * VL)));
  } else if (row1 - row0 <= (kind == FLOAT32 ? 1 : DIRECT_ROWS) && first + 1 == last) {
    direct_product(kind, row1 - row0, call->packed_x + row0 * k, panel, k, c, ldc, bias);
  } else {
    for (long k0 = 0; k0 < k; k0 += DEPTH) {
      const long kc = k - k0 < DEPTH ? k - k0 : DEPTH;
      const float *b = (const float *)panel + k0 * PANEL;
      const char *now = (const char *)b, *next = now + kc * PANEL * 4;
      if (kind != FLOAT32) {
        const long g = k0 / GROUP, end = (k0 + kc) / GROUP;
        expand_groups(kind, panel, g, end, expanded);
        b = expanded;
        now = group_at(kind, panel, g);
        next = group_at(kind, panel, end);
      }
      const long bytes = next - now;
      for (long t = first; t < last; t++) {
        const long row = tile_start(call, t), rows = tile_start(call, t + 1) - row;
        // Each tile asks for its share of the next inputs' weights.
        const lookahead ahead = {next + (t - first) * bytes / (last - first), bytes / kc / (last - first)};
        tiles[rows](call->packed_x + row * k + k0 * rows, b, kc, c + (row - row0) * ldc, ldc, k0 > 0,
                    k0 + kc == k ? bias : 0, ahead);
      }
    }
  }
  if (columns < PANEL)
    for (long r = row0; r < row1; r++)
      memcpy(call->out + r * call->ldo + p * PANEL, edge + (r - row0) * PANEL, (size_t)columns * 4);
}

// Rows are packed in runs of columns, so that few of them keep several threads busy: the first group of a run.
INLINE long pack_start(const linear_call *call, long part) {
  const long groups = call->weight->columns / GROUP;
  return part < call->pack_parts ? groups * part / call->pack_parts / PACK_GROUPS * PACK_GROUPS : groups;
}

static void pack_rows(const linear_call *call, long tile, long part) {
  const packed_weight *weight = call->weight;
  const long k = weight->columns, row = tile_start(call, tile), rows = tile_start(call, tile + 1) - row;
  const float *x = call->x + row * call->ldx;
  long ldx = call->ldx;
  float scales[AMX_ROWS];
  if (is_arranged(weight)) {
    x = arrange_rows(weight, x, ldx, rows, scales);
    ldx = k;
  }
  if (call->int8)
    int8_pack(x, scales, rows, k, (int32_t *)call->packed_x + row * int8_row_words(k));
  else if (call->fixed)
    fixed_pack((int)weight->kind, weight->shift, x, ldx, rows, k, pack_start(call, part), pack_start(call, part + 1),
               (int32_t *)call->packed_x + row * fixed_row_words(k));
  else if (call->amx)
    amx_pack(x, ldx, rows, k, (char *)call->packed_x + amx_packed_bytes(tile, k));
#if VL == 8
  else if (!is_plain((int)weight->kind) && call->rows <= DIRECT_ROWS)
    pack_grouped((int)weight->kind, x, ldx, rows, k, call->packed_x);
#endif
  else
    pack_tile(x, ldx, rows, k, call->packed_x + row * k);
}

static void pack_all_rows(linear_call *call) {
  const long count = call->packed_x == call->x ? 0 : call->tiles * call->pack_parts;
  for (long t; count && (t = claim(&call->packing)) < count;) {
    pack_rows(call, t / call->pack_parts, t % call->pack_parts);
    finish(&call->packing);
  }
}

static void multiply_rows(linear_call *call) {
  const packed_weight *weight = call->weight;
  if (call->packed_x != call->x) wait_for(&call->packing, call->tiles * call->pack_parts);
  if (call->amx) amx_configure((int)weight->kind, (call->rows + call->tiles - 1) / call->tiles);
  const long panels = panel_count(weight->out_features), runs = (panels + call->run - 1) / call->run;
  for (long t; (t = claim_in_order(&call->products)) >= 0;) {
    const long first = t % runs * call->run, last = first + call->run < panels ? first + call->run : panels;
    for (long p = first; p < last; p++) product_task(call, t / runs, p);
  }
  if (call->amx) amx_release();
}

// Products that do not wait for each other: threads pack the rows of all, and go from one to the next.
typedef struct {
  linear_call *calls;
  long count;
} product_list;

static void products_body(void *context) {
  const product_list *list = context;
  for (long i = 0; i < list->count; i++) pack_all_rows(&list->calls[i]);
  for (long i = 0; i < list->count; i++) multiply_rows(&list->calls[i]);
}

// Describe the product with one piece of a weight. Returns the bytes that packed rows need, which `packed_x` is to be set
// to; 0: it is set.
static long prepare_linear(linear_call *call, const float *x, long rows, long ldx, const packed_weight *weight, const float *bias,
                           float *out, long ldo, int threads) {
  const long k = weight->columns;
  *call = (linear_call){.x = x, .bias = bias, .out = out, .weight = weight, .rows = rows, .ldx = ldx, .ldo = ldo};
  call->int8 = int8_allowed(weight);
  call->amx = !call->int8 && !is_plain((int)weight->kind) && weight->kind != FLOAT4 && rows > DIRECT_ROWS && amx_allowed();
  call->fixed = !call->int8 && !call->amx && fixed_allowed((int)weight->kind);
  const long tile_rows = call->int8 ? INT8_ROWS : call->amx ? AMX_ROWS : call->fixed ? FIXED_ROWS : MAX_ROWS;
  call->tiles = (rows + tile_rows - 1) / tile_rows;
  long chunk_rows = CHUNK_BYTES / (k * (call->amx ? 6 : 4)) / AMX_ROWS * AMX_ROWS;
  chunk_rows = chunk_rows < 64 ? 64 : chunk_rows > CHUNK_ROWS ? CHUNK_ROWS : chunk_rows;
  call->chunks = (call->tiles * tile_rows + chunk_rows - 1) / chunk_rows;
  call->tiles_per_chunk = (call->tiles + call->chunks - 1) / call->chunks;
  const long most_parts = call->fixed && !is_arranged(weight) && threads > 1 ? k / GROUP / PACK_GROUPS : 1;
  const long wanted_parts = (PACK_TASKS * threads + call->tiles - 1) / call->tiles;
  call->pack_parts = wanted_parts < most_parts ? wanted_parts : most_parts > 1 ? most_parts : 1;
  const long panels = panel_count(weight->out_features);
  call->run = panels * call->chunks / (8 * threads);
  if (call->run < 1) call->run = 1;
  if (call->run > MAX_RUN) call->run = MAX_RUN;
  set_ordered(&call->products, call->chunks * ((panels + call->run - 1) / call->run), threads);
  if (rows == 1 && !call->int8 && !call->fixed && !is_arranged(weight) && (is_plain((int)weight->kind) || VL == 16)) {
    call->packed_x = (float *)x;  // nothing to rearrange
    return 0;
  }
  if (call->int8) return align64(rows * int8_row_words(k) * 4);
  if (call->fixed) return align64(rows * fixed_row_words(k) * 4);
  return call->amx ? amx_packed_bytes(call->tiles, k) : align64(rows * (k + k / GROUP) * 4);
}

// Room for the packed rows of products, then the products.
static void run_products(product_list list, const long *sizes, int threads) {
  static __thread scratch memory;
  long bytes = 0, work = 0;
  for (long i = 0; i < list.count; i++) {
    bytes += sizes[i];
    work += list.calls[i].products.count;
  }
  char *packed = reserve(&memory, (size_t)bytes + 64);
  for (long i = 0; i < list.count; packed += sizes[i++])
    if (sizes[i]) list.calls[i].packed_x = (float *)packed;
  run_team(products_body, &list, work, threads);
}

// out [rows][outputs of all pieces of the weight]
void tgi_linear(const float *x, long rows, long ldx, const packed_weight *weight, const float *bias, float *out, long ldo,
                int threads) {
  enum { MOST = 8 };  // pieces at a time
  if (rows <= 0) return;
  while (weight) {
    linear_call calls[MOST];
    long sizes[MOST], outputs = 0;
    product_list list = {.calls = calls};
    for (; weight && list.count < MOST; weight = weight->next, list.count++) {
      const long first = outputs;
      sizes[list.count] = prepare_linear(&calls[list.count], x, rows, ldx, weight, bias ? bias + first : 0, out + first, ldo, threads);
      outputs += weight->out_features;
    }
    const int serial = rows * outputs * calls[0].weight->in_features < 1 << 15;
    run_products(list, sizes, serial ? 1 : threads);
    out += outputs;
    if (bias) bias += outputs;
  }
}

#endif
