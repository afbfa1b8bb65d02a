// Puts the page together: the stream feeds the history, the history is drawn once for each event.

import { Distribution, LineChart } from "./charts.js";
import { History, joined, quantile } from "./history.js";
import { Stream, keepKey, readKey } from "./stream.js";
import { showEngines, showErrors, showRunning, showSlow } from "./tables.js";
import { bytes, count, duration, share } from "./units.js";

const $ = (id) => document.getElementById(id);
const history = new History();
const WINDOWS = [60, 120, 300, 600, 900];
const MOST_ROWS = 10;
const MOST_ERRORS = 50;
let seconds = 300;
let charts = [];
let slow = [];
let errors = [];
let latest = null;
let paused = false;

// -- numbers of now ---------------------------------------------------------------------------------------------------

const TILES = [
  ["running", "Running", "requests in the batch"],
  ["waiting", "Waiting", "requests in the queue"],
  ["out", "Tokens/s out", "mean of the last 5 s"],
  ["in", "Tokens/s in", "prompts, cached included"],
  ["first", "First token", ""],
  ["between", "Between tokens", ""],
  ["kv", "KV cache", ""],
  ["hits", "Prefix hits", "of prompt tokens"],
  ["memory", "Device memory", ""],
  ["errors", "Errors", "of the time shown"],
];

function buildTiles() {
  $("now").replaceChildren(...TILES.map(([id, words, about]) => {
    const tile = document.createElement("div");
    tile.className = "tile card";
    const name = document.createElement("h2");
    name.textContent = words;
    const value = document.createElement("p");
    value.className = "value";
    value.id = `tile-${id}`;
    value.textContent = "–";
    const note = document.createElement("p");
    note.className = "soft small";
    note.id = `note-${id}`;
    note.textContent = about;
    tile.append(name, value, note);
    return tile;
  }));
}

function put(id, value, note = null, alarm = "") {
  const shown = $(`tile-${id}`);
  if (shown.textContent !== value) shown.textContent = value;
  shown.classList.toggle("bad", alarm === "bad");
  shown.classList.toggle("warn", alarm === "warn");
  if (note !== null && $(`note-${id}`).textContent !== note) $(`note-${id}`).textContent = note;
}

const mean = (points, value) => {
  const time = points.reduce((total, point) => total + point.seconds, 0);
  return time ? points.reduce((total, point) => total + value(point) * point.seconds, 0) / time : 0;
};

function showNow(sample, points) {
  const now = points.at(-1);
  const recent = points.filter((point) => now.at - point.at < 5);
  const bounds = history.start.bounds;
  const numbers = sample.numbers;
  put("running", count(now.running), `${count(now.inFlight)} of ${count(history.start.max_concurrent_requests)} admitted`);
  put("waiting", count(now.waiting), now.waiting ? `${count(numbers.tgi_queue_tokens ?? 0)} prompt tokens` : "requests in the queue", now.waiting ? "warn" : "");
  put("out", count(mean(recent, (point) => point.tokensOut)));
  put("in", count(mean(recent, (point) => point.tokensIn)));
  for (const [id, name] of [["first", "tgi_time_to_first_token_duration"], ["between", "tgi_inter_token_duration"]]) {
    const counts = joined(points, name);
    put(id, duration(quantile(counts, bounds, 0.5)), `p95 ${duration(quantile(counts, bounds, 0.95))} · p99 ${duration(quantile(counts, bounds, 0.99))}`);
  }
  const blocks = numbers.tgi_kv_block_tokens ?? 0;
  put("kv", share(now.kv), `${count((numbers.tgi_kv_blocks_used ?? 0) * blocks)} of ${count((numbers.tgi_kv_blocks_total ?? 0) * blocks)} tokens`, now.kv > 0.95 ? "bad" : now.kv > 0.85 ? "warn" : "");
  const prompt = points.reduce((total, point) => total + point.prompt, 0);
  put("hits", prompt ? share(points.reduce((total, point) => total + point.cached, 0) / prompt) : "–");
  const total = Object.entries(numbers).filter(([name]) => name.startsWith("tgi_device_memory_limit_bytes")).reduce((sum, [, value]) => sum + value, 0);
  put("memory", bytes(now.memory), total ? `${share(now.memory / total)} of ${bytes(total)}` : "");
  const failed = points.reduce((sum, point) => sum + point.failed, 0);
  const preempted = points.reduce((sum, point) => sum + point.preemptions, 0);
  put("errors", count(failed), `${count(preempted)} preemptions, ${count(numbers.tgi_engine_restarts ?? 0)} restarts`, failed ? "bad" : "");
}

// -- charts -----------------------------------------------------------------------------------------------------------

function buildCharts(bounds) {
  const line = (title, about, format, series, more = {}) => new LineChart({ title, about, format, series, ...more });
  const failure = (...kinds) => (point) => kinds.reduce((sum, kind) => sum + (point.failures[kind] ?? 0), 0);
  charts = [
    line("Requests", "running and waiting over time", count, [
      { name: "series-1", words: "running", value: (point) => point.running },
      { name: "series-2", words: "waiting", value: (point) => point.waiting },
    ], { least: 4 }),
    line("Tokens per second", "generated and prompt tokens per second over time", count, [
      { name: "series-1", words: "out", value: (point) => point.tokensOut },
      { name: "series-2", words: "in", value: (point) => point.tokensIn },
    ], { least: 10 }),
    new Distribution({ title: "Time to first token", about: "its distribution over time with percentiles", metric: "tgi_time_to_first_token_duration", bounds }),
    new Distribution({ title: "Time between tokens", about: "its distribution over time with percentiles", metric: "tgi_inter_token_duration", bounds }),
    line("KV cache and prefix hits", "share of the cache in use and of prompt tokens found in it", share, [
      { name: "series-1", words: "in use", value: (point) => point.kv },
      { name: "series-3", words: "prefix hits", value: (point) => (point.prompt ? point.cached / point.prompt : null) },
    ], { most: 1 }),
    line("Step time", "mean time of a step by what it goes to", duration, [
      { name: "series-1", words: "device", value: (point) => point.stepForward },
      { name: "series-2", words: "taking results", value: (point) => point.stepTake },
      { name: "series-3", words: "sending tokens", value: (point) => point.stepSend },
    ], { stacked: true, least: 0.001 }),
    line("Tokens in a step", "mean number of tokens that a step computes, by kind", count, [
      { name: "series-1", words: "decode", value: (point) => point.batchDecode },
      { name: "series-2", words: "prompt", value: (point) => point.batchPrefill },
    ], { stacked: true, least: 4 }),
    line("Device memory", "memory in use on the devices", (value) => (value ? bytes(value) : "0"), [
      { name: "series-5", words: "in use", value: (point) => point.memory },
    ], { least: 1e8 }),
    line("Errors and preemptions", "errors by kind and preemptions each second", count, [
      { name: "series-4", words: "refused or invalid", value: failure("validation", "overloaded", "template") },
      { name: "series-1", words: "failed", value: failure("generation", "incomplete", "timeout", "slow_client") },
      { name: "series-5", words: "client left", value: failure("dropped") },
      { name: "series-2", words: "preempted", value: (point) => point.preemptions },
    ], { stacked: true, least: 4 }),
  ];
  $("charts").replaceChildren(...charts.map((chart) => chart.figure));
}

// -- drawing ----------------------------------------------------------------------------------------------------------

let due = false;
function draw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const points = history.since(seconds);
    if (!points.length || !latest) return;
    const to = points.at(-1).at;
    showNow(latest, points);
    const age = to - points[0].at;
    const window = Math.min(seconds, WINDOWS.find((wide) => wide >= age) ?? seconds);  // a young page is not mostly empty
    for (const chart of charts) chart.show(points, to, window);
    showRunning($("running"), latest.running);
    slow = slow.filter((request) => request.at >= to - 900);
    showSlow($("slow"), slow.filter((request) => request.at >= to - seconds).slice(0, MOST_ROWS));
    showErrors($("errors"), errors.slice(0, MOST_ROWS));
    showEngines($("engines"), latest, history.start);
  });
}

function take(event) {
  if (event.type === "start") {
    if (!charts.length) buildCharts(event.bounds);
    history.begin(event);
    $("model").textContent = event.model;
    document.title = `${event.model} – dashboard`;
    const ranks = event.ranks > 1 ? `, ${event.ranks} ranks` : "";
    $("about").textContent = `version ${event.version}, up to ${count(event.max_total_tokens)} tokens${ranks}`;
  } else if (event.type === "sample") {
    latest = event;
    history.add(event);
    slow = [...slow, ...event.ended.map((request) => ({ ...request, at: event.at }))].sort((a, b) => b.total - a.total).slice(0, 200);
    errors = [...event.errors.toReversed(), ...errors].slice(0, MOST_ERRORS);
    draw();
  }
}

function state(name, text) {
  $("state").dataset.state = name;
  if ($("state-text").textContent !== text) $("state-text").textContent = text;
  $("key-form").hidden = name !== "locked";
  if (name === "locked") {
    $("key-error").textContent = readKey() ? "That key was not accepted." : "";
    $("key").focus();
  }
}

const stream = new Stream("dashboard/events", {
  event: (event) => {
    state("live", "Live");
    take(event);
  },
  state,
});

// -- what people do ---------------------------------------------------------------------------------------------------

function listen() {
  if (paused || document.hidden) stream.close();
  else stream.open();
  if (paused) state("off", "Paused");
}

function choose(wanted) {
  seconds = wanted;
  for (const button of document.querySelectorAll("button.span")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.seconds) === wanted));
  }
  draw();
}

function pause() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
  listen();
}

const THEMES = ["auto", "light", "dark"];
function nextTheme() {
  window.theme.set(THEMES[(THEMES.indexOf(window.theme.get()) + 1) % THEMES.length]);
  showTheme();
  draw();
}
const showTheme = () => ($("theme").textContent = `Theme: ${window.theme.get()}`);

for (const button of document.querySelectorAll("button.span")) button.addEventListener("click", () => choose(Number(button.dataset.seconds)));
$("pause").addEventListener("click", pause);
$("theme").addEventListener("click", nextTheme);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey($("key").value);
  $("key").value = "";
  stream.open();
});
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = { 1: () => choose(60), 5: () => choose(300), 9: () => choose(900), p: pause, t: nextTheme }[event.key.toLowerCase()];
  if (action) action();
});
document.addEventListener("visibilitychange", listen);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(draw).observe($("charts"));

buildTiles();
showTheme();
listen();
