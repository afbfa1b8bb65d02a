// Attention over latents: a row of the cache is the normed latent of a token (c), then the rotated key that all heads
// share (r). Heads make keys and values of it with `up` [heads][p + v][c]; see kernels/latent.py.
#ifndef TGI_LATENT_H
#define TGI_LATENT_H

#include "attention.h"
#include "rows.h"

typedef struct {
  row_split split;
  float *q, *latent, *cache;
  const float *weight, *cos_sin;
  const int64_t *positions, *kv_index;
  long q_token, q_head, latent_token, heads, c, r;
  float eps;
} latent_rows;

static void latent_rows_body(void *context) {
  latent_rows *call = context;
  const long c = call->c, r = call->r, half = r / 2;
  for (long token, end; claim_rows(&call->split, &token, &end);)
    for (; token < end; token++) {
      const float *cosines = call->cos_sin + call->positions[token] * r, *sines = cosines + half;
      float *latent = call->latent + token * call->latent_token;
      for (long h = 0; h < call->heads; h++) {
        float *q = call->q + token * call->q_token + h * call->q_head;
        rotate_head(q, cosines, sines, half, r, q);
      }
      rotate_head(latent + c, cosines, sines, half, r, latent + c);
      norm_row(latent, 0, call->weight, 0, latent, c, call->eps);
      memcpy(call->cache + call->kv_index[token] * (c + r), latent, (size_t)(c + r) * 4);
    }
}

// q is what is rotated of it, [tokens][heads][r]; strides are in floats. Returns -1 when a position or an index is out of
// range, and nothing is written then.
int tgi_latent_cache(float *q, long q_token, long q_head, float *latent, long latent_token, const float *weight, float eps,
                     const float *cos_sin, long positions_end, const int64_t *positions, const int64_t *kv_index,
                     long slots_end, float *cache, long tokens, long heads, long c, long r, int threads) {
  for (long i = 0; i < tokens; i++)
    if (positions[i] < 0 || positions[i] >= positions_end || kv_index[i] < 0 || kv_index[i] >= slots_end) return -1;
  const long width = heads * r + 2 * (c + r);
  latent_rows call = {.split = split_rows(tokens, width), .q = q, .latent = latent, .cache = cache, .weight = weight,
                      .cos_sin = cos_sin, .positions = positions, .kv_index = kv_index, .q_token = q_token, .q_head = q_head,
                      .latent_token = latent_token, .heads = heads, .c = c, .r = r, .eps = eps};
  run_team(latent_rows_body, &call, row_runs(&call.split), row_threads(tokens, width, threads));
  return 0;
}

// Products of heads, of few tokens ------------------------------------------------------------------------------

typedef struct {
  tasks all;
  const float *x, *up;  // [tokens][heads][in], [heads][rows][c]
  float *out;
  long x_token, x_head, up_head, tokens, heads, p, v, c, r;
} head_products;

// out [tokens][heads][c + r] = p of each query through the rows of keys, then what is left of it.
static void absorb_body(void *context) {
  head_products *call = context;
  const long p = call->p, c = call->c, r = call->r, ld = call->heads * (c + r);
  for (long h; (h = claim(&call->all)) < call->heads;)
    for (long first = 0; first < call->tokens; first += 8) {
      const long tokens = call->tokens - first < 8 ? call->tokens - first : 8;
      const float *x = call->x + first * call->x_token + h * call->x_head;
      float *out = call->out + first * ld + h * (c + r);
      for (long t = 0; t < tokens; t++) {
        memset(out + t * ld, 0, (size_t)c * 4);
        memcpy(out + t * ld + c, x + t * call->x_token + p, (size_t)r * 4);
      }
      for (long row = 0; row < p; row += TILE_KEYS) {
        const long count = p - row < TILE_KEYS ? p - row : TILE_KEYS;
        float weights[8 * TILE_KEYS];
        int64_t offsets[TILE_KEYS];
        for (long i = 0; i < count; i++) offsets[i] = (row + i) * c;
        for (long t = 0; t < tokens; t++)
          memcpy(weights + t * TILE_KEYS, x + t * call->x_token + row, (size_t)count * 4);
        add_all_values(tokens, c, plain_run(call->up + h * call->up_head, offsets, count), weights, TILE_KEYS, out, ld);
      }
    }
}

// out [tokens][heads][v] = x [tokens][heads][c] through the rows of values.
static void expand_body(void *context) {
  head_products *call = context;
  const long v = call->v, c = call->c;
  for (long h; (h = claim(&call->all)) < call->heads;)
    for (long row = 0; row < v; row += TILE_KEYS) {
      const long count = v - row < TILE_KEYS ? v - row : TILE_KEYS;
      int64_t offsets[TILE_KEYS];
      float sums[TILE_KEYS] __attribute__((aligned(64)));
      for (long i = 0; i < count; i++) offsets[i] = (row + i) * c;
      for (long t = 0; t < call->tokens; t++) {
        dot_all_keys(1, c, call->x + (t * call->heads + h) * c, 0, plain_run(call->up + h * call->up_head, offsets, count), sums, 0);
        memcpy(call->out + (t * call->heads + h) * v + row, sums, (size_t)count * 4);
      }
    }
}

void tgi_absorb(const float *q, long q_token, long q_head, const float *up, long up_head, long tokens, long heads, long p,
                long c, long r, float *out, int threads) {
  head_products call = {.x = q, .x_token = q_token, .x_head = q_head, .up = up, .up_head = up_head, .tokens = tokens,
                        .heads = heads, .p = p, .c = c, .r = r, .out = out};
  run_team(absorb_body, &call, heads, row_threads(tokens, heads * p * c / 16, threads));
}

void tgi_expand_values(const float *x, const float *up, long up_head, long tokens, long heads, long v, long c, float *out,
                       int threads) {
  head_products call = {.x = x, .up = up, .up_head = up_head, .tokens = tokens, .heads = heads, .v = v, .c = c, .out = out};
  run_team(expand_body, &call, heads, row_threads(tokens, heads * v * c / 16, threads));
}

// q and out are [tokens][heads][c + r] and [tokens][heads][c].
int tgi_latent_attention(const float *q, const float *cache, long blocks, long block_size, const int32_t *block_tables,
                         long table_stride, long max_blocks, const int32_t *seq_lens, long num_decode, long num_chunks,
                         const int64_t *starts, const int64_t *ends, long heads, long c, long r, float scale, float *out,
                         int threads) {
  const attention_call call = {
      .q = q, .k_cache = cache, .v_cache = cache, .out = out, .block_tables = block_tables, .seq_lens = seq_lens,
      .num_decode = num_decode, .num_chunks = num_chunks, .heads = heads, .kv_heads = 1, .head_dim = c + r, .value_dim = c,
      .blocks = blocks, .block_size = block_size, .q_token = heads * (c + r), .q_head = c + r, .table_stride = table_stride,
      .starts = starts, .ends = ends, .scale = scale};
  return run_attention(call, max_blocks, threads);
}

#endif
