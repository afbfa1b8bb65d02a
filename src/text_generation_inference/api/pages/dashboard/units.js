// Numbers as people read them; a unit stays on the line of its number.

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds === 0) return "0\u00a0s";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)}\u00a0µs`;
  if (seconds < 0.01) return `${(seconds * 1e3).toFixed(2)}\u00a0ms`;
  if (seconds < 0.1) return `${(seconds * 1e3).toFixed(1)}\u00a0ms`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)}\u00a0ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)}\u00a0s`;
  return `${Math.floor(seconds / 60)}\u00a0min\u00a0${Math.round(seconds % 60)}\u00a0s`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10 && value % 1) return value.toFixed(1);
  if (value < 10000) return Math.round(value).toLocaleString("en");
  if (value < 1e6) return `${(value / 1e3).toFixed(1)} k`;
  return `${(value / 1e6).toFixed(1)} M`;
}

export const share = (value) => (value === null || value === undefined ? "–" : `${(value * 100).toFixed(value && value < 0.1 ? 1 : 0)}%`);

export function bytes(value) {
  if (!value) return "–";
  return value < 1e9 ? `${Math.round(value / 1e6)}\u00a0MB` : `${(value / 1e9).toFixed(value < 1e10 ? 2 : 1)}\u00a0GB`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
