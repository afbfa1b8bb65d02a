// All layers of a decoder with norms before, or before and after, each part, in one call: the same ops in the same order as
// one call each, without what a call from Python costs, and over a few buffers that stay in the cache.
#ifndef TGI_STACK_H
#define TGI_STACK_H

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "rows.h"

enum { MLP_ROWS = 256 };  // rows whose intermediate values are alive at a time

typedef struct {
  const float *input_norm, *post_norm;       // [hidden]
  const float *attention_out_norm, *mlp_out_norm;  // [hidden], or null
  const float *q_norm, *k_norm;              // [head_dim], or null
  const packed_weight *qkv, *o, *gate_up, *down;
  const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // or null
  float *k_cache, *v_cache;
  const float *cos_sin;
  const packed_weight *router;               // or null: `gate_up` and `down` are the only ones
  const packed_weight *const *expert_gate_up, *const *expert_down;
  int64_t window;                            // 0: none
  int64_t rotary_dim, positions;             // of cos_sin
  int64_t blocks;                            // of the caches
  int64_t num_experts, top_k, normalised;
  float softcap, routing_factor;             // 0: none
} fused_layer;

typedef struct {
  const fused_layer *layers;
  const float *final_norm;
  int64_t num_layers, heads, kv_heads, head_dim, block_size, activation;
  float eps, scale;
} fused_decoder;

// x [rows][hidden] -> out [rows][hidden] through the matrices of a dense layer, or through the experts of each row.
static void feed_forward(const fused_decoder *decoder, const fused_layer *layer, const float *x, long rows, long hidden, float *out,
                         int threads) {
  static __thread scratch memory;
  if (layer->router) {
    const long k = layer->top_k, count = layer->num_experts;
    int64_t *ids = reserve(&memory, (size_t)(rows * k) * 12 + (size_t)(rows * count) * 4);
    float *weights = (float *)(ids + rows * k), *scores = weights + rows * k;
    tgi_linear(x, rows, hidden, layer->router, 0, scores, count, threads);
    route_softmax(scores, rows, count, k, (int)layer->normalised, layer->routing_factor, ids, weights);
    tgi_experts(x, rows, hidden, ids, weights, k, count, layer->expert_gate_up, layer->expert_down, (int)decoder->activation, 0, out,
                threads);
    return;
  }
  const long wide = whole_features(layer->gate_up);
  float *gate_up = reserve(&memory, (size_t)(rows * (wide + wide / 2) + 64) * 4), *gated = gate_up + rows * wide;
  tgi_linear(x, rows, hidden, layer->gate_up, layer->gate_up_bias, gate_up, wide, threads);
  tgi_gate((int)decoder->activation, gate_up, wide, rows, wide / 2, gated, threads);
  tgi_linear(gated, rows, wide / 2, layer->down, layer->down_bias, out, hidden, threads);
}

// x [rows][hidden] -> out [rows][hidden], normalised. Layers with a window have an index and tables of their own, which may
// be the others'. Returns -1 when an index of the batch is out of range.
int tgi_run_fused_decode(const fused_decoder *decoder, const float *x, long rows, const int64_t *positions, const int64_t *kv_index,
                  const int64_t *window_index, const int32_t *block_tables, const int32_t *window_tables, long table_stride,
                  long max_blocks, const int32_t *seq_lens, long num_decode, long num_chunks, const int64_t *starts,
                  const int64_t *ends, float *out, int threads) {
  static __thread scratch memory;
  const long d = decoder->head_dim, heads = decoder->heads, kv_heads = decoder->kv_heads;
  const long hidden = decoder->layers[0].o->out_features, q_width = heads * d, kv_width = kv_heads * d;
  const long qkv_width = q_width + 2 * kv_width;
  float *residual = reserve(&memory, (size_t)(rows * (3 * hidden + qkv_width + 2 * q_width) + 64) * 4);
  float *normed = residual + rows * hidden, *added = normed + rows * hidden, *qkv = added + rows * hidden;
  float *q = qkv + rows * qkv_width, *mixed = q + rows * q_width;
  memcpy(residual, x, (size_t)(rows * hidden) * 4);
  tgi_rms_norm(residual, hidden, 0, 0, decoder->layers[0].input_norm, decoder->eps, rows, hidden, normed, 0, threads);
  for (long i = 0; i < decoder->num_layers; i++) {
    const fused_layer *layer = decoder->layers + i;
    const int last = i + 1 == decoder->num_layers;
    tgi_linear(normed, rows, hidden, layer->qkv, layer->qkv_bias, qkv, qkv_width, threads);
    if (layer->q_norm) normalize_heads(qkv, rows, qkv_width, heads, d, layer->q_norm, decoder->eps);
    if (layer->k_norm) normalize_heads(qkv + q_width, rows, qkv_width, kv_heads, d, layer->k_norm, decoder->eps);
    if (tgi_rotary_and_cache(qkv, qkv_width, d, qkv + q_width, qkv_width, d, qkv + q_width + kv_width, qkv_width, d,
                             layer->cos_sin, layer->rotary_dim, layer->positions, positions,
                             layer->window ? window_index : kv_index, layer->blocks * decoder->block_size, q, layer->k_cache, layer->v_cache, rows, heads, kv_heads, d,
                             threads))
      return -1;
    if (tgi_attention(q, q_width, d, layer->k_cache, layer->v_cache, layer->blocks, decoder->block_size,
                      layer->window ? window_tables : block_tables, table_stride, max_blocks, seq_lens, num_decode,
                      num_chunks, starts, ends, heads, kv_heads, d, decoder->scale, layer->window, 0, layer->softcap, NULL,
                      mixed, threads))
      return -1;
    tgi_linear(mixed, rows, q_width, layer->o, layer->o_bias, added, hidden, threads);
    if (layer->attention_out_norm)
      tgi_rms_norm(added, hidden, 0, 0, layer->attention_out_norm, decoder->eps, rows, hidden, added, 0, threads);
    tgi_rms_norm(added, hidden, residual, hidden, layer->post_norm, decoder->eps, rows, hidden, normed, residual, threads);
    for (long row = 0; row < rows; row += MLP_ROWS) {
      const long count = rows - row < MLP_ROWS ? rows - row : MLP_ROWS;
      feed_forward(decoder, layer, normed + row * hidden, count, hidden, added + row * hidden, threads);
    }
    if (layer->mlp_out_norm)
      tgi_rms_norm(added, hidden, 0, 0, layer->mlp_out_norm, decoder->eps, rows, hidden, added, 0, threads);
    tgi_rms_norm(added, hidden, residual, hidden, last ? decoder->final_norm : layer[1].input_norm, decoder->eps, rows, hidden,
                 last ? out : normed, residual, threads);
  }
  return 0;
}

#endif
