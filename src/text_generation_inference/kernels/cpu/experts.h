// A mixture of experts: the rows of each expert are put together, go through its two matrices, and are summed up for their
// tokens. Matrices are packed one by one, so that only those that a token asks for are read.
#ifndef TGI_EXPERTS_H
#define TGI_EXPERTS_H

#include "linear.h"
#include "rows.h"

// x [tokens][hidden], ids and weights [tokens][k] -> out [tokens][hidden]. `scale_inputs`: weights are multiplied with what
// goes into an expert, not with what comes out. Returns -1 when an id is no expert.
int tgi_experts(const float *x, long tokens, long ldx, const int64_t *ids, const float *weights, long k, long count,
                const packed_weight *const *gate_up, const packed_weight *const *down, int gate, int scale_inputs, float *out,
                int threads) {
  static __thread scratch memory, places;
  const long hidden = gate_up[0]->in_features, width = down[0]->in_features, pairs = tokens * k;
  long *starts = reserve(&places, (size_t)(count + 1 + 2 * pairs) * sizeof(long));
  long *order = starts + count + 1, *place = order + pairs;  // pairs by expert, and where each pair is among them
  memset(starts, 0, (size_t)(count + 1) * sizeof(long));
  for (long p = 0; p < pairs; p++) {
    if (ids[p] < 0 || ids[p] >= count) return -1;
    starts[ids[p] + 1]++;
  }
  long most = 0;
  for (long e = 0; e < count; e++) {
    if (starts[e + 1] > most) most = starts[e + 1];
    starts[e + 1] += starts[e];
  }
  for (long p = 0; p < pairs; p++) order[starts[ids[p]]++] = p;
  for (long e = count; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
  float *found = reserve(&memory, (size_t)(pairs * hidden + most * (hidden + 3 * width) + 64) * 4);
  float *rows = found + pairs * hidden, *wide = rows + most * hidden, *gated = wide + most * 2 * width;
  for (long e = 0; e < count; e++) {
    const long first = starts[e], n = starts[e + 1] - first;
    if (!n) continue;
    for (long r = 0; r < n; r++) {
      const long pair = order[first + r];
      const float *from = x + pair / k * ldx;
      place[pair] = first + r;
      for (long i = 0; i < hidden; i++) rows[r * hidden + i] = scale_inputs ? from[i] * weights[pair] : from[i];
    }
    tgi_linear(rows, n, hidden, gate_up[e], 0, wide, 2 * width, threads);
    tgi_gate(gate, wide, 2 * width, n, width, gated, threads);
    tgi_linear(gated, n, width, down[e], 0, found + first * hidden, hidden, threads);
  }
  for (long t = 0; t < tokens; t++)
    for (long i = 0; i < hidden; i++) {
      float sum = 0.0f;
      for (long j = 0; j < k; j++) {
        const float value = found[place[t * k + j] * hidden + i];
        sum += scale_inputs ? value : value * weights[t * k + j];
      }
      out[t * hidden + i] = sum;
    }
  return 0;
}

#endif
