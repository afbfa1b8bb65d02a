// For everybody: keys alone, screen readers, phones, slow networks.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFile } from "node:fs/promises";
import { speaking } from "./double.mjs";
import { ask, send, set, settled, shoot, until, visit } from "./helpers.mjs";

const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const RICH = "# Plan\n\nSome **text** with `code`, $x^2$ and a [link](https://example.com).\n\n- one\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\ndef f(x):  # why\n    return \"y\", 1, Some(x)\n```\n\n> quote\n\n- [x] done";

async function check(page, where) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const found = violations.filter(({ impact }) => impact !== "minor").map(({ id, impact, nodes }) => `${where}: ${id} (${impact}) ${nodes.map((node) => `${node.target} ${node.failureSummary}`).join(" | ")}`);
  assert.deepEqual(found, []);
}

export async function axe_finds_nothing_serious({ page, double }) {
  double.answers.rich = speaking(RICH, 30);
  double.answers.wrong = (to) => {
    to.writeHead(400);
    to.end("no");
  };
  await visit(page, double.url);
  await check(page, "welcome");
  await set(page, { max_tokens: 8, logprobs: true, top_logprobs: 3, temperature: 1.5 });
  await ask(page, "double:rich");
  await ask(page, "Say something.");
  await page.click("[aria-label='Show tokens']");
  await page.locator(".token-text .token").nth(1).click();
  await ask(page, "double:wrong");
  await page.evaluate(() => (document.querySelector("#toast").hidden = true));
  for (const scheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: scheme, reducedMotion: "reduce" });
    await check(page, `conversation, ${scheme}`);
  }
  await page.click("#settings-button");
  await page.evaluate(() => document.querySelectorAll("details").forEach((node) => (node.open = true)));
  for (const scheme of ["dark", "light"]) {
    await page.emulateMedia({ colorScheme: scheme });
    await check(page, `settings, ${scheme}`);
  }
  await page.click("#close-settings");
  await page.evaluate(() => (document.querySelector("#more").open = false));
  for (const [open, name] of [["#lanes", "lanes"], ["#keys-button", "keys"]]) {
    await page.click(open);
    await check(page, name);
    await page.keyboard.press("Escape");
  }
}

export async function keys_are_enough({ page, server }) {
  await visit(page, server);
  const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.getAttribute("aria-label") || document.activeElement.className);
  const press = async (...names) => {
    for (const name of names) await page.keyboard.press(name);
  };
  assert.equal(await focused(), "message");
  // Settings.
  await press("Control+,");
  await until(async () => (await focused()) === "system", "the settings");
  await page.waitForFunction(() => document.querySelector("#set-temperature")?.max === "2");
  await press("Tab", "Tab", "Tab");
  assert.equal(await focused(), "set-temperature");
  await page.keyboard.type("0");
  await press("Escape");
  assert.equal(await focused(), "settings-button");
  await press("/");
  assert.equal(await focused(), "message");
  // Send, stop, edit.
  await page.keyboard.type("Count to");
  await press("Shift+Enter");
  await page.keyboard.type("five hundred.");
  await press("Enter");
  await page.waitForSelector(".message.running .markdown p");
  await press("Escape");
  await settled(page, 1);
  assert.equal(await page.locator(".message.user .plain-text").innerText(), "Count to\nfive hundred.");
  assert.match(await page.locator(".notes").last().innerText(), /stopped/);
  await press("ArrowUp");
  assert.equal(await page.evaluate(() => document.activeElement.value), "Count to\nfive hundred.");
  await press("Escape");
  assert.equal(await page.locator(".message.user textarea").count(), 0);
  // To an answer's buttons by Tab alone.
  await press("/");
  await press("Shift+Tab");
  for (let count = 0; (await focused()) !== "Retry" && count < 12; count += 1) await press("Shift+Tab");
  assert.equal(await focused(), "Retry");
  await press("Enter");
  await page.waitForSelector(".message.running");
  await press("Escape");
  await settled(page, 1);
  assert.equal(await page.locator(".version").innerText(), "2 / 2");
  // Search, a new conversation, the list of keys.
  await press("Control+k");
  assert.equal(await focused(), "search");
  await press("Control+Shift+O");
  assert.equal(await page.locator("#welcome").isVisible(), true);
  await press("Control+/");
  assert.equal(await page.locator("#keys-dialog").isVisible(), true);
  await press("Escape");
  assert.equal(await page.locator("#keys-dialog").isVisible(), false);
  // Everything that has the focus shows it.
  await page.evaluate(() => document.body.focus());
  for (let count = 0; count < 12; count += 1) {
    await press("Tab");
    const seen = await page.evaluate(() => {
      const node = document.activeElement;
      const frame = node.id === "message" ? node.closest("form") : node;
      return node === document.body || getComputedStyle(frame).outlineStyle !== "none" || getComputedStyle(frame).boxShadow !== "none";
    });
    assert.ok(seen, await focused());
  }
}

export async function tokens_by_keys({ page, server }) {
  await visit(page, server);
  await set(page, { max_tokens: 8, logprobs: true, top_logprobs: 2, temperature: 0 });
  await ask(page, "Say something.");
  await page.focus("[aria-label='Show tokens']");
  await page.keyboard.press("Enter");
  await page.focus(".token-text .token");
  for (const name of ["ArrowRight", "ArrowRight", "Enter"]) await page.keyboard.press(name);
  assert.equal(await page.locator(".token.open").getAttribute("data-index"), "2");
  assert.equal(await page.locator(".token-detail > div").count(), 2);
}

export async function it_fits_a_phone({ page, double }) {
  double.answers.rich = speaking(RICH, 30);
  await visit(page, double.url);
  const fits = async () => assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "wider than the screen");
  await fits();
  await page.fill("#message", "double:rich");
  await page.press("#message", "Enter"); // a line, on phones
  assert.equal(await page.locator(".message").count(), 0);
  await page.fill("#message", "double:rich");
  await page.tap("#send");
  await settled(page, 1);
  await fits();
  await shoot(page, "phone");
  await check(page, "phone");
  assert.equal(await page.locator("#search").isVisible(), false);
  await page.tap("#menu");
  await page.waitForFunction(() => document.querySelector("#sidebar").getBoundingClientRect().left === 0);
  await shoot(page, "phone_menu");
  await page.tap("#new");
  await page.waitForFunction(() => document.querySelector("#sidebar").getBoundingClientRect().right <= 0);
  assert.equal(await page.locator("#welcome").isVisible(), true);
  await page.tap("#settings-button");
  await page.waitForSelector("#set-temperature");
  await shoot(page, "phone_settings");
  await fits();
}
it_fits_a_phone.options = { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 };

export async function a_slow_network_is_enough({ page, context, server }) {
  const session = await context.newCDPSession(page);
  await session.send("Network.enable");
  await session.send("Network.emulateNetworkConditions", { offline: false, latency: 300, downloadThroughput: 60_000, uploadThroughput: 20_000 });
  await page.goto(`${server}/chat`, { waitUntil: "commit" });
  await page.waitForSelector("#facts li");
  await set(page, { max_tokens: 16, temperature: 0 });
  await send(page, "Say something.");
  await page.waitForSelector(".message.running .waiting");
  await settled(page, 1);
  assert.match(await page.locator(".notes").last().innerText(), /\d tokens/);
  // The network is gone, and comes back.
  await session.send("Network.emulateNetworkConditions", { offline: true, latency: 0, downloadThroughput: 0, uploadThroughput: 0 });
  await send(page, "Once more.");
  await page.waitForSelector(".error");
  assert.match(await page.locator(".error").innerText(), /No connection/);
  await page.waitForSelector(".dot.offline");
  await session.send("Network.emulateNetworkConditions", { offline: false, latency: 0, downloadThroughput: -1, uploadThroughput: -1 });
  await page.waitForSelector(".dot.ready");
  await page.click(".error button");
  await settled(page, 2);
  assert.equal(await page.locator(".error").count(), 0);
}
