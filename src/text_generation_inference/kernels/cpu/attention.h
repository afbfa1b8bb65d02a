// Causal attention over a paged KV cache [blocks][block_size][kv_heads][head_dim]. Values may be the first `value_dim` of
// what lies in their place, as those of latents are, which are the keys at the same time. And attention of runs of rows to
// whole runs of others, without a cache: each is a chunk whose queries are all where the last key is.
//
// A query is one (token, head) pair. Pairs that share a KV head and a row of the batch differ only in position, so
//   - a row that decodes (one token) is cut into pieces of PIECE_KEYS keys; each (row, some kv heads, piece) is a task that
//     takes dot products along head_dim, and pieces are merged in order afterwards. It is reading that takes the time: what a
//     key has for the next KV heads lies behind what it has for this one, and is asked for while this one is computed;
//   - a chunk is cut into panels of PANEL pairs, one pair per vector lane. Scores are kept as [key][pair]: keys and
//     values are read in place, one broadcast at a time, and maximum, exponential and sum run down the lanes.
#ifndef TGI_ATTENTION_H
#define TGI_ATTENTION_H

#include "team.h"

enum { PIECE_KEYS = 256, TILE_KEYS = 64, MAX_HEAD_DIM = 576 };
enum { DECODE_AHEAD = 2 };  // steps of a decoding row between asking and reading

typedef struct {
  tasks all;
  const float *q, *k_cache, *v_cache;
  float *out;
  const int32_t *block_tables, *seq_lens;
  const int64_t *starts, *ends;  // of each chunk
  const int64_t *key_starts;     // [chunks + 1] without a cache: rows of `k_cache` that a chunk sees; else NULL
  const int64_t *first_task, *first_token;  // of each chunk, and of the end
  long q_token, q_head, table_stride, blocks;
  long key_row, kv_head;  // from a key to the next, from a KV head to the next
  const float *sinks;  // [heads]: one more score for each query, without a value; or NULL
  long num_decode, num_chunks, block_size, heads, kv_heads, head_dim, value_dim, window, span;
  long pieces;        // per decoding row
  long kv_share;      // KV heads of a task of it
  long chunk_tasks;
  float *partial;     // [num_decode][kv_heads][pieces][group][value_dim + 2]
  float scale, softcap;
} attention_call;

// Where the keys [start, start + count) of a row lie, as offsets into either cache for KV head 0.
INLINE void locate(const attention_call *call, long row, long start, long count, int64_t *offsets) {
  if (call->key_starts) {
    for (long i = 0; i < count; i++) offsets[i] = (call->key_starts[row] + start + i) * call->key_row;
    return;
  }
  const int32_t *table = call->block_tables + row * call->table_stride;
  long block = start / call->block_size, slot = start % call->block_size;
  for (long i = 0; i < count; i++) {
    offsets[i] = ((int64_t)table[block] * call->block_size + slot) * call->key_row;
    if (++slot == call->block_size) slot = 0, block++;
  }
}

// Decode -------------------------------------------------------------------------------------------------------

// Keys or values: where they lie, and where those lie that are asked for while these are read, line by line, so that asking
// never waits.
typedef struct {
  const float *now, *next;
  const int64_t *offsets, *next_offsets;
  long count;
} key_run;
INLINE key_run plain_run(const float *now, const int64_t *offsets, long count) {
  return (key_run){now, now, offsets, offsets, count};
}

// out [heads][4 vectors] += weights [heads][ldw] times values; `heads` and `vectors` are constants.
INLINE void add_values(const int heads, const int vectors, key_run run, const float *weights, long ldw, float *out, long ld) {
  vf sums[4][4];
  UNROLL for (int h = 0; h < heads; h++) UNROLL for (int v = 0; v < vectors; v++) sums[h][v] = v_load(out + h * ld + v * VL);
  for (long i = 0; i < run.count; i++) {
    vf value[4];
    UNROLL for (int v = 0; v < vectors; v++) value[v] = v_load(run.now + run.offsets[i] + v * VL);
    UNROLL for (int v = 0; v < vectors; v += 16 / VL) __builtin_prefetch(run.next + run.next_offsets[i] + v * VL, 0, 3);
    UNROLL for (int h = 0; h < heads; h++) {
      vf w = v_set(weights[h * ldw + i]);
      UNROLL for (int v = 0; v < vectors; v++) sums[h][v] = v_fma(w, value[v], sums[h][v]);
    }
  }
  UNROLL for (int h = 0; h < heads; h++) UNROLL for (int v = 0; v < vectors; v++) v_store(out + h * ld + v * VL, sums[h][v]);
}

static void add_all_values(long heads, long d, key_run run, const float *weights, long ldw, float *out, long ld) {
  long v = 0;
  for (; v + 4 * VL <= d; v += 4 * VL, run.now += 4 * VL, run.next += 4 * VL) {
    long h = 0;
    for (; h + 3 <= heads; h += 3) add_values(3, 4, run, weights + h * ldw, ldw, out + h * ld + v, ld);
    for (; h + 2 <= heads; h += 2) add_values(2, 4, run, weights + h * ldw, ldw, out + h * ld + v, ld);
    for (; h < heads; h++) add_values(1, 4, run, weights + h * ldw, ldw, out + h * ld + v, ld);
  }
  for (; v + VL <= d; v += VL, run.now += VL, run.next += VL)
    for (long h = 0; h < heads; h++) add_values(1, 1, run, weights + h * ldw, ldw, out + h * ld + v, ld);
  for (long h = 0; v < d && h < heads; h++) {
    vf sum = v_load_n(out + h * ld + v, d - v);
    for (long i = 0; i < run.count; i++)
      sum = v_fma(v_set(weights[h * ldw + i]), v_load_n(run.now + run.offsets[i], d - v), sum);
    v_store_n(out + h * ld + v, sum, d - v);
  }
}

// scores [heads][lds] = dot products of `heads` queries (a constant, a power of two) with the keys, and some more.
// A piece of a key that is read is multiplied with all of them.
INLINE void dot_keys(const int heads, long d, const float *q, long q_head, key_run run, float *scores, long lds) {
  const int width = VL / heads, pass = width < 8 ? width : 8;  // keys of a vector of sums, and those that are read together
  for (long i = 0; i < run.count; i += width) {
    vf sums[VL];
    UNROLL for (int u0 = 0; u0 < width; u0 += pass) {
      const float *key[8], *next[8];
      UNROLL for (int u = 0; u < pass; u++) {
        const long number = i + u0 + u < run.count ? i + u0 + u : run.count - 1;
        key[u] = run.now + run.offsets[number];
        next[u] = run.next + run.next_offsets[number];
        UNROLL for (int h = 0; h < heads; h++) sums[h * width + u0 + u] = v_set(0.0f);
      }
      for (long e = 0; e < d; e += VL) {
        const long n = d - e < VL ? d - e : VL;
        UNROLL for (int u = 0; u < pass; u++) {
          const vf part = n == VL ? v_load(key[u] + e) : v_load_n(key[u] + e, n);
          __builtin_prefetch(next[u] + e, 0, 3);
          UNROLL for (int h = 0; h < heads; h++) {
            const float *at = q + h * q_head + e;
            sums[h * width + u0 + u] = v_fma(n == VL ? v_load(at) : v_load_n(at, n), part, sums[h * width + u0 + u]);
          }
        }
      }
    }
    float found[VL];
    v_store(found, v_sums(sums));
    UNROLL for (int h = 0; h < heads; h++) memcpy(scores + h * lds + i, found + h * width, (size_t)width * 4);
  }
}

static void dot_all_keys(long heads, long d, const float *q, long q_head, key_run run, float *scores, long lds) {
  long h = 0;
  for (; h + 4 <= heads; h += 4) dot_keys(4, d, q + h * q_head, q_head, run, scores + h * lds, lds);
  for (; h + 2 <= heads; h += 2) dot_keys(2, d, q + h * q_head, q_head, run, scores + h * lds, lds);
  for (; h < heads; h++) dot_keys(1, d, q + h * q_head, q_head, run, scores + h * lds, lds);
}

#define LOG2_E 1.44269504088896341f  // scores are kept times this, so that a weight is a power of two

INLINE vf cap(vf score, float softcap) {
  return softcap > 0.0f ? v_mul(v_set(softcap * LOG2_E), v_tanh(v_div(score, v_set(softcap)))) : score;
}

// What to multiply dot products with: `cap` brings in the logarithm itself.
INLINE float score_factor(const attention_call *call) { return call->softcap > 0.0f ? call->scale : call->scale * LOG2_E; }

// The first key that a query at a position sees: inside the window, and inside its own span of positions.
INLINE long first_seen(const attention_call *call, long position) {
  const long first = call->window > 0 && position >= call->window ? position - call->window + 1 : 0;
  const long own = call->span > 0 ? position / call->span * call->span : 0;
  return own > first ? own : first;
}

// Keys [first, end) that a decoding row sees.
INLINE void decode_range(const attention_call *call, long row, long *first, long *end) {
  *end = call->seq_lens[row];
  *first = *end > 0 ? first_seen(call, *end - 1) : 0;
}

// The score of a head's sink; without one, below all scores.
INLINE float sink_score(const attention_call *call, long head) {
  return call->sinks ? fmaxf(call->sinks[head] * LOG2_E, -FLT_MAX) : -FLT_MAX;
}

// What decoding rows are cut into, and where the heads of a KV head put what a piece gives: [group][value_dim + 2].
INLINE long decode_parts(const attention_call *call) { return (call->kv_heads + call->kv_share - 1) / call->kv_share; }
INLINE float *partial_at(const attention_call *call, long row, long kv, long piece) {
  const long group = call->heads / call->kv_heads;
  return call->partial + ((row * call->kv_heads + kv) * call->pieces + piece) * group * (call->value_dim + 2);
}

// Merge the pieces of some KV heads of a row and write their heads.
static void merge_pieces(const attention_call *call, long row, long kv0, long kv1) {
  const long d = call->value_dim, group = call->heads / call->kv_heads, ld = d + 2;
  long first, end;
  decode_range(call, row, &first, &end);
  const long pieces = (end - first + PIECE_KEYS - 1) / PIECE_KEYS;
  for (long head = kv0 * group; head < kv1 * group; head++) {
    const float *partial = partial_at(call, row, head / group, 0) + head % group * ld;
    float *out = call->out + (row * call->heads + head) * d;
    const float sink = sink_score(call, head);
    float max = sink;
    for (long p = 0; p < pieces; p++) max = fmaxf(max, partial[p * group * ld + d]);
    float total = call->sinks ? exp2f(sink - max) : 0.0f;
    for (long e = 0; e < d; e += 8) _mm256_storeu_ps(out + e, _mm256_setzero_ps());
    for (long p = 0; p < pieces; p++) {
      const float *piece = partial + p * group * ld;
      const float weight = exp2f(piece[d] - max);
      total += weight * piece[d + 1];
      for (long e = 0; e < d; e += 8)
        _mm256_storeu_ps(out + e, _mm256_fmadd_ps(_mm256_loadu_ps(piece + e), _mm256_set1_ps(weight), _mm256_loadu_ps(out + e)));
    }
    const __m256 factor = _mm256_set1_ps(pieces ? 1.0f / total : 0.0f);
    for (long e = 0; e < d; e += 8) _mm256_storeu_ps(out + e, _mm256_mul_ps(_mm256_loadu_ps(out + e), factor));
  }
}

// Scores [count] -> weights, with their maximum and sum.
INLINE void weigh(const attention_call *call, float *scores, long count, float *max, float *sum) {
  vf top = v_set(-FLT_MAX), total = v_set(0.0f);
  for (long i = count; i % VL; i++) scores[i] = scores[count - 1];
  for (long i = 0; i < count; i += VL) {
    const vf score = cap(v_mul(v_load(scores + i), v_set(score_factor(call))), call->softcap);
    v_store(scores + i, score);
    top = v_max(score, top);
  }
  *max = v_max_of(top);
  for (long i = 0; i < count; i += VL) {
    const vf weight = v_exp2_down(v_sub(v_load(scores + i), v_set(*max)));
    v_store(scores + i, weight);
    total = v_add(total, count - i < VL ? v_load_n(scores + i, count - i) : weight);
  }
  *sum = v_sum(total);
}

// A run of keys of a decoding row, as some KV heads see it: first all of their keys, then all of their values, in steps of
// `keys` keys of one KV head.
typedef struct {
  const attention_call *call;
  int64_t offsets[PIECE_KEYS];
  long count, keys, kv0, kvs, steps;
} decode_run;

INLINE long step_start(const decode_run *run, long step) { return step % run->steps / run->kvs * run->keys; }
INLINE const float *step_at(const decode_run *run, long step) {
  const attention_call *call = run->call;
  return (step < run->steps ? call->k_cache : call->v_cache) + (run->kv0 + step % run->kvs) * call->kv_head;
}

// What a step reads, beside what is read DECODE_AHEAD steps later.
INLINE key_run step_run(const decode_run *run, long step) {
  const long start = step_start(run, step), left = run->count - start;
  const long later = step + DECODE_AHEAD < 2 * run->steps ? step + DECODE_AHEAD : step;
  return (key_run){step_at(run, step), step_at(run, later), run->offsets + start, run->offsets + step_start(run, later),
                   left < run->keys ? left : run->keys};
}

static void decode_task(const attention_call *call, long task) {
  static __thread scratch memory;
  const long pieces = call->pieces, parts = decode_parts(call), row = task / pieces / parts;
  const long d = call->head_dim, values = call->value_dim, group = call->heads / call->kv_heads, ld = values + 2;
  decode_run run = {.call = call, .kv0 = task / pieces % parts * call->kv_share};
  run.kvs = call->kv_heads - run.kv0 < call->kv_share ? call->kv_heads - run.kv0 : call->kv_share;
  long first, end;
  decode_range(call, row, &first, &end);
  first += task % pieces * PIECE_KEYS;
  if (first >= end) {
    if (pieces == 1) merge_pieces(call, row, run.kv0, run.kv0 + run.kvs);
    return;
  }
  run.count = end - first < PIECE_KEYS ? end - first : PIECE_KEYS;
  // About 4 KiB, which the first level keeps even of rows that lie 4 KiB apart; a query alone takes VL keys at a time.
  run.keys = group % 2 == 0 && d > 64 ? 8 : 16;
  run.steps = (run.count + run.keys - 1) / run.keys * run.kvs;
  locate(call, row, first, run.count, run.offsets);
  for (long i = run.count; i % run.keys; i++) run.offsets[i] = run.offsets[run.count - 1];
  float *scores = reserve(&memory, (size_t)(run.kvs * group * PIECE_KEYS) * 4);
  const float *q = call->q + row * call->q_token + run.kv0 * group * call->q_head;
  for (long step = 0; step < run.steps; step++) {
    const long head = step % run.kvs * group;
    dot_all_keys(group, d, q + head * call->q_head, call->q_head, step_run(&run, step),
                 scores + head * PIECE_KEYS + step_start(&run, step), PIECE_KEYS);
  }
  for (long h = 0; h < run.kvs * group; h++) {
    float *out = partial_at(call, row, run.kv0 + h / group, task % pieces) + h % group * ld;
    weigh(call, scores + h * PIECE_KEYS, run.count, out + values, out + values + 1);
    memset(out, 0, (size_t)values * 4);
  }
  for (long step = 0; step < run.steps; step++) {
    const long kv = step % run.kvs;
    add_all_values(group, values, step_run(&run, run.steps + step), scores + kv * group * PIECE_KEYS + step_start(&run, step),
                   PIECE_KEYS, partial_at(call, row, run.kv0 + kv, task % pieces), ld);
  }
  if (pieces == 1) merge_pieces(call, row, run.kv0, run.kv0 + run.kvs);
}

// Chunks -------------------------------------------------------------------------------------------------------

// scores [MAX_ROWS keys][PANEL] = keys times q [head_dim][PANEL].
INLINE void score_keys(const float *q, const float *keys, const int64_t *offsets, long d, float *scores) {
  vf sums[MAX_ROWS][3];
  const float *key[MAX_ROWS];
  UNROLL for (int r = 0; r < MAX_ROWS; r++) {
    key[r] = keys + offsets[r];
    UNROLL for (int v = 0; v < 3; v++) sums[r][v] = v_set(0.0f);
  }
  for (long e = 0; e < d; e++, q += PANEL) {
    vf w[3];
    UNROLL for (int v = 0; v < 3; v++) w[v] = v_load(q + v * VL);
    UNROLL for (int r = 0; r < MAX_ROWS; r++) {
      vf x = v_set(key[r][e]);
      UNROLL for (int v = 0; v < 3; v++) sums[r][v] = v_fma(x, w[v], sums[r][v]);
    }
  }
  UNROLL for (int r = 0; r < MAX_ROWS; r++) UNROLL for (int v = 0; v < 3; v++) v_store(scores + r * PANEL + v * VL, sums[r][v]);
}

// out [MAX_ROWS of head_dim][PANEL] = out * keep + values transposed times weights [count][PANEL].
INLINE void weigh_values(const float *weights, const float *values, const int64_t *offsets, long count, const float *keep,
                         float *out) {
  vf sums[MAX_ROWS][3];
  UNROLL for (int r = 0; r < MAX_ROWS; r++) UNROLL for (int v = 0; v < 3; v++)
      sums[r][v] = v_mul(v_load(out + r * PANEL + v * VL), v_load(keep + v * VL));
  for (long i = 0; i < count; i++, weights += PANEL) {
    const float *value = values + offsets[i];
    vf w[3];
    UNROLL for (int v = 0; v < 3; v++) w[v] = v_load(weights + v * VL);
    UNROLL for (int r = 0; r < MAX_ROWS; r++) {
      vf x = v_set(value[r]);
      UNROLL for (int v = 0; v < 3; v++) sums[r][v] = v_fma(x, w[v], sums[r][v]);
    }
  }
  UNROLL for (int r = 0; r < MAX_ROWS; r++) UNROLL for (int v = 0; v < 3; v++) v_store(out + r * PANEL + v * VL, sums[r][v]);
}

typedef struct {
  float q[MAX_HEAD_DIM * PANEL], out[MAX_HEAD_DIM * PANEL], scores[TILE_KEYS * PANEL];
  float max[PANEL], total[PANEL], keep[PANEL];
  int32_t position[PANEL], before[PANEL];  // of each lane, and the last position that it does not see any more
} chunk_state;

// Hide what each lane may not see, then turn scores into weights and move the running maximum and total.
INLINE void soften(const attention_call *call, chunk_state *s, long start, long count, const int masked, const float softcap) {
  for (int v = 0; v < 3; v++) {
    const vi position = vi_load(s->position + v * VL), before = vi_load(s->before + v * VL);
    const vf old = v_load(s->max + v * VL);
    vf max = old;
    for (long i = 0; i < count; i++) {
      float *at = s->scores + i * PANEL + v * VL;
      vf score = cap(v_load(at), softcap);
      if (masked) {
        const vi key = vi_set((int32_t)(start + i));
        score = v_select(vi_gt(key, position), v_set(-INFINITY), score);
        if (call->window > 0 || call->span > 0) score = v_select(vi_gt(key, before), score, v_set(-INFINITY));
      }
      if (masked || softcap > 0.0f) v_store(at, score);
      max = v_max(score, max);
    }
    vf total = v_set(0.0f);
    for (long i = 0; i < count; i++) {
      float *at = s->scores + i * PANEL + v * VL;
      vf weight = v_exp2_down(v_sub(v_load(at), max));
      total = v_add(total, weight);
      v_store(at, weight);
    }
    const vf keep = v_exp2_down(v_sub(old, max));
    v_store(s->max + v * VL, max);
    v_store(s->keep + v * VL, keep);
    v_store(s->total + v * VL, v_fma(v_load(s->total + v * VL), keep, total));
  }
}

// Where a query of a chunk is: the last key that it sees.
INLINE long position_of(const attention_call *call, long chunk, long query) {
  return call->key_starts ? call->key_starts[chunk + 1] - call->key_starts[chunk] - 1 : call->starts[chunk] + query;
}

static void chunk_task(const attention_call *call, long task) {
  static __thread scratch memory;
  chunk_state *s = reserve(&memory, sizeof(chunk_state));
  long chunk = 0;
  while (task >= call->first_task[chunk + 1]) chunk++;
  const long d = call->head_dim, values = call->value_dim, group = call->heads / call->kv_heads, row = call->num_decode + chunk;
  const long pairs = (call->ends[chunk] - call->starts[chunk]) * group, panels = (pairs + PANEL - 1) / PANEL;
  // Later queries see more keys: they go first, so that the threads finish together.
  const long local = task - call->first_task[chunk], kv = local % call->kv_heads, panel = panels - 1 - local / call->kv_heads;
  const long pair0 = panel * PANEL, lanes = pairs - pair0 < PANEL ? pairs - pair0 : PANEL;
  const long oldest = position_of(call, chunk, pair0 / group), newest = position_of(call, chunk, (pair0 + lanes - 1) / group);
  const float *q[PANEL];  // of each lane; lanes past the last pair repeat it
  float *out[PANEL];
  for (long l = 0; l < PANEL; l++) {
    const long pair = pair0 + (l < lanes ? l : lanes - 1), token = call->first_token[chunk] + pair / group;
    const long head = kv * group + pair % group;
    q[l] = call->q + token * call->q_token + head * call->q_head;
    out[l] = call->out + (token * call->heads + head) * values;
    s->position[l] = (int32_t)position_of(call, chunk, pair / group);
    s->before[l] = (int32_t)first_seen(call, s->position[l]) - 1;
    s->max[l] = sink_score(call, head);
    s->total[l] = call->sinks ? 1.0f : 0.0f;
  }
  const __m128 factor = _mm_set1_ps(score_factor(call));
  for (long l = 0; l < PANEL; l += 4)
    for (long e = 0; e < d; e += 4) {
      __m128 x[4];
      UNROLL for (int i = 0; i < 4; i++) x[i] = _mm_mul_ps(_mm_loadu_ps(q[l + i] + e), factor);
      _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
      UNROLL for (int i = 0; i < 4; i++) _mm_storeu_ps(s->q + (e + i) * PANEL + l, x[i]);
    }
  memset(s->out, 0, (size_t)(values * PANEL) * 4);
  const long last_first = first_seen(call, newest);
  for (long start = first_seen(call, oldest); start <= newest; start += TILE_KEYS) {
    int64_t offsets[TILE_KEYS + MAX_ROWS];
    const long count = newest + 1 - start < TILE_KEYS ? newest + 1 - start : TILE_KEYS;
    locate(call, row, start, count, offsets);
    for (long i = count; i % MAX_ROWS; i++) offsets[i] = offsets[count - 1];
    for (long i = 0; i < count; i += MAX_ROWS)
      score_keys(s->q, call->k_cache + kv * call->kv_head, offsets + i, d, s->scores + i * PANEL);
    const int masked = start + count - 1 > oldest || start < last_first;
    if (call->softcap > 0.0f)
      soften(call, s, start, count, 1, call->softcap);
    else if (masked)
      soften(call, s, start, count, 1, 0.0f);
    else
      soften(call, s, start, count, 0, 0.0f);
    for (long e = 0; e < values; e += MAX_ROWS)
      weigh_values(s->scores, call->v_cache + kv * call->kv_head + e, offsets, count, s->keep, s->out + e * PANEL);
  }
  for (long l = 0; l < lanes; l += 4) {
    const __m128 share = _mm_div_ps(_mm_set1_ps(1.0f), _mm_loadu_ps(s->total + l));
    for (long e = 0; e < values; e += 4) {
      __m128 x[4];
      UNROLL for (int i = 0; i < 4; i++) x[i] = _mm_mul_ps(_mm_loadu_ps(s->out + (e + i) * PANEL + l), share);
      _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
      // Lanes past the last pair write to its place what it writes.
      UNROLL for (int i = 0; i < 4; i++) _mm_storeu_ps(out[l + i] + e, x[i]);
    }
  }
}

static void attention_body(void *context) {
  attention_call *call = context;
  const long decode_tasks = call->num_decode * decode_parts(call) * call->pieces;
  for (long t; (t = claim(&call->all)) < call->chunk_tasks + decode_tasks;) {
    if (t < call->chunk_tasks)
      chunk_task(call, t);
    else
      decode_task(call, t - call->chunk_tasks);
  }
}

// Returns -1 when a row names no block of the cache; nothing is written then.
static int run_attention(attention_call call, long max_blocks, int threads) {
  static __thread scratch partial_memory, chunk_memory;
  const long group = call.heads / call.kv_heads, rows = call.num_decode + call.num_chunks;
  long keys = 0, longest = 0;
  if (!call.key_starts) call.key_row = call.kv_heads * call.head_dim, call.kv_head = call.head_dim;
  for (long row = 0; row < rows && !call.key_starts; row++) {
    const long end = row < call.num_decode ? call.seq_lens[row] : call.ends[row - call.num_decode];
    const long used = (end + call.block_size - 1) / call.block_size;
    if (end < 0 || used > max_blocks) return -1;
    for (long b = 0; b < used; b++) {
      const int32_t id = call.block_tables[row * call.table_stride + b];
      if (id < 0 || id >= call.blocks) return -1;
    }
    if (row < call.num_decode) {
      keys += end;
      if (end > longest) longest = end;
    }
  }
  if (call.window > 0 && longest > call.window) longest = call.window;
  if (call.span > 0 && longest > call.span) longest = call.span;
  call.pieces = (longest + PIECE_KEYS - 1) / PIECE_KEYS;
  int64_t *first = reserve(&chunk_memory, (size_t)(2 * call.num_chunks + 2) * 8);
  int64_t *token = first + call.num_chunks + 1;
  first[0] = 0;
  token[0] = call.num_decode;
  for (long c = 0; c < call.num_chunks; c++) {
    const long count = call.ends[c] - call.starts[c];
    first[c + 1] = first[c] + (count * group + PANEL - 1) / PANEL * call.kv_heads;
    token[c + 1] = token[c] + count;
  }
  call.first_task = first;
  call.first_token = token;
  call.chunk_tasks = first[call.num_chunks];
  call.partial = reserve(&partial_memory, (size_t)(call.num_decode * call.pieces * call.heads * (call.value_dim + 2) + VL) * 4);
  if (!call.num_chunks && keys * call.heads * call.head_dim < 1 << 16) threads = 1;
  // As many KV heads together as leave two tasks for each thread.
  const long parts = call.num_decode * call.pieces ? (2 * threads - 1) / (call.num_decode * call.pieces) + 1 : 1;
  call.kv_share = parts < call.kv_heads ? call.kv_heads / parts : 1;
  run_team(attention_body, &call, call.chunk_tasks + call.num_decode * decode_parts(&call) * call.pieces, threads);
  for (long row = 0; row < call.num_decode && call.pieces != 1; row++) merge_pieces(&call, row, 0, call.kv_heads);
  return 0;
}

// `starts` and `ends` are the positions of each chunk, `window`, `span` and `softcap` 0 where there is none.
int tgi_attention(const float *q, long q_token, long q_head, const float *k_cache, const float *v_cache, long blocks,
                  long block_size, const int32_t *block_tables, long table_stride, long max_blocks, const int32_t *seq_lens,
                  long num_decode, long num_chunks, const int64_t *starts, const int64_t *ends, long heads, long kv_heads,
                  long head_dim, float scale, long window, long span, float softcap, const float *sinks, float *out,
                  int threads) {
  const attention_call call = {
      .q = q, .k_cache = k_cache, .v_cache = v_cache, .out = out, .block_tables = block_tables, .seq_lens = seq_lens,
      .num_decode = num_decode, .num_chunks = num_chunks, .heads = heads, .kv_heads = kv_heads, .head_dim = head_dim,
      .value_dim = head_dim, .blocks = blocks, .block_size = block_size, .window = window, .span = span,
      .sinks = sinks, .q_token = q_token, .q_head = q_head, .table_stride = table_stride, .starts = starts, .ends = ends,
      .scale = scale, .softcap = softcap};
  return run_attention(call, max_blocks, threads);
}

// Rows [starts[i], starts[i + 1]) attend to all of [key_starts[i], key_starts[i + 1]), for each of `runs`.
void tgi_segment_attention(const float *q, long q_row, long q_head, const float *k, const float *v, long key_row, long kv_head,
                           long runs, const int64_t *starts, const int64_t *key_starts, long heads, long kv_heads,
                           long head_dim, float scale, float *out, int threads) {
  const attention_call call = {
      .q = q, .k_cache = k, .v_cache = v, .out = out, .num_chunks = runs, .heads = heads, .kv_heads = kv_heads,
      .head_dim = head_dim, .value_dim = head_dim, .q_token = q_row, .q_head = q_head, .key_row = key_row,
      .kv_head = kv_head, .starts = starts, .ends = starts + 1, .key_starts = key_starts, .scale = scale};
  run_attention(call, 0, threads);
}

#endif
