// What every chart on a canvas has: its size, colours of the theme, axes of time and value, the cursor, and words for it.

import { clock } from "./units.js";

const LABEL_PX = 55;  // of a time, with room
export const PAD = { left: 52, right: 10, top: 8, bottom: 20 };

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    ink: read("--ink"), soft: read("--soft"), line: read("--line"), card: read("--card"), heat: read("--heat"),
    series: (name) => read(`--${name}`),
  };
}

// A step of 1, 2 or 5 times a power of ten, so that `most` has about four of them.
export function niceStep(most) {
  const rough = most / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= rough);
}

export class Plot {
  constructor({ title, about, small = false }) {
    this.figure = document.createElement("figure");
    this.figure.className = "card chart";
    const head = document.createElement("figcaption");
    const heading = document.createElement("h2");
    heading.textContent = title;
    this.legend = document.createElement("p");
    this.legend.className = "legend small";
    head.append(heading, this.legend);
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${title}: ${about}. Left and right arrow keys read values.`);
    if (small) this.canvas.classList.add("small-chart");
    this.readout = document.createElement("p");
    this.readout.className = "readout small";
    this.readout.setAttribute("aria-live", "polite");
    this.figure.append(head, this.canvas, this.readout);
    this.title = title;
    this.points = [];
    this.cursor = null;  // a time
    this.#listen();
  }

  #listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => this.#point(event.offsetX, false));
    canvas.addEventListener("pointerdown", (event) => this.#point(event.offsetX, false));
    canvas.addEventListener("pointerleave", () => this.#leave());
    canvas.addEventListener("blur", () => this.#leave());
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.#leave();
      if (!step || !this.points.length) return;
      event.preventDefault();
      const times = this.points.map((point) => point.at);
      const place = this.cursor === null ? times.length : times.findIndex((at) => at >= this.cursor);
      this.cursor = times[Math.max(0, Math.min(times.length - 1, (place < 0 ? times.length : place) + step))];
      this.render();
    });
  }

  #point(x) {
    if (!this.points.length) return;
    const width = this.canvas.clientWidth - PAD.left - PAD.right;
    const at = this.from + ((x - PAD.left) / width) * (this.to - this.from);
    this.cursor = this.points.reduce((best, point) => (Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best)).at;
    this.render();
  }

  #leave() {
    this.cursor = null;
    this.readout.textContent = "";
    this.render();
  }

  show(points, to, seconds) {
    this.points = points;
    this.to = to;
    this.from = to - seconds;
    this.render();
  }

  render() {
    const canvas = this.canvas;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !this.to) return;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    const area = { left: PAD.left, top: PAD.top, width: width - PAD.left - PAD.right, height: height - PAD.top - PAD.bottom };
    const x = (at) => area.left + ((at - this.from) / (this.to - this.from)) * area.width;
    const colour = colours();
    this.draw(pen, area, x, colour);
    this.#timeAxis(pen, area, x, colour);
    const point = this.cursor === null ? null : this.points.find((each) => each.at === this.cursor);
    if (point) {
      pen.strokeStyle = colour.soft;
      pen.setLineDash([3, 3]);
      pen.beginPath();
      pen.moveTo(x(point.at), area.top);
      pen.lineTo(x(point.at), area.top + area.height);
      pen.stroke();
      pen.setLineDash([]);
      this.readout.textContent = `${clock(point.at)}: ${this.read(point)}`;
    }
  }

  #timeAxis(pen, area, x, colour) {
    const seconds = this.to - this.from;
    let step = seconds <= 60 ? 15 : seconds <= 120 ? 30 : seconds <= 300 ? 60 : seconds <= 600 ? 120 : 180;
    if ((area.width * step) / seconds < LABEL_PX) step *= 2;
    pen.fillStyle = colour.soft;
    pen.textBaseline = "alphabetic";
    for (let back = 0; back <= seconds; back += step) {
      const left = seconds - back;
      if (back && left < step && (left || (area.width * step) / seconds < 1.6 * LABEL_PX)) continue;  // it would run into the next
      const words = back === 0 ? "now" : seconds <= 120 ? `−${back} s` : `−${back / 60} min`;
      pen.textAlign = back === 0 ? "right" : back === seconds ? "left" : "center";
      pen.fillText(words, x(this.to - back), area.top + area.height + 15);
    }
  }

  // Lines across with their values; `ticks` are [value in pixels from above, words].
  grid(pen, area, colour, ticks) {
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.lineWidth = 1;
    for (const [y, words] of ticks) {
      pen.strokeStyle = colour.line;
      pen.beginPath();
      pen.moveTo(area.left, Math.round(y) + 0.5);
      pen.lineTo(area.left + area.width, Math.round(y) + 0.5);
      pen.stroke();
      pen.fillStyle = colour.soft;
      pen.fillText(words, area.left - 6, y);
    }
  }

  // Legend entries: [colour name, words, value].
  say(entries) {
    if (this.legend.childElementCount !== entries.length) {
      this.legend.replaceChildren(...entries.map(([name, words]) => {
        const entry = document.createElement("span");
        const mark = document.createElement("i");
        mark.className = `mark ${name}`;
        mark.setAttribute("aria-hidden", "true");
        const value = document.createElement("b");
        entry.append(mark, `${words} `, value);
        return entry;
      }));
    }
    entries.forEach(([, , value], place) => {
      const shown = this.legend.children[place].lastChild;
      if (shown.textContent !== value) shown.textContent = value;
    });
  }
}
