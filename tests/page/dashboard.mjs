// The dashboard: what it shows of a server that works, for everybody, and what it leaves alone.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFile } from "node:fs/promises";
import { metric, shoot, until } from "./helpers.mjs";

const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

async function isAccessible(page, where) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const found = violations.filter(({ impact }) => impact !== "minor").map(({ id, nodes }) => `${where}: ${id} ${nodes.map((node) => node.target).join(" | ")}`);
  assert.deepEqual(found, []);
}

const post = (url, body, id) => fetch(`${url}/generate`, { method: "POST", headers: { "content-type": "application/json", "x-request-id": id }, body: JSON.stringify(body) });
const generate = (url, id, count) => post(url, { inputs: "Count up: 3, 4, 5, 6,", parameters: { max_new_tokens: count } }, id);

/** Work for a server until the page has seen two samples of it. */
async function underLoad(page, url) {
  const work = [generate(url, "dash-long", 300), ...Array.from({ length: 4 }, (_, number) => generate(url, `dash-${number}`, 20))];
  await page.waitForFunction(() => Number(document.querySelector("#tile-running").textContent) > 0);
  await post(url, { inputs: "x", parameters: { temperature: -1 } }, "<b>dash-wrong</b>");
  await Promise.all(work.map(async (answer) => assert.equal((await answer).status, 200)));
  await page.waitForFunction(() => document.querySelector("#slow").textContent.includes("dash-long"));
  await page.waitForFunction(() => document.querySelector("#errors").textContent.includes("dash-wrong"));
}

const painted = (page) => page.evaluate(() => [...document.querySelectorAll("canvas")].map((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let place = 0; place < pixels.length; place += 4) if (pixels[place + 3] > 200) colours.add(`${pixels[place]},${pixels[place + 1]},${pixels[place + 2]}`);
  return colours.size;
}));

export async function the_dashboard_shows_what_happens({ page, server, requests }) {
  await page.goto(`${server}/dashboard`);
  await page.waitForSelector("[data-state=live]");
  await underLoad(page, server);
  assert.equal(await page.locator("#model").innerText(), "embedded");
  const first = await page.locator("#tile-first").innerText();
  assert.match(first, /^[\d.]+\s(µs|ms|s)$/);
  assert.match(await page.locator("#note-kv").innerText(), / of [\d,.]+( k)? tokens/);
  assert.ok(Number(await page.locator("#tile-errors").innerText()) >= 1);
  assert.equal(await page.locator("#slow tbody tr").first().locator(".bar i").count(), 4);
  assert.match(await page.locator("#slow tbody tr", { hasText: "dash-long" }).locator(".bar").getAttribute("aria-label"), /checked .*, queued .*, prompt .*, tokens /);
  assert.equal(await page.locator("#errors b").count(), 0); // a request id is text
  assert.match(await page.locator("#engines").innerText(), /up\s+1 × /);
  const colours = await painted(page);
  assert.ok(colours.length === 9 && colours.every((count) => count >= 2), String(colours));
  assert.deepEqual([...new Set(requests.map((request) => new URL(request.url()).origin))], [server]);
  for (const scheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: scheme, reducedMotion: "reduce" });
    await page.waitForTimeout(1100); // the next sample is drawn in its colours
    await shoot(page, `dashboard_${scheme}`);
    await isAccessible(page, scheme);
  }
}

export async function the_dashboard_by_keys({ page, server }) {
  await page.goto(`${server}/dashboard`);
  await page.waitForSelector("[data-state=live]");
  await underLoad(page, server);
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.className), "skip");
  await page.keyboard.press("1");
  assert.equal(await page.locator("[data-seconds='60']").getAttribute("aria-pressed"), "true");
  await page.locator("canvas").first().focus();
  await page.keyboard.press("ArrowLeft");
  assert.match(await page.locator(".readout").first().innerText(), /^\d\d:\d\d:\d\d: running \d+, waiting \d+$/);
  await page.keyboard.press("Escape");
  assert.equal(await page.locator(".readout").first().innerText(), "");
  await page.keyboard.press("t");
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "light");
  await page.keyboard.press("p");
  assert.equal(await page.locator("#state-text").innerText(), "Paused");
  await page.keyboard.press("p");
  await page.waitForSelector("[data-state=live]");
}

export async function the_dashboard_listens_only_while_it_is_seen({ page, context, server }) {
  const open = () => metric(server, "tgi_http_connections");
  const before = await open();
  await page.goto(`${server}/dashboard`);
  await page.waitForSelector("[data-state=live]");
  const dropped = await metric(server, 'tgi_request_failure\\{err="dropped"\\}');
  await page.evaluate(() => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => true });
    document.dispatchEvent(new Event("visibilitychange"));
  });
  await page.waitForSelector("[data-state=off]");
  await page.evaluate(() => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => false });
    document.dispatchEvent(new Event("visibilitychange"));
  });
  await page.waitForSelector("[data-state=live]");
  await context.newPage().then((other) => page.close().then(() => other.close()));
  await until(async () => (await open()) <= before + 1, "the stream to be closed");
  assert.equal(await metric(server, 'tgi_request_failure\\{err="dropped"\\}'), dropped); // to leave is no failure
}

export async function the_dashboard_asks_for_the_key({ page, seeing, key }) {
  await page.goto(`${seeing}/dashboard`);
  await page.waitForSelector("#key-form:not([hidden])");
  await isAccessible(page, "key");
  await page.fill("#key", "wrong");
  await page.press("#key", "Enter");
  await page.waitForFunction(() => document.querySelector("#key-error").textContent);
  await page.fill("#key", key);
  await page.press("#key", "Enter");
  await page.waitForSelector("[data-state=live]");
  assert.equal(await page.locator("#key-form").isHidden(), true);
  assert.ok(!(await page.evaluate(() => JSON.stringify(localStorage))).includes(key));
  await page.reload();
  await page.waitForSelector("[data-state=live]");
}

export async function the_dashboard_fits_a_phone({ page, server }) {
  await page.goto(`${server}/dashboard`);
  await page.waitForSelector("[data-state=live]");
  await underLoad(page, server);
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "wider than the screen");
  await shoot(page, "dashboard_phone");
  await isAccessible(page, "phone");
}
the_dashboard_fits_a_phone.options = { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 };
