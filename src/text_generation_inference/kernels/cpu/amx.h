// Quantised weights on AMX: a group of 32 inputs is exactly the depth of one bfloat16 tile product.
//
// The integers of a group are exact in bfloat16, and a float32 activation is exactly the sum of three bfloat16 numbers.
// So three tile products give what float32 arithmetic on the integers would give, and the scale and the offset of the
// group are applied to that in float32:  sum over the group of (d q + m) x  =  d * sum(q' x) + m' * sum(x)
// with q' = q - 8 and m' = m + 8 d for the 4-bit forms, which keeps the two terms from cancelling; 16 for 5 bits, and 32
// for 6 bits. Where half a group has its own scale, tiles have half the depth.
#ifndef TGI_AMX_H
#define TGI_AMX_H

#include "panels.h"

enum { AMX_ROWS = 16, AMX_TILE = 1024 };  // rows and bytes of a tile
enum { AMX_GROUPS = 48 };                 // groups whose weights stay in the second-level cache while rows pass over

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && VL == 16

static int amx_allowed(void) {
  static atomic_int known;  // 0: not asked yet, 1: no, 2: yes
  if (!atomic_load(&known)) {
    const long request_permission = 0x1023, tile_data = 18;
    atomic_store(&known, syscall(SYS_arch_prctl, request_permission, tile_data) ? 1 : 2);
  }
  return atomic_load(&known) == 2;
}

// Tiles 0 to 2 hold sums [rows][16], 3 to 5 weights [16 pairs of inputs][16][2], 6 and 7 activations [rows][32].
static void amx_configure(int kind, long rows) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
  } config __attribute__((aligned(64))) = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    config.bytes_per_row[i] = (uint16_t)(i >= 6 ? 64 / halves(kind) : 64);
    config.rows[i] = (uint8_t)(i >= 3 && i <= 5 ? 16 / halves(kind) : rows);
  }
  _tile_loadconfig(&config);
}

INLINE void amx_release(void) { _tile_release(); }

INLINE long amx_packed_bytes(long tiles, long k) { return tiles * (k / GROUP) * (3 * AMX_TILE + 64); }

// x [rows][k] -> for every group three tiles (high, middle and low parts), then for every group 16 sums.
static void amx_pack(const float *x, long ldx, long rows, long k, char *out) {
  const long groups = k / GROUP;
  float *sums = (float *)(out + groups * 3 * AMX_TILE);
  const __m512i mask = _mm512_set1_epi32((int)0xffff0000);
  const __m512i upper_halves = _mm512_add_epi16(
      _mm512_set1_epi16(1), _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                             22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0));
  for (long r = 0; r < rows; r++) {
    for (long g = 0; g < groups; g++) {
      vf a = v_load(x + r * ldx + g * GROUP), b = v_load(x + r * ldx + g * GROUP + VL);
      sums[g * AMX_ROWS + r] = v_sum(v_add(a, b));
      for (int part = 0; part < 3; part++) {
        __m512i high_a = _mm512_and_si512(_mm512_castps_si512(a), mask), high_b = _mm512_and_si512(_mm512_castps_si512(b), mask);
        _mm512_storeu_si512(out + (g * 3 + part) * AMX_TILE + r * 64, _mm512_permutex2var_epi16(high_a, upper_halves, high_b));
        a = v_sub(a, _mm512_castsi512_ps(high_a));
        b = v_sub(b, _mm512_castsi512_ps(high_b));
      }
    }
  }
}

// The values of the integers 32 t to 32 t + 31 as bfloat16.
INLINE vi amx_table(const int kind, const char *panel, int t) {
  static const float first[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vi halves16[2];
  UNROLL for (int h = 0; h < 2; h++) {
    const int start = (32 * t + 16 * h) % (16 << high_bits(kind));
    vf values = v_add(v_load(first), v_set((float)(start - center(kind))));
    if (is_table(kind)) values = v_load(((const low_prefix *)panel)->values);
    if (kind == IQ4_NL) values = v_nibble_in_table(_mm512_cvtps_epi32(v_load(first)), 0);
    halves16[h] = _mm512_srli_epi32(_mm512_castps_si512(values), 16);
  }
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(halves16[0])), _mm512_cvtepi32_epi16(halves16[1]), 1);
}

// One group of a panel as three weight tiles.
INLINE void amx_expand(const int kind, const char *panel, long g, char *out) {
  const char *group = group_at(kind, panel, g), *high = group + scales_bytes(kind), *values = high + high_bytes(kind);
  if (has_header(kind)) fetch_scales(kind, panel, g);
  UNROLL for (int i = 0; i < group_bytes(kind); i += 64) __builtin_prefetch(group + AHEAD + i, 0, 3);
  if (is_bytes(kind)) {
    // Of eight inputs the pairs 0 and 2 are in the first word, bytes 0 and 2, and bytes 1 and 3; 1 and 3 are in the second.
    for (int w = 0; w < 8; w++, values += PANEL * 4)
      UNROLL for (int v = 0; v < 3; v++) UNROLL for (int i = 0; i < 2; i++) {
        const vi words = vi_load(values + v * VL * 4);
        const vi even = _mm512_srli_epi32(_mm512_castps_si512(v_byte(words, i)), 16);
        const vi odd = _mm512_castps_si512(v_byte(words, i + 2));
        _mm512_store_si512(out + v * AMX_TILE + (w / 2 * 4 + i * 2 + w % 2) * 64, _mm512_mask_blend_epi16(0xaaaaaaaa, even, odd));
      }
    return;
  }
  // Entry i of the tables is the value of the integer i as bfloat16, again and again where integers have fewer bits than
  // a lookup reads, so that the bits above do not matter.
  vi tables[2];
  UNROLL for (int t = 0; t < 2; t++) tables[t] = amx_table(kind, panel, t);
  const int bits = high_bits(kind);
  UNROLL for (int w = 0; w < 4; w++, values += PANEL * 4) UNROLL for (int v = 0; v < 3; v++) {
    const vi words = vi_load(values + v * VL * 4), wide = load_high(kind, high, w, v);
    UNROLL for (int i = 0; i < 4; i++) {
      vi index = i ? _mm512_srli_epi16(words, 4 * i) : words;
      if (bits) {
        const vi moved = i * bits < 4 ? _mm512_slli_epi16(wide, 4 - i * bits) : _mm512_srli_epi16(wide, i * bits - 4);
        index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), index, moved, 0xca);
      }
      const vi found = bits == 2 ? _mm512_permutex2var_epi16(tables[0], index, tables[1]) : _mm512_permutexvar_epi16(index, tables[0]);
      _mm512_store_si512(out + v * AMX_TILE + (w * 4 + i) * 64, found);
    }
  }
}

// What one thread works in. Loads whose address agrees with a recent store's in the low 12 bits wait for it, so sums and
// products lie where only stores of long ago agree.
typedef struct {
  float sums[3][AMX_ROWS][VL], unused[256 + 128];
  float products[2][1024];
  float end[896];
  char weights[][3 * AMX_TILE];  // of each group
} amx_space;

// Add the scaled products of one group, or of half of one, to the sums.
INLINE void amx_scale(const int kind, const char *panel, long step, const float *products, long rows,
                      float sums[3][AMX_ROWS][VL]) {
  UNROLL for (int v = 0; v < 3; v++) {
    vf d, m;
    load_scales(kind, panel, step / halves(kind), (int)(step % halves(kind)), v, &d, &m);
    for (long r = 0; r < rows; r += 2)
      UNROLL for (int u = 0; u < 2; u++)
        v_store(sums[v][r + u], v_fma(d, v_load(products + (v * AMX_ROWS + r + u) * VL), v_load(sums[v][r + u])));
  }
}

// Add the offsets of all groups, times the activations' group sums; rows that are not there get what nobody reads.
INLINE void amx_offset(const int kind, const char *panel, long g0, const float *group_sums, long groups,
                       float sums[3][AMX_ROWS][VL]) {
  for (int v = 0; v < 3; v++) {
    vf total[AMX_ROWS];
    UNROLL for (int r = 0; r < AMX_ROWS; r++) total[r] = v_load(sums[v][r]);
    for (long g = 0; g < groups; g++) {
      vf d, m;
      load_centered(kind, panel, g0 + g, 0, v, &d, &m);
      UNROLL for (int r = 0; r < AMX_ROWS; r++) total[r] = v_fma(m, v_set(group_sums[g * AMX_ROWS + r]), total[r]);
    }
    UNROLL for (int r = 0; r < AMX_ROWS; r++) v_store(sums[v][r], total[r]);
  }
}

// c [rows][PANEL] (+)= one tile of packed activations times `groups` groups of a panel, from `g0` on. Their weight tiles
// are in `space->weights` already, or are put there on the way, RING of them at a time.
INLINE void amx_groups(const int kind, const int on_the_way, const char *panel, long g0, const char *x, const float *group_sums,
                       long groups, long rows, amx_space *space, float *c, long ldc, int add) {
  enum { RING = 4, LEAD = 2 };
  const long parts = halves(kind), steps = groups * parts, first = g0 * parts;
  for (int v = 0; v < 3; v++)
    for (long r = 0; r < rows; r++) v_store(space->sums[v][r], add ? v_load(c + r * ldc + v * VL) : v_set(0.0f));
  if (on_the_way)
    for (long g = 0; g < LEAD && g < groups; g++) amx_expand(kind, panel, g0 + g, space->weights[g]);
  for (long step = 0; step < steps; step++) {
    const long g = step / parts, half = step % parts;
    const char *b = space->weights[on_the_way ? g % RING : g] + half * (AMX_TILE / 2), *a = x + g * 3 * AMX_TILE + half * 32;
    float *products = space->products[step & 1];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_loadd(3, b, 64);
    _tile_loadd(6, a, 64);
    _tile_dpbf16ps(0, 6, 3);
    _tile_loadd(4, b + AMX_TILE, 64);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(5, b + 2 * AMX_TILE, 64);
    _tile_dpbf16ps(2, 6, 5);
    _tile_loadd(7, a + AMX_TILE, 64);
    _tile_dpbf16ps(0, 7, 3);
    _tile_dpbf16ps(1, 7, 4);
    _tile_dpbf16ps(2, 7, 5);
    _tile_loadd(6, a + 2 * AMX_TILE, 64);
    _tile_dpbf16ps(0, 6, 3);
    _tile_dpbf16ps(1, 6, 4);
    _tile_dpbf16ps(2, 6, 5);
    // While the tiles multiply, the vector units prepare a later group and scale what came before.
    if (on_the_way && half == 0 && g + LEAD < groups) amx_expand(kind, panel, g0 + g + LEAD, space->weights[(g + LEAD) % RING]);
    if (step > 0) amx_scale(kind, panel, first + step - 1, space->products[(step - 1) & 1], rows, space->sums);
    _tile_stored(0, products, 64);
    _tile_stored(1, products + AMX_TILE / 4, 64);
    _tile_stored(2, products + AMX_TILE / 2, 64);
  }
  amx_scale(kind, panel, first + steps - 1, space->products[(steps - 1) & 1], rows, space->sums);
  if (has_minimum(kind)) amx_offset(kind, panel, g0, group_sums, groups, space->sums);
  for (long r = 0; r < rows; r++)
    for (int v = 0; v < 3; v++) v_store(c + r * ldc + v * VL, v_load(space->sums[v][r]));
}

// `tiles` tiles of rows times one panel; start[t] is the first row of a tile, c belongs to row start[0].
INLINE void amx_panel(const int kind, const char *panel, long k, const char *packed_x, const long *start, long tiles, float *c,
                      long ldc) {
  static __thread scratch memory;
  const long all = k / GROUP, tile_bytes = amx_packed_bytes(1, k);
  if (!memory.memory) reserve(&memory, sizeof(amx_space) + AMX_GROUPS * 3 * AMX_TILE);
  amx_space *space = memory.memory;
  for (long g0 = 0; g0 < all; g0 += AMX_GROUPS) {
    const long groups = all - g0 < AMX_GROUPS ? all - g0 : AMX_GROUPS;
    for (long g = 0; tiles > 1 && g < groups; g++) amx_expand(kind, panel, g0 + g, space->weights[g]);
    for (long t = 0; t < tiles; t++) {
      const char *x = packed_x + t * tile_bytes + g0 * 3 * AMX_TILE;
      const float *sums = (const float *)(packed_x + t * tile_bytes + all * 3 * AMX_TILE) + g0 * AMX_ROWS;
      float *at = c + (start[t] - start[0]) * ldc;
      if (tiles == 1)
        amx_groups(kind, 1, panel, g0, x, sums, groups, start[t + 1] - start[t], space, at, ldc, g0 > 0);
      else
        amx_groups(kind, 0, panel, g0, x, sums, groups, start[t + 1] - start[t], space, at, ldc, g0 > 0);
    }
  }
}

static void amx_product(int kind, const char *panel, long k, const char *packed_x, const long *start, long tiles, float *c,
                        long ldc) {
  switch (kind) {
#define AMX_PANEL(KIND) \
  case KIND: \
    amx_panel(KIND, panel, k, packed_x, start, tiles, c, ldc); \
    break;
    EACH_QUANTISED(AMX_PANEL)
#undef AMX_PANEL
  }
}

#else

static int amx_allowed(void) { return 0; }
static void amx_configure(int kind, long rows) { (void)kind, (void)rows; }
static void amx_release(void) {}
static long amx_packed_bytes(long tiles, long k) { return 0 * tiles * k; }
static void amx_pack(const float *x, long ldx, long rows, long k, char *out) {
  (void)x, (void)ldx, (void)rows, (void)k, (void)out;
}
static void amx_product(int kind, const char *panel, long k, const char *packed_x, const long *start, long tiles, float *c,
                        long ldc) {
  (void)kind, (void)panel, (void)k, (void)packed_x, (void)start, (void)tiles, (void)c, (void)ldc;
}

#endif
#endif
