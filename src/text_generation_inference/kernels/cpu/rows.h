// Ops that treat each row (token) on its own: norms, activations, rotary embedding with cache write, greedy choice.
#ifndef TGI_ROWS_H
#define TGI_ROWS_H

#include "team.h"

enum { SERIAL_FLOATS = 1 << 14 };  // below this a parallel region costs more than it saves

// Rows are claimed in runs long enough to be worth the claim.
typedef struct {
  tasks runs;
  long rows, run;
} row_split;

INLINE row_split split_rows(long rows, long floats_per_row) {
  long run = (SERIAL_FLOATS / 4) / (floats_per_row + 1) + 1;
  return (row_split){.rows = rows, .run = run};
}

INLINE int row_threads(long rows, long floats_per_row, int threads) {
  return rows * floats_per_row < SERIAL_FLOATS ? 1 : threads;
}

INLINE long row_runs(const row_split *split) { return (split->rows + split->run - 1) / split->run; }

INLINE int claim_rows(row_split *split, long *start, long *end) {
  *start = claim(&split->runs) * split->run;
  *end = *start + split->run < split->rows ? *start + split->run : split->rows;
  return *start < split->rows;
}

// Norms --------------------------------------------------------------------------------------------------------

typedef struct {
  row_split split;
  const float *x, *residual, *weight;
  float *out, *sum;
  long ldx, ldr, width;
  float eps;
} norm_call;

INLINE void norm_row(const float *x, const float *residual, const float *weight, float *sum, float *out, long n, float eps) {
  vf squares[4] = {v_set(0), v_set(0), v_set(0), v_set(0)};
  long i = 0;
  for (; i + 4 * VL <= n; i += 4 * VL)
    UNROLL for (int u = 0; u < 4; u++) {
      vf value = v_load(x + i + u * VL);
      if (residual) {
        value = v_add(v_load(residual + i + u * VL), value);
        v_store(sum + i + u * VL, value);
      }
      squares[u] = v_fma(value, value, squares[u]);
    }
  for (; i < n; i += VL) {
    const long count = n - i < VL ? n - i : VL;
    vf value = v_load_n(x + i, count);
    if (residual) {
      value = v_add(v_load_n(residual + i, count), value);
      v_store_n(sum + i, value, count);
    }
    squares[0] = v_fma(value, value, squares[0]);
  }
  const float total = v_sum(v_add(v_add(squares[0], squares[1]), v_add(squares[2], squares[3])));
  const vf factor = v_set(1.0f / sqrtf(total / (float)n + eps));
  const float *value = residual ? sum : x;
  for (i = 0; i + VL <= n; i += VL)
    v_store(out + i, v_mul(v_load(weight + i), v_mul(v_load(value + i), factor)));
  if (i < n)
    v_store_n(out + i, v_mul(v_load_n(weight + i, n - i), v_mul(v_load_n(value + i, n - i), factor)), n - i);
}

static void norm_body(void *context) {
  norm_call *call = context;
  const long n = call->width;
  for (long row, end; claim_rows(&call->split, &row, &end);)
    for (; row < end; row++) {
      const float *x = call->x + row * call->ldx;
      float *out = call->out + row * n;
      if (call->residual)
        norm_row(x, call->residual + row * call->ldr, call->weight, call->sum + row * n, out, n, call->eps);
      else
        norm_row(x, 0, call->weight, 0, out, n, call->eps);
    }
}

// `residual` null: out = norm(x). Otherwise sum = residual + x and out = norm(sum).
void tgi_rms_norm(const float *x, long ldx, const float *residual, long ldr, const float *weight, float eps, long rows,
                  long width, float *out, float *sum, int threads) {
  norm_call call = {.split = split_rows(rows, width), .x = x, .residual = residual, .weight = weight, .out = out,
                    .sum = sum, .ldx = ldx, .ldr = ldr, .width = width, .eps = eps};
  run_team(norm_body, &call, row_runs(&call.split), row_threads(rows, width, threads));
}

// Norm each of `heads` heads of every row, in place.
static void normalize_heads(float *x, long rows, long ldx, long heads, long head_dim, const float *weight, float eps) {
  for (long row = 0; row < rows; row++)
    for (long h = 0; h < heads; h++) {
      float *head = x + row * ldx + h * head_dim;
      norm_row(head, 0, weight, 0, head, head_dim, eps);
    }
}

// Gated activations --------------------------------------------------------------------------------------------

enum { SILU, GELU_TANH };

typedef struct {
  row_split split;
  const float *x;
  float *out;
  long ldx, width;
  int kind;
} gate_call;

INLINE vf gate(const int kind, vf x) {
  const vf one = v_set(1.0f);
  if (kind == SILU) return v_div(x, v_add(one, v_exp(v_sub(v_set(0.0f), x))));
  vf inner = v_mul(v_set(0.7978845608028654f), v_fma(v_mul(v_mul(x, x), x), v_set(0.044715f), x));
  return v_mul(v_mul(v_set(0.5f), x), v_add(one, v_tanh(inner)));
}

INLINE void gate_rows(const int kind, gate_call *call, long row, long end) {
  const long n = call->width;
  for (; row < end; row++) {
    const float *x = call->x + row * call->ldx;
    float *out = call->out + row * n;
    long i = 0;
    for (; i + VL <= n; i += VL) v_store(out + i, v_mul(gate(kind, v_load(x + i)), v_load(x + n + i)));
    if (i < n) v_store_n(out + i, v_mul(gate(kind, v_load_n(x + i, n - i)), v_load_n(x + n + i, n - i)), n - i);
  }
}

static void gate_body(void *context) {
  gate_call *call = context;
  for (long row, end; claim_rows(&call->split, &row, &end);) {
    if (call->kind == SILU)
      gate_rows(SILU, call, row, end);
    else
      gate_rows(GELU_TANH, call, row, end);
  }
}

void tgi_gate(int kind, const float *x, long ldx, long rows, long width, float *out, int threads) {
  gate_call call = {.split = split_rows(rows, 4 * width), .x = x, .out = out, .ldx = ldx, .width = width, .kind = kind};
  run_team(gate_body, &call, row_runs(&call.split), row_threads(rows, 4 * width, threads));
}

// Rotary embedding and cache write -----------------------------------------------------------------------------

typedef struct {
  row_split split;
  const float *q, *k, *v, *cos_sin;
  const int64_t *positions, *kv_index;
  float *out, *k_cache, *v_cache;
  long q_token, q_head, k_token, k_head, v_token, v_head;  // strides
  long heads, kv_heads, head_dim, rotary_dim;
} rotary_call;

INLINE void rotate_head(const float *x, const float *cosines, const float *sines, long half, long head_dim, float *out) {
  for (long i = 0; i < half; i += VL) {
    const long n = half - i < VL ? half - i : VL;
    vf first, second, c, s;
    if (n == VL) {
      first = v_load(x + i), second = v_load(x + half + i), c = v_load(cosines + i), s = v_load(sines + i);
      v_store(out + i, v_sub(v_mul(first, c), v_mul(second, s)));
      v_store(out + half + i, v_add(v_mul(second, c), v_mul(first, s)));
    } else {
      first = v_load_n(x + i, n), second = v_load_n(x + half + i, n);
      c = v_load_n(cosines + i, n), s = v_load_n(sines + i, n);
      v_store_n(out + i, v_sub(v_mul(first, c), v_mul(second, s)), n);
      v_store_n(out + half + i, v_add(v_mul(second, c), v_mul(first, s)), n);
    }
  }
  if (2 * half < head_dim) memcpy(out + 2 * half, x + 2 * half, (size_t)(head_dim - 2 * half) * 4);
}

static void rotary_body(void *context) {
  rotary_call *call = context;
  const long d = call->head_dim, half = call->rotary_dim / 2, kv_width = call->kv_heads * d;
  for (long token, end; claim_rows(&call->split, &token, &end);)
    for (; token < end; token++) {
      const float *cosines = call->cos_sin + call->positions[token] * call->rotary_dim, *sines = cosines + half;
      float *q_out = call->out + token * call->heads * d;
      float *k_out = call->k_cache + call->kv_index[token] * kv_width, *v_out = call->v_cache + call->kv_index[token] * kv_width;
      for (long h = 0; h < call->heads; h++)
        rotate_head(call->q + token * call->q_token + h * call->q_head, cosines, sines, half, d, q_out + h * d);
      for (long h = 0; h < call->kv_heads; h++) {
        rotate_head(call->k + token * call->k_token + h * call->k_head, cosines, sines, half, d, k_out + h * d);
        memcpy(v_out + h * d, call->v + token * call->v_token + h * call->v_head, (size_t)d * 4);
      }
    }
}

// `positions_end` rows of cos_sin and `slots_end` slots of the cache exist; returns -1 when a position or a cache index
// is out of range, and nothing is written then. Strides are in floats, of tokens and of heads.
int tgi_rotary_and_cache(const float *q, long q_token, long q_head, const float *k, long k_token, long k_head, const float *v,
                         long v_token, long v_head, const float *cos_sin, long rotary_dim, long positions_end,
                         const int64_t *positions, const int64_t *kv_index, long slots_end, float *out, float *k_cache,
                         float *v_cache, long tokens, long heads, long kv_heads, long head_dim, int threads) {
  for (long i = 0; i < tokens; i++)
    if (positions[i] < 0 || positions[i] >= positions_end || kv_index[i] < 0 || kv_index[i] >= slots_end) return -1;
  const long width = (heads + 2 * kv_heads) * head_dim;
  rotary_call call = {.split = split_rows(tokens, width), .q = q, .k = k, .v = v, .cos_sin = cos_sin,
                      .positions = positions, .kv_index = kv_index, .out = out, .k_cache = k_cache, .v_cache = v_cache,
                      .q_token = q_token, .q_head = q_head, .k_token = k_token, .k_head = k_head,
                      .v_token = v_token, .v_head = v_head,
                      .heads = heads, .kv_heads = kv_heads, .head_dim = head_dim, .rotary_dim = rotary_dim};
  run_team(rotary_body, &call, row_runs(&call.split), row_threads(tokens, width, threads));
  return 0;
}

// Greedy choice ------------------------------------------------------------------------------------------------

enum { PIECE = 4096 };  // logits read twice, the second time from the first-level cache

typedef struct {
  float max, sum;  // sum of exp(x - max)
  int64_t index;   // of the first NaN if there is one, else of the first maximum
  int nan;
} piece_result;

typedef struct {
  tasks pieces;
  const float *logits;
  long ld, rows, vocab, pieces_per_row;
  piece_result *results;
} greedy_call;

static piece_result greedy_piece(const float *x, long n) {
  piece_result result = {.max = -INFINITY, .index = 0};
  vf best = v_set(-INFINITY);
  vm nans = m_none();
  long i = 0;
  for (; i + VL <= n; i += VL) {
    vf value = v_load(x + i);
    nans = m_or(nans, v_is_nan(value));
    best = v_max(value, best);
  }
  result.max = v_max_of(best);
  for (long j = i; j < n; j++) {
    result.nan |= x[j] != x[j];
    if (x[j] > result.max) result.max = x[j];
  }
  result.nan |= m_any(nans);
  for (; result.index < n; result.index++) {
    const float value = x[result.index];
    if (result.nan ? value != value : value == result.max) break;
  }
  const vf max = v_set(result.max);
  vf sums[2] = {v_set(0.0f), v_set(0.0f)};
  for (i = 0; i + 2 * VL <= n; i += 2 * VL)
    UNROLL for (int u = 0; u < 2; u++) sums[u] = v_add(sums[u], v_exp(v_sub(v_load(x + i + u * VL), max)));
  result.sum = v_sum(v_add(sums[0], sums[1]));
  for (; i < n; i++) result.sum += expf(x[i] - result.max);
  return result;
}

static void greedy_body(void *context) {
  greedy_call *call = context;
  for (long t; (t = claim(&call->pieces)) < call->rows * call->pieces_per_row;) {
    const long row = t / call->pieces_per_row, start = t % call->pieces_per_row * PIECE;
    const long n = call->vocab - start < PIECE ? call->vocab - start : PIECE;
    call->results[t] = greedy_piece(call->logits + row * call->ld + start, n);
    call->results[t].index += start;
  }
}

void tgi_greedy(const float *logits, long ld, long rows, long vocab, int64_t *index, float *logprob, int threads) {
  static __thread scratch memory;
  const long per_row = (vocab + PIECE - 1) / PIECE;
  greedy_call call = {.logits = logits, .ld = ld, .rows = rows, .vocab = vocab, .pieces_per_row = per_row};
  call.results = reserve(&memory, (size_t)(rows * per_row) * sizeof(piece_result));
  run_team(greedy_body, &call, rows * per_row, row_threads(rows, vocab, threads));
  for (long row = 0; row < rows; row++) {
    const piece_result *pieces = call.results + row * per_row, *best = pieces;
    for (long i = 1; i < per_row && !best->nan; i++)
      if (pieces[i].nan || pieces[i].max > best->max) best = pieces + i;
    float sum = 0.0f;
    for (long i = 0; i < per_row; i++)
      if (pieces[i].max > -INFINITY) sum += pieces[i].sum * expf(pieces[i].max - best->max);
    index[row] = best->index;
    logprob[row] = best->nan || !isfinite(best->max) ? NAN : -logf(sum);
  }
}

#endif
