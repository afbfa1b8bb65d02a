// The CPU kernels as one plain C library, built on the user's machine by build.py and called from ops.py.
#define _GNU_SOURCE
#include "simd.h"
#include "team.h"

#include "attention.h"
#include "linear.h"
#include "rows.h"
#include "experts.h"
#include "latent.h"
#include "fused_decode.h"

#include <sys/mman.h>
#include <time.h>

int tgi_vector_bits(void) { return VL * 32; }

int tgi_uses_amx(void) { return amx_allowed(); }

// Ask for large pages before the memory is first touched; a refusal costs nothing but speed.
void tgi_advise_large_pages(void *memory, long bytes) {
  const uintptr_t page = 4096, start = ((uintptr_t)memory + page - 1) & ~(page - 1);
  const uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) & ~(page - 1);
  if (end > start) madvise((void *)start, end - start, MADV_HUGEPAGE);
}

// What the machine can do at all, for benchmarks ---------------------------------------------------------------

typedef struct {
  tasks shares;
  long count, rounds;
  const float *memory;  // null: arithmetic only
  long floats;          // of each share
  float sink;
} probe_call;

static void probe_body(void *context) {
  probe_call *call = context;
  for (long share; (share = claim(&call->shares)) < call->count;) {
    vf sums[12];
    UNROLL for (int u = 0; u < 12; u++) sums[u] = v_set((float)u);
    const vf factor = v_set(0.5f);
    for (long round = 0; round < call->rounds; round++) {
      if (!call->memory) {
        UNROLL for (int u = 0; u < 12; u++) sums[u] = v_fma(sums[u], factor, factor);
        continue;
      }
      const float *at = call->memory + share * call->floats;
      for (long i = 0; i < call->floats; i += 8 * VL)
        UNROLL for (int u = 0; u < 8; u++) sums[u] = v_add(sums[u], v_load(at + i + u * VL));
    }
    UNROLL for (int u = 1; u < 12; u++) sums[0] = v_add(sums[0], sums[u]);
    call->sink = v_sum(sums[0]);
  }
}

static double run_probe(probe_call *call, int threads) {
  struct timespec start, end;
  clock_gettime(CLOCK_MONOTONIC, &start);
  run_team(probe_body, call, call->count, threads);
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
}

// Floating-point operations a second.
double tgi_probe_fma(int threads) {
  probe_call call = {.count = 16 * threads, .rounds = 100000};
  return (double)call.count * (double)call.rounds * 12 * VL * 2 / run_probe(&call, threads);
}

// Bytes a second, reading `bytes` of `memory` once.
double tgi_probe_read(const float *memory, long bytes, int threads) {
  probe_call call = {.count = 8 * threads, .rounds = 1, .memory = memory};
  call.floats = bytes / 4 / call.count / (8 * VL) * (8 * VL);
  return (double)(call.floats * call.count * 4) / run_probe(&call, threads);
}
