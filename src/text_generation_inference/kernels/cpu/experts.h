// A mixture of experts: the rows of each expert are put together, go through its two matrices, and are summed up for their
// tokens. Matrices are packed one by one, so that only those that a token asks for are read.
#ifndef TGI_EXPERTS_H
#define TGI_EXPERTS_H

#include "linear.h"
#include "rows.h"

// Rows starts[e] to starts[e + 1] of x times the matrix of expert e, for all experts -> out [rows][outputs].
static void multiply_groups(const float *x, const packed_weight *const *matrices, const long *starts, long experts, float *out,
                            int threads) {
  static __thread scratch memory;
  const long k = matrices[0]->in_features, width = whole_features(matrices[0]);
  long count = 0;
  for (long e = 0; e < experts; e++)
    for (const packed_weight *piece = matrices[e]; piece && starts[e + 1] > starts[e]; piece = piece->next) count++;
  product_list list = {.calls = reserve(&memory, (size_t)count * (sizeof(linear_call) + sizeof(long)))};
  long *sizes = (long *)(list.calls + count);
  for (long e = 0; e < experts; e++) {
    float *to = out + starts[e] * width;
    for (const packed_weight *piece = matrices[e]; piece && starts[e + 1] > starts[e]; piece = piece->next, list.count++) {
      linear_call *call = &list.calls[list.count];
      sizes[list.count] = prepare_linear(call, x + starts[e] * k, starts[e + 1] - starts[e], k, piece, 0, to, width, threads);
      to += piece->out_features;
    }
  }
  run_products(list, sizes, threads);
}

// x [tokens][hidden], ids and weights [tokens][k] -> out [tokens][hidden]. `scale_inputs`: weights are multiplied with what
// goes into an expert, not with what comes out. Returns -1 when an id is no expert.
int tgi_experts(const float *x, long tokens, long ldx, const int64_t *ids, const float *weights, long k, long count,
                const packed_weight *const *gate_up, const packed_weight *const *down, int gate, int scale_inputs, float *out,
                int threads) {
  static __thread scratch memory, places;
  const long hidden = gate_up[0]->in_features, width = down[0]->in_features, pairs = tokens * k;
  long *starts = reserve(&places, (size_t)(count + 1 + pairs) * sizeof(long));
  long *place = starts + count + 1;  // of each pair, in the order of experts
  memset(starts, 0, (size_t)(count + 1) * sizeof(long));
  for (long p = 0; p < pairs; p++) {
    if (ids[p] < 0 || ids[p] >= count) return -1;
    starts[ids[p] + 1]++;
  }
  for (long e = 0; e < count; e++) starts[e + 1] += starts[e];
  for (long p = 0; p < pairs; p++) place[p] = starts[ids[p]]++;
  for (long e = count; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
  float *rows = reserve(&memory, (size_t)(pairs * (hidden + 3 * width) + 64) * 4);
  float *wide = rows + pairs * hidden, *gated = wide + pairs * 2 * width;
  for (long p = 0; p < pairs; p++) {
    const float *from = x + p / k * ldx;
    float *to = rows + place[p] * hidden;
    if (scale_inputs)
      for (long i = 0; i < hidden; i++) to[i] = from[i] * weights[p];
    else
      memcpy(to, from, (size_t)hidden * 4);
  }
  multiply_groups(rows, gate_up, starts, count, wide, threads);
  tgi_gate(gate, wide, 2 * width, pairs, width, gated, threads);
  multiply_groups(gated, down, starts, count, rows, threads);
  for (long t = 0; t < tokens; t++) {
    float *to = out + t * hidden;
    memset(to, 0, (size_t)hidden * 4);
    for (long j = 0; j < k; j++) {
      const float *from = rows + place[t * k + j] * hidden, weight = scale_inputs ? 1.0f : weights[t * k + j];
      for (long i = 0; i < hidden; i++) to[i] += from[i] * weight;
    }
  }
  return 0;
}

// Shares of a softmax over scores [tokens][count], the greatest k of each row, of equal ones the first; divided by their sum
// where that is wanted.
static void route_softmax(const float *scores, long tokens, long count, long k, int normalised, float factor, int64_t *ids,
                          float *weights) {
  for (long t = 0; t < tokens; t++, scores += count, ids += k, weights += k) {
    float top = -INFINITY, total = 0.0f, chosen = 0.0f;
    for (long e = 0; e < count; e++) top = scores[e] > top ? scores[e] : top;
    for (long e = 0; e < count; e++) total += expf(scores[e] - top);
    for (long j = 0; j < k; j++) {
      long best = -1;
      for (long e = 0; e < count; e++) {
        if (best >= 0 && !(scores[e] > scores[best])) continue;
        int taken = 0;
        for (long i = 0; i < j; i++) taken |= ids[i] == e;
        if (!taken) best = e;
      }
      ids[j] = best;
      weights[j] = expf(scores[best] - top) / total;
      chosen += weights[j];
    }
    for (long j = 0; j < k; j++) weights[j] = (normalised ? weights[j] / chosen : weights[j]) * factor;
  }
}

#endif
