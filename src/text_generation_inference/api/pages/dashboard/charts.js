// The three kinds of charts: lines, stacked areas, and a distribution over time with its percentiles.

import { Plot, niceStep } from "./canvas.js";
import { joined, quantile } from "./history.js";
import { duration } from "./units.js";

const GAP_S = 4;  // without samples for so long there is no line

function runs(points, value) {
  const found = [];
  let run = [];
  for (const [place, point] of points.entries()) {
    const y = value(point);
    const apart = place && point.at - points[place - 1].at > GAP_S;
    if (apart || y === null) {
      if (run.length) found.push(run);
      run = [];
    }
    if (y !== null) run.push([point.at, y]);
  }
  if (run.length) found.push(run);
  return found;
}

function trace(pen, run, x, y) {
  pen.beginPath();
  run.forEach(([at, value], place) => (place ? pen.lineTo(x(at), y(value)) : pen.moveTo(x(at), y(value))));
  if (run.length === 1) pen.lineTo(x(run[0][0]) + 1, y(run[0][1]));
}

// series: [{name, words, value(point)}]; format of values; least: the smallest top of the axis.
export class LineChart extends Plot {
  constructor({ series, format, least = 1, most = null, stacked = false, ...rest }) {
    super(rest);
    Object.assign(this, { series, format, least, most, stacked });
  }

  draw(pen, area, x, colour) {
    const total = (point) => this.series.reduce((sum, each) => sum + (each.value(point) ?? 0), 0);
    let top = this.least;
    for (const point of this.points) {
      top = Math.max(top, this.stacked ? total(point) : Math.max(...this.series.map((each) => each.value(point) ?? 0)));
    }
    const step = this.most ? this.most / 4 : niceStep(top);
    top = this.most ?? Math.ceil(top / step) * step;
    const y = (value) => area.top + area.height * (1 - value / top);
    const ticks = [];
    for (let value = 0; value <= top * 1.001; value += step) ticks.push([y(value), this.format(value)]);
    this.grid(pen, area, colour, ticks);
    if (this.stacked) this.#stack(pen, x, y, colour);
    else this.#lines(pen, x, y, colour);
    const last = this.points.at(-1);
    this.say(this.series.map((each) => [each.name, each.words, last ? this.format(each.value(last)) : "–"]));
  }

  #lines(pen, x, y, colour) {
    pen.lineJoin = "round";
    for (const [place, each] of this.series.entries()) {
      pen.strokeStyle = pen.fillStyle = colour.series(each.name);
      for (const run of runs(this.points, each.value)) {
        if (place === 0) {
          trace(pen, run, x, y);
          pen.lineTo(x(run.at(-1)[0]), y(0));
          pen.lineTo(x(run[0][0]), y(0));
          pen.globalAlpha = 0.14;
          pen.fill();
          pen.globalAlpha = 1;
        }
        pen.lineWidth = 1.75;
        trace(pen, run, x, y);
        pen.stroke();
      }
    }
  }

  #stack(pen, x, y, colour) {
    const below = new Map();
    for (const each of this.series) {
      pen.fillStyle = colour.series(each.name);
      for (const run of runs(this.points, each.value)) {
        const lower = run.map(([at]) => [at, below.get(at) ?? 0]);
        const upper = run.map(([at, value]) => [at, (below.get(at) ?? 0) + value]);
        trace(pen, upper, x, y);
        for (const [at, value] of lower.reverse()) pen.lineTo(x(at), y(value));
        pen.globalAlpha = 0.75;
        pen.fill();
        pen.globalAlpha = 1;
        for (const [at, value] of upper) below.set(at, value);
      }
    }
  }

  read(point) {
    return this.series.map((each) => `${each.words} ${this.format(each.value(point))}`).join(", ");
  }
}

const CELL_PX = 6;
const TICKS = [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100];
const DECADES = new Set([1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100]);
const tickWords = (seconds) => (seconds < 1e-3 ? `${+(seconds * 1e6).toFixed(0)} µs` : seconds < 1 ? `${+(seconds * 1e3).toFixed(0)} ms` : `${seconds} s`);
const SHARES = [["series-3", "p50", 0.5], ["series-2", "p95", 0.95], ["series-4", "p99", 0.99]];

// A heat map of a histogram, time to the right, seconds upwards on a logarithmic scale, with percentiles over it.
export class Distribution extends Plot {
  constructor({ metric, bounds, ...rest }) {
    super(rest);
    Object.assign(this, { metric, bounds });
  }

  #columns(area) {
    const number = Math.max(8, Math.min(Math.floor(area.width / CELL_PX), Math.round(this.to - this.from)));
    const seconds = (this.to - this.from) / number;
    const columns = Array.from({ length: number }, (_, place) => ({ from: this.from + place * seconds, seconds, points: [] }));
    for (const point of this.points) {
      const place = Math.floor((point.at - this.from) / seconds - 1e-9);
      if (columns[place]) columns[place].points.push(point);
    }
    return columns.map((column) => ({ ...column, counts: joined(column.points, this.metric) }));
  }

  draw(pen, area, x, colour) {
    const columns = this.#columns(area);
    const all = joined(this.points, this.metric);
    let low = all.findIndex((count) => count);
    let high = all.findLastIndex((count) => count);
    if (low < 0) [low, high] = [13, 21];
    low = Math.max(0, low - 1);
    high = Math.min(all.length ? all.length - 1 : 35, Math.max(high + 1, low + 8));
    const cell = area.height / (high - low + 1);
    const y = (bucket) => area.top + area.height - (bucket - low) * cell;  // the lower edge of a bucket
    const place = (seconds) => {
      let bucket = this.bounds.findIndex((bound) => seconds <= bound);
      if (bucket < 0) bucket = this.bounds.length;
      const floor = bucket ? this.bounds[bucket - 1] : this.bounds[0] / 1.5;
      const ceiling = this.bounds[bucket] ?? floor * 1.5;
      return y(bucket) - cell * Math.max(0, Math.min(1, Math.log(seconds / floor) / Math.log(ceiling / floor)));
    };
    const peak = Math.max(1, ...columns.flatMap((column) => column.counts));
    pen.fillStyle = colour.heat;
    for (const column of columns) {
      const left = x(column.from);
      const right = x(column.from + column.seconds);
      for (let bucket = low; bucket <= high; bucket += 1) {
        const count = column.counts[bucket];
        if (!count) continue;
        pen.globalAlpha = 0.14 + 0.6 * Math.sqrt(count / peak);
        pen.fillRect(left, y(bucket) - cell, Math.max(1, right - left - 0.5), Math.max(1, cell - 0.5));
      }
    }
    pen.globalAlpha = 1;
    const least = low ? this.bounds[low - 1] : this.bounds[0] / 1.5;
    const most = this.bounds[Math.min(high, this.bounds.length - 1)];
    const few = Math.log10(most / least) > 2.5;
    const shown = TICKS.filter((seconds) => seconds >= least && seconds <= most && (!few || DECADES.has(seconds)));
    this.grid(pen, area, colour, shown.map((seconds) => [place(seconds), tickWords(seconds)]));
    this.#percentiles(pen, columns, x, place, colour);
    this.say(SHARES.map(([name, words, part]) => [name, words, duration(quantile(all, this.bounds, part))]));
  }

  #percentiles(pen, columns, x, place, colour) {
    const filled = columns.filter((column) => column.counts.some((count) => count));
    for (const [name, , part] of SHARES) {
      pen.strokeStyle = colour.series(name);
      pen.lineWidth = 2;
      pen.lineJoin = "round";
      pen.beginPath();
      let before = null;
      for (const column of filled) {
        const at = x(column.from + column.seconds / 2);
        const level = place(quantile(column.counts, this.bounds, part));
        const apart = before === null || column.from - before > Math.max(15, column.seconds * 2.5);
        if (apart) pen.moveTo(at - 1, level);
        pen.lineTo(at, level);
        before = column.from;
      }
      pen.stroke();
    }
  }

  read(point) {
    const near = this.points.filter((each) => Math.abs(each.at - point.at) <= 5);
    const counts = joined(near, this.metric);
    const number = counts.reduce((sum, count) => sum + count, 0);
    if (!number) return "nothing within 5 s";
    return `${SHARES.map(([, words, part]) => `${words} ${duration(quantile(counts, this.bounds, part))}`).join(", ")} (${number} within 5 s)`;
  }
}
