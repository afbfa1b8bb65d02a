// Tables of requests, errors and engines. Whatever comes from requests is text, never markup.

import { byLabel } from "./history.js";
import { bytes, clock, count, duration, share } from "./units.js";

const PARTS = [["v", "checked"], ["q", "queued"], ["p", "prompt"], ["d", "tokens"]];

function cell(content, name = "") {
  const made = document.createElement("td");
  if (content instanceof Node) made.append(content);
  else made.textContent = content;
  if (name) made.className = name;
  return made;
}

// rows: lists of cells. An empty table says so.
function fill(table, heads, rows, empty) {
  const head = document.createElement("tr");
  for (const [words, name] of heads) {
    const made = document.createElement("th");
    made.scope = "col";
    made.textContent = words;
    if (name) made.className = name;
    head.append(made);
  }
  const top = document.createElement("thead");
  top.append(head);
  const body = document.createElement("tbody");
  if (rows.length) {
    body.append(...rows.map((cells) => {
      const row = document.createElement("tr");
      row.append(...cells);
      return row;
    }));
  } else {
    const none = cell(empty, "soft");
    none.colSpan = heads.length;
    const row = document.createElement("tr");
    row.append(none);
    body.append(row);
  }
  table.replaceChildren(top, body);
}

// Seconds of each part; of one that still runs the last part goes on.
function partsOf(request) {
  const { validated, admitted, first_token: first, total } = request;
  const ends = [Math.min(validated, total), admitted ?? total, first ?? total, total];
  let before = 0;
  return ends.map((end) => {
    const seconds = Math.max(0, Math.min(end, total) - before);
    before = Math.max(before, Math.min(end, total));
    return seconds;
  });
}

function timeline(request, longest) {
  const parts = partsOf(request);
  const bar = document.createElement("span");
  bar.className = "bar";
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", PARTS.map(([, words], place) => `${words} ${duration(parts[place])}`).join(", "));
  bar.title = bar.getAttribute("aria-label");
  PARTS.forEach(([name], place) => {
    const part = document.createElement("i");
    part.className = name;
    part.style.width = `${(100 * parts[place]) / (longest || 1)}%`;
    bar.append(part);
  });
  return bar;
}

const REQUEST_HEADS = [["Total", "number"], ["Timeline", "line"], ["First token", "number"], ["In", "number"], ["Cached", "number"], ["Out", "number"]];

function requestCells(request, longest) {
  return [
    cell(duration(request.total), "number strong"),
    cell(timeline(request, longest), "line"),
    cell(duration(request.first_token), "number"),
    cell(count(request.prompt_tokens), "number"),
    cell(request.cached_tokens === null ? "–" : count(request.cached_tokens), "number"),
    cell(count(request.output_tokens), "number"),
  ];
}

export function showRunning(table, requests) {
  const longest = Math.max(...requests.map((request) => request.total), 0);
  const rows = requests.map((request) => [
    ...requestCells(request, longest),
    cell(request.first_token === null ? "no token yet" : "writes", "whole"),
  ]);
  fill(table, [...REQUEST_HEADS, ["State", ""]], rows, "Nothing runs");
}

export function showSlow(table, requests) {
  const longest = Math.max(...requests.map((request) => request.total), 0);
  const rows = requests.map((request) => {
    const id = document.createElement("code");
    id.textContent = request.request_id.length > 14 ? `${request.request_id.slice(0, 13)}…` : request.request_id;
    id.title = request.request_id;
    return [...requestCells(request, longest), cell(request.end), cell(request.route, "route"), cell(id), cell(clock(request.at), "number")];
  });
  fill(table, [...REQUEST_HEADS, ["Ended by", ""], ["Route", ""], ["Request", ""], ["At", "number"]], rows, "No request has ended yet");
}

export function showErrors(table, errors) {
  const rows = errors.map((error) => {
    const id = document.createElement("code");
    id.textContent = error.request_id.length > 14 ? `${error.request_id.slice(0, 13)}…` : error.request_id;
    id.title = error.request_id;
    return [cell(clock(error.at), "number"), cell(error.kind), cell(error.status ? String(error.status) : "–", "number"), cell(error.route, "route"), cell(id)];
  });
  fill(table, [["At", "number"], ["Kind", ""], ["Status", "number"], ["Route", ""], ["Request", ""]], rows, "None since this page was opened");
}

export function showEngines(table, sample, start) {
  const numbers = sample.numbers;
  const several = sample.engines.length > 1;
  const used = byLabel(numbers, "tgi_device_memory_used_bytes", "replica");
  const total = byLabel(numbers, "tgi_device_memory_limit_bytes", "replica");
  const of = (name, number) => (several ? byLabel(numbers, `tgi_replica_${name}`, "replica")[number] : numbers[`tgi_${name}`]) ?? 0;
  const restarts = (number) => (several ? of("restarts", number) : numbers.tgi_engine_restarts) ?? 0;
  const age = (number) => (several ? of("heartbeat_age_seconds", number) : numbers.tgi_engine_heartbeat_age_seconds) ?? 0;
  const rows = sample.engines.map((engine, number) => [
    cell(String(number), "number"),
    cell(engine.state, engine.state === "up" ? "good" : "bad"),
    cell(`${start.ranks} × ${engine.device || "?"}`),
    cell(count(of("batch_current_size", number)), "number"),
    cell(count(of("queue_size", number)), "number"),
    cell(share(of("kv_usage_ratio", number)), "number"),
    cell(`${bytes(used[number])} of ${bytes(total[number])}`, "number"),
    cell(duration(age(number)), "number"),
    cell(count(restarts(number)), "number"),
  ]);
  fill(table, [["Replica", "number"], ["State", ""], ["Ranks", ""], ["Running", "number"], ["Waiting", "number"], ["KV", "number"], ["Memory", "number"], ["Sign of life", "number"], ["Restarts", "number"]], rows, "No engine");
}
