// The samples of the last minutes, and what follows from them: rates between two samples, shares, quantiles of buckets.

export const MOST_SECONDS = 900;

const difference = (now, before) => (before === undefined ? 0 : now >= before ? now - before : now);  // a counter that starts again

export class History {
  constructor() {
    this.start = null;
    this.samples = [];  // oldest first
    this.points = [];  // the same, derived: what charts draw
  }

  begin(start) {
    this.start = start;
    this.last = null;
  }

  add(sample) {
    const last = this.last;
    this.last = sample;
    const seconds = last ? sample.at - last.at : 0;
    if (!last || seconds <= 0) return null;
    const point = derive(sample, last, seconds);
    this.points.push(point);
    const oldest = sample.at - MOST_SECONDS;
    while (this.points.length && this.points[0].at < oldest) this.points.shift();
    return point;
  }

  since(seconds) {
    if (!this.points.length) return [];
    const from = this.points.at(-1).at - seconds;
    let low = 0;
    let high = this.points.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.points[middle].at < from) low = middle + 1;
      else high = middle;
    }
    return this.points.slice(low);
  }
}

const labelled = (numbers, name, label, value) => numbers[`${name}{${label}="${value}"}`] ?? 0;

export function byLabel(numbers, name, label) {
  const found = {};
  const begin = `${name}{`;
  for (const [key, value] of Object.entries(numbers)) {
    if (key.startsWith(begin)) {
      const match = new RegExp(`[{,]${label}="([^"]*)"`).exec(key);
      if (match) found[match[1]] = (found[match[1]] ?? 0) + value;
    }
  }
  return found;
}

function derive(sample, last, seconds) {
  const now = sample.numbers;
  const before = last.numbers;
  const grown = (name) => difference(now[name] ?? 0, before[name] ?? 0);
  const grownOf = (name, method) => difference(labelled(now, name, "method", method), labelled(before, name, "method", method));
  const counts = {};
  for (const [name, buckets] of Object.entries(sample.counts)) {
    counts[name] = buckets.map((count, place) => difference(count, last.counts[name]?.[place]));
  }
  const sum = (list) => list.reduce((total, count) => total + count, 0);
  const firsts = sum(counts.tgi_time_to_first_token_duration);
  const between = sum(counts.tgi_inter_token_duration);
  const steps = grownOf("tgi_batch_inference_count", "prefill") + grownOf("tgi_batch_inference_count", "decode");
  const split = {};
  for (const part of ["forward", "decode", "filter", "inference"]) {
    const name = `tgi_batch_${part}_duration_sum`;
    split[part] = grownOf(name, "prefill") + grownOf(name, "decode");
  }
  const prompt = grown("tgi_prompt_tokens");
  const failuresNow = byLabel(now, "tgi_request_failure", "err");
  const failuresBefore = byLabel(before, "tgi_request_failure", "err");
  const failures = {};
  for (const [kind, count] of Object.entries(failuresNow)) {
    const more = difference(count, failuresBefore[kind] ?? 0);
    if (more) failures[kind] = more;
  }
  return {
    at: sample.at,
    seconds,
    running: now.tgi_batch_current_size ?? 0,
    waiting: now.tgi_queue_size ?? 0,
    inFlight: now.tgi_requests_in_flight ?? 0,
    tokensOut: (firsts + between) / seconds,
    tokensIn: prompt / seconds,
    requests: grown("tgi_request_success") / seconds,
    firsts,
    counts,
    kv: now.tgi_kv_usage_ratio ?? 0,
    prompt,
    cached: grown("tgi_cached_prompt_tokens"),
    preemptions: grown("tgi_preemptions"),
    steps,
    stepForward: steps ? split.forward / steps : null,
    stepTake: steps ? split.decode / steps : null,
    stepSend: steps ? split.filter / steps : null,
    stepPrefill: grownOf("tgi_batch_inference_count", "prefill"),
    batchPrefill: steps ? grownOf("tgi_batch_tokens", "prefill") / steps : null,
    batchDecode: steps ? grownOf("tgi_batch_tokens", "decode") / steps : null,
    memory: Object.values(byLabel(now, "tgi_device_memory_used_bytes", "replica")).reduce((a, b) => a + b, 0),
    failures,
    failed: Object.values(failures).reduce((a, b) => a + b, 0),
    lag: grown("tgi_api_loop_lag_seconds_count") ? grown("tgi_api_loop_lag_seconds_sum") / grown("tgi_api_loop_lag_seconds_count") : 0,
  };
}

// The counts of several points together.
export function joined(points, name) {
  let all = null;
  for (const point of points) {
    const counts = point.counts[name];
    all = all ? all.map((count, place) => count + counts[place]) : counts.slice();
  }
  return all ?? [];
}

// Linear inside a bucket, as Prometheus does it; null where nothing was counted.
export function quantile(counts, bounds, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let rest = share * total;
  for (let place = 0; place < counts.length; place += 1) {
    if (rest <= counts[place] && counts[place]) {
      const low = place ? bounds[place - 1] : 0;
      const high = place < bounds.length ? bounds[place] : bounds.at(-1);
      return low + (high - low) * (rest / counts[place]);
    }
    rest -= counts[place];
  }
  return bounds.at(-1);
}
