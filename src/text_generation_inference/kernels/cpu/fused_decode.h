// All layers of a plain pre-norm decoder in one call: the same ops in the same order as one call each, without what a
// call from Python costs, and over a few buffers that stay in the cache.
#ifndef TGI_STACK_H
#define TGI_STACK_H

#include "attention.h"
#include "linear.h"
#include "rows.h"

enum { MLP_ROWS = 256 };  // rows whose intermediate values are alive at a time

typedef struct {
  const float *input_norm, *post_norm;       // [hidden]
  const float *q_norm, *k_norm;              // [head_dim], or null
  const packed_weight *qkv, *o, *gate_up, *down;
  const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // or null
  float *k_cache, *v_cache;
  int64_t window;                            // 0: none
} fused_layer;

typedef struct {
  const fused_layer *layers;
  const float *final_norm, *cos_sin;
  int64_t num_layers, heads, kv_heads, head_dim, rotary_dim, positions, blocks, block_size, activation;
  float eps, scale, softcap;
} fused_decoder;

// x [rows][hidden] -> out [rows][hidden], normalised. Returns -1 when an index of the batch is out of range.
int tgi_run_fused_decode(const fused_decoder *decoder, const float *x, long rows, const int64_t *positions, const int64_t *kv_index,
                  const int32_t *block_tables, long table_stride, long max_blocks, const int32_t *seq_lens, long num_decode,
                  long num_chunks, const int64_t *starts, const int64_t *ends, float *out, int threads) {
  static __thread scratch memory;
  const long d = decoder->head_dim, heads = decoder->heads, kv_heads = decoder->kv_heads;
  const long hidden = decoder->layers[0].o->out_features, q_width = heads * d, kv_width = kv_heads * d;
  const long qkv_width = q_width + 2 * kv_width, wide = whole_features(decoder->layers[0].gate_up);
  const long mlp_rows = rows < MLP_ROWS ? rows : MLP_ROWS;
  float *residual = reserve(&memory, (size_t)(rows * (3 * hidden + qkv_width + 2 * q_width) + mlp_rows * (wide + wide / 2) + 64) * 4);
  float *normed = residual + rows * hidden, *added = normed + rows * hidden, *qkv = added + rows * hidden;
  float *q = qkv + rows * qkv_width, *mixed = q + rows * q_width, *gate_up = mixed + rows * q_width;
  float *gated = gate_up + mlp_rows * wide;
  memcpy(residual, x, (size_t)(rows * hidden) * 4);
  tgi_rms_norm(residual, hidden, 0, 0, decoder->layers[0].input_norm, decoder->eps, rows, hidden, normed, 0, threads);
  for (long i = 0; i < decoder->num_layers; i++) {
    const fused_layer *layer = decoder->layers + i;
    const int last = i + 1 == decoder->num_layers;
    tgi_linear(normed, rows, hidden, layer->qkv, layer->qkv_bias, qkv, qkv_width, threads);
    if (layer->q_norm) normalize_heads(qkv, rows, qkv_width, heads, d, layer->q_norm, decoder->eps);
    if (layer->k_norm) normalize_heads(qkv + q_width, rows, qkv_width, kv_heads, d, layer->k_norm, decoder->eps);
    if (tgi_rotary_and_cache(qkv, qkv_width, d, qkv + q_width, qkv_width, d, qkv + q_width + kv_width, qkv_width, d,
                             decoder->cos_sin, decoder->rotary_dim, decoder->positions, positions, kv_index,
                             decoder->blocks * decoder->block_size, q, layer->k_cache, layer->v_cache, rows, heads, kv_heads, d,
                             threads))
      return -1;
    if (tgi_attention(q, q_width, d, layer->k_cache, layer->v_cache, decoder->blocks, decoder->block_size, block_tables,
                      table_stride, max_blocks, seq_lens, num_decode, num_chunks, starts, ends, heads, kv_heads, d,
                      decoder->scale, layer->window, 0, decoder->softcap, NULL, mixed, threads))
      return -1;
    tgi_linear(mixed, rows, q_width, layer->o, layer->o_bias, added, hidden, threads);
    tgi_rms_norm(added, hidden, residual, hidden, layer->post_norm, decoder->eps, rows, hidden, normed, residual, threads);
    for (long row = 0; row < rows; row += MLP_ROWS) {
      const long count = rows - row < MLP_ROWS ? rows - row : MLP_ROWS;
      tgi_linear(normed + row * hidden, count, hidden, layer->gate_up, layer->gate_up_bias, gate_up, wide, threads);
      tgi_gate((int)decoder->activation, gate_up, wide, count, wide / 2, gated, threads);
      tgi_linear(gated, count, wide / 2, layer->down, layer->down_bias, added + row * hidden, hidden, threads);
    }
    tgi_rms_norm(added, hidden, residual, hidden, last ? decoder->final_norm : layer[1].input_norm, decoder->eps, rows, hidden,
                 last ? out : normed, residual, threads);
  }
  return 0;
}

#endif
