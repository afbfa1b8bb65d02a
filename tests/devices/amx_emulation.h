// The tile instructions in plain C, so that what is written with them is tested on machines that lack them. Forced in
// front of the sources by a stand-in for the compiler.
#define _GNU_SOURCE
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
} emulated_config;

static __thread emulated_config tile_config;
static __thread uint8_t tile_data[8][16][64];

static __attribute__((noinline)) void emulated_load(int t, const void *base, long stride) {
  memset(tile_data[t], 0, sizeof tile_data[t]);
  for (int r = 0; r < tile_config.rows[t]; r++)
    memcpy(tile_data[t][r], (const char *)base + r * stride, tile_config.bytes_per_row[t]);
}

static __attribute__((noinline)) void emulated_store(int t, void *base, long stride) {
  for (int r = 0; r < tile_config.rows[t]; r++)
    memcpy((char *)base + r * stride, tile_data[t][r], tile_config.bytes_per_row[t]);
}

static inline float emulated_widen(const uint8_t *p) {
  uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static __attribute__((noinline)) void emulated_product(int c, int a, int b) {
  if (tile_config.bytes_per_row[a] / 4 != tile_config.rows[b]) __builtin_trap();  // as the machine does
  for (int r = 0; r < tile_config.rows[c]; r++)
    for (int n = 0; n < tile_config.bytes_per_row[c] / 4; n++) {
      float sum;
      memcpy(&sum, &tile_data[c][r][n * 4], 4);
      for (int k = 0; k < tile_config.rows[b]; k++)
        for (int pair = 0; pair < 2; pair++)
          sum += emulated_widen(&tile_data[a][r][k * 4 + pair * 2]) * emulated_widen(&tile_data[b][k][n * 4 + pair * 2]);
      memcpy(&tile_data[c][r][n * 4], &sum, 4);
    }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) memcpy(&tile_config, config, sizeof tile_config)
#define _tile_release() ((void)0)
#define _tile_loadd(t, base, stride) emulated_load(t, base, stride)
#define _tile_stored(t, base, stride) emulated_store(t, base, stride)
#define _tile_zero(t) memset(tile_data[t], 0, sizeof tile_data[t])
#define _tile_dpbf16ps(c, a, b) emulated_product(c, a, b)
#define syscall(number, ...) ((number) == SYS_arch_prctl ? 0L : syscall(number, __VA_ARGS__))
